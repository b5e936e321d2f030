"""Compares rms_norm with its twin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vkmoe.gpu.runner import Runner
from vkmoe.kernels.comparison import Checks, Words
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.family import Family, Setting, Setup, Trial, Work, trial
from vkmoe.kernels.norms import twins
from vkmoe.kernels.norms.operations import rms_norm
from vkmoe.kernels.rows import N_DRAWN, RowBatch, RowCase, Rowed, RowsCase
from vkmoe.kernels.tuning import Tuning


@dataclass(frozen=True)
class RmsNormCase(RowCase):
    """Checks `width` values of size `size`, normalised with `eps`."""

    tuning: Tuning
    width: int
    size: float = 1.0
    eps: float = 1e-6

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


def _rms_norm(setting: Setting) -> Iterator[Trial]:
    case = RmsNormCase(setting.tuning, 1531)
    yield trial(case, RowsCase(case))


def _rms_norm_works(setup: Setup) -> Iterator[Work]:
    width = setup.shapes.width
    yield Work(f"norm of {width}", 8 * width, RmsNormCase(setup.tuning, width).run)


FAMILIES = {"rms_norm": Family(_rms_norm, _rms_norm_works, "reduce_suffix")}
