"""Compares rms_norm and norm_residual with their twins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vkmoe.gpu.runner import Runner
from vkmoe.kernels.comparison import Checks, Words
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.family import Family, Setting, Setup, Trial, Used, Work, trial
from vkmoe.kernels.inputs import EPS, LeftState
from vkmoe.kernels.norms import twins
from vkmoe.kernels.norms.operations import NormedPart, norm_residual, rms_norm
from vkmoe.kernels.rows import N_DRAWN, RowBatch, RowCase, Rowed, RowsCase
from vkmoe.kernels.tuning import Tuning


@dataclass(frozen=True)
class RmsNormCase(RowCase):
    """Checks `width` values of size `size`, normalised with `eps`."""

    tuning: Tuning
    width: int
    size: float = 1.0
    eps: float = EPS

    def append(self, runner: Runner, op: OpContext, batch: RowBatch) -> Rowed:
        rng = np.random.default_rng(self.width)
        x = np.full((N_DRAWN, self.width + 3), np.nan, np.float32)
        parts = x[:, : self.width]
        parts[:] = self.size * rng.standard_normal((N_DRAWN, self.width))
        gain = rng.uniform(-2.0, 2.0, self.width).astype(np.float32)
        x_ref, y_ref = batch.tensor("x", x.shape[1]), batch.tensor("y", self.width + 2)
        address = runner.place(gain)
        rms_norm(op, x_ref, y_ref, self.width, address, self.eps)

        def compare(row: int, checks: Checks, words: Sequence[Words]) -> None:
            found, wanted = words[0], twins.rms_norm(parts[row], gain, self.eps)
            checks.close("y", found[: self.width].view(np.float32), wanted, np.abs(wanted))
            checks.untouched("the words behind y", found[self.width :])

        return Rowed({x_ref: x}, (y_ref,), compare)


@dataclass(frozen=True)
class NormResidualCase(RowCase):
    """Checks the norm of the sum of parts, of which some are `normed` before, added to hidden.

    `size` is that of the parts. `leaves`: something for the next norm.
    """

    tuning: Tuning
    width: int
    normed: tuple[bool, ...]
    scaled: bool = False
    leaves: bool = True
    size: float = 1.0
    eps: float = EPS

    def append(self, runner: Runner, op: OpContext, batch: RowBatch) -> Rowed:
        rng, width = np.random.default_rng(self.width), self.width
        inputs, parts, rows = {}, [], []
        for i, is_normed in enumerate(self.normed):
            drawn = np.full((N_DRAWN, width + 4), np.nan, np.float32)
            drawn[:, :width] = self.size * rng.standard_normal((N_DRAWN, width))
            gain = rng.uniform(-2.0, 2.0, width).astype(np.float32) if is_normed else None
            ref = batch.tensor(f"part {i}", width + 4)
            parts.append(NormedPart(ref, 0 if gain is None else runner.place(gain)))
            rows.append((drawn[:, :width], gain))
            inputs[ref] = drawn
        gain = rng.uniform(-2.0, 2.0, width).astype(np.float32)
        scale = np.array([0.37 if self.scaled else 1.0], np.float32)
        left = LeftState(runner, batch, width, width, rng)
        output = left.refs if self.leaves else replace(left.refs, gain=0)
        places = runner.place(gain), runner.place(scale) if self.scaled else 0
        n_left = norm_residual(op, parts, places[0], output, width, self.eps, places[1])
        assert n_left == int(self.leaves)

        def compare(row: int, checks: Checks, words: Sequence[Words]) -> None:
            of_row = [twins.NormedRow(values[row], own) for values, own in rows]
            before, factor = left.before[row], float(scale[0])
            wanted = twins.norm_residual(of_row, before, gain, left.gain, self.eps, factor)
            sums = np.sum([part.normed(self.eps) for part in of_row], axis=0)
            sizes = np.sum([np.abs(part.normed(self.eps)) for part in of_row], axis=0)
            sizes = sizes / np.sqrt(np.mean(sums**2) + self.eps) * np.abs(gain)
            magnitude = factor * (np.abs(before) + sizes)
            if self.leaves:
                left.compare(checks, words, wanted, magnitude)
            else:
                left.compare_hidden(checks, words, wanted, magnitude)

        return Rowed({**inputs, **left.inputs}, left.outputs, compare)


def _rms_norm(setting: Setting) -> Iterator[Trial]:
    case = RmsNormCase(setting.tuning, 1531)
    yield trial(case, RowsCase(case))


def _rms_norm_works(setup: Setup) -> Iterator[Work]:
    width = setup.shapes.width
    yield Work(f"norm of {width}", 8 * width, RmsNormCase(setup.tuning, width).run)


def _norm_residual(setting: Setting) -> Iterator[Trial]:
    """Compare one part and two, as Gemma 2 and Gemma 4 have them."""
    for what, normed in (("one part", (False,)), ("two parts", (True, True))):
        cases = [
            NormResidualCase(setting.tuning, width, normed, scaled=len(normed) == 2)
            for width in (256, 2816, 32 * 7)
        ]
        silent = replace(cases[0], leaves=False)
        yield trial(*cases, silent, RowsCase(cases[0]), what=what)
    alone = NormResidualCase(setting.tuning, 256, (False, True))
    yield trial(alone, replace(alone, normed=(True,)), what="other norms")


def _norm_residual_works(setup: Setup) -> Iterator[Work]:
    width = setup.shapes.width
    for normed in ((False,), (True, True)):
        case = NormResidualCase(setup.tuning, width, normed)
        n_bytes = 4 * width * (5 + len(normed) + sum(normed))
        yield Work(f"{len(normed)} parts of {width}, normed and added", n_bytes, case.run)


def _rms_norm_probe(used: Used) -> RmsNormCase:
    return RmsNormCase(used.tuning, used.numbers["width"])


def _norm_residual_probe(used: Used) -> NormResidualCase:
    numbers = used.numbers
    normed = [numbers["a_gain"] != 0, numbers["b_gain"] != 0][: numbers["n_parts"]]
    return NormResidualCase(
        used.tuning,
        4 * numbers["row_vec4s"],
        tuple(normed),
        scaled=numbers["scale"] != 0,
        leaves=numbers["gain"] != 0,
    )


FAMILIES = {
    "rms_norm": Family(_rms_norm, _rms_norm_works, "reduce_suffix", _rms_norm_probe),
    "norm_residual": Family(
        _norm_residual, _norm_residual_works, "reduce_suffix", _norm_residual_probe
    ),
}
