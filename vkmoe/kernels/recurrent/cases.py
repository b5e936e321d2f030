"""Compares delta_inputs, delta_step and gate_heads with their twins, over texts cut anywhere.

A text is given in batches of any size, beside another one; what each row leaves must not depend on
that, to the bit. What was never written is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.batch import TokenBatch
from vkmoe.facts import RING_ROWS, DeltaNetSpec
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.runner import SENTINEL, Runner
from vkmoe.gpu.token_io import pack_params, param_words
from vkmoe.kernels.comparison import Checks, KernelCase, Prepared, Words
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.family import Family, Setting, Setup, Trial, Used, Work, trial
from vkmoe.kernels.inputs import EPS
from vkmoe.kernels.recurrent import twins
from vkmoe.kernels.recurrent.operations import (
    DeltaMemory,
    DeltaShape,
    DeltaSplit,
    Gate,
    HeadGates,
    Projected,
    choose_split,
    delta_inputs,
    delta_step,
    gate_heads,
)
from vkmoe.kernels.rows import N_DRAWN, RowBatch, RowCase, Rowed, RowsCase
from vkmoe.kernels.tuning import Tuning

Singles = NDArray[np.float32]
SMALL = DeltaShape(n_key_heads=2, n_heads=6, head_dim=32, n_taps=4, tiled=True, n_versions=3)
# How many rows of the first text, and of a second one behind them, each batch has.
CUTS = ((3, 2), (1, 0), (1, 8), (40, 0), (0, 1), (2, 6), (1, 1))
N_REGIONS, FIRST, SECOND = 3, 2, 0  # regions of a cache, and those of both texts
BEHIND = 5  # words of rows that are something else


class _Text(NamedTuple):
    """Holds what a sequence's rows are, and what a twin makes of each."""

    projected: Singles  # [n_rows, words]
    mixed: NDArray[np.float64]  # [n_rows, mixed_words]
    out: NDArray[np.float64]  # [n_rows, n_heads * head_dim]
    states: NDArray[np.float64]  # behind each row [n_rows, n_heads, head_dim, head_dim]


@dataclass(frozen=True)
class DeltaCase:
    """Runs two texts in batches, and compares all that each leaves."""

    tuning: Tuning
    shape: DeltaShape
    split: DeltaSplit | None = None
    cuts: Sequence[tuple[int, int]] = CUTS

    def run(self, runner: Runner) -> Checks:
        """Compare with the twin, then with the bits that the rows have one at a time."""
        checks = Checks()
        found = self.compare_texts(runner, checks, self.cuts)
        single = [cut for n, m in self.cuts for cut in (*[(1, 0)] * n, *[(0, 1)] * m)]
        with runner.another() as other:
            alone = self.compare_texts(other, Checks(), single)
        for row, words in found.items():
            checks.equal(f"row {row}, alone", words, alone[row])
        return checks

    def compare_texts(
        self, runner: Runner, checks: Checks, cuts: Sequence[tuple[int, int]]
    ) -> dict[tuple[int, int], Words]:
        """Run both texts; returns what comes out of each row, by region and position."""
        shape, rng = self.shape, np.random.default_rng(0)
        taps = rng.normal(0, 0.5, (shape.n_channels, shape.n_taps)).astype(np.float32)
        scales = -np.exp(rng.uniform(-2, 1.5, shape.n_heads)).astype(np.float32)
        biases = rng.normal(0, 1, shape.n_heads).astype(np.float32)
        rings = np.full((N_REGIONS, RING_ROWS, shape.n_channels), np.nan, np.float32)
        sizes = N_REGIONS, shape.n_versions, shape.n_heads, shape.head_dim, shape.head_dim
        states = np.full(sizes, np.nan, np.float32)
        memory = DeltaMemory(
            ring=runner.place(rings),
            states=runner.place(states),
            taps=runner.place(taps),
            scales=runner.place(scales),
            biases=runner.place(biases),
            n_regions=N_REGIONS,
        )
        texts = {
            region: self._text(rng, sum(cut[turn] for cut in self.cuts), taps, scales, biases)
            for turn, region in enumerate((FIRST, SECOND))
        }
        ends, found = dict.fromkeys(texts, 0), dict[tuple[int, int], Words]()
        for cut in cuts:
            rows = []
            for region, n_rows in zip(texts, cut, strict=True):
                rows += [(region, ends[region] + i) for i in range(n_rows)]
                ends[region] += n_rows
            words = self._batch(runner, checks, memory, texts, rows)
            found |= dict(zip(rows, words, strict=True))
            self._compare_kept(runner, checks, memory, texts, ends)
        return found

    def _text(
        self, rng: np.random.Generator, n_rows: int, taps: Singles, scales: Singles, biases: Singles
    ) -> _Text:
        shape, heads, dim = self.shape, self.shape.n_heads, self.shape.head_dim
        n, keys = shape.n_channels, shape.n_key_heads * shape.head_dim
        given = rng.normal(0, 1, (n_rows, n + 2 * heads + BEHIND)).astype(np.float32)
        mixed = np.empty((n_rows, shape.mixed_words))
        before = np.zeros((shape.n_taps - 1, n), np.float32)
        mixed[:, :n] = twins.convolve(given[:, :n], before, taps)
        both = mixed[:, : 2 * keys].reshape(n_rows, -1, dim)
        both[:] = twins.unit(both)
        mixed[:, :keys] *= dim**-0.5
        beta, alpha = given[:, n : n + heads], given[:, n + heads : n + 2 * heads]
        mixed[:, n : n + heads] = twins.decay(alpha, scales, biases)
        mixed[:, n + heads :] = twins.sigmoid(beta)
        of_head = np.arange(heads)
        key_heads = of_head % shape.n_key_heads
        if not shape.tiled:
            key_heads = of_head // (heads // shape.n_key_heads)
        state, out, states = np.zeros((heads, dim, dim)), [], []
        for row in mixed:
            q, k = (part.reshape(-1, dim)[key_heads] for part in np.split(row[: 2 * keys], 2))
            v, gates = row[2 * keys : n].reshape(heads, dim), row[n:]
            left, state = twins.delta_step(q, k, v, gates[:heads, None], gates[heads:], state)
            out.append(left.ravel())
            states.append(state)
        empty = np.zeros((0, heads, dim, dim))
        return _Text(
            given,
            mixed,
            np.array(out).reshape(n_rows, shape.out_words),
            np.array(states) if states else empty,
        )

    def _batch(
        self,
        runner: Runner,
        checks: Checks,
        memory: DeltaMemory,
        texts: dict[int, _Text],
        rows: Sequence[tuple[int, int]],
    ) -> Words:
        """Run rows by region and position, in a program with a row more, which is inert.

        Returns what comes out of each.
        """
        shape, n_rows = self.shape, len(rows) + 1
        program, refs = self._program(memory, n_rows)
        params, given, *left = refs
        words = np.full(params.n_words, SENTINEL, np.uint32)
        regions, positions = zip(*rows, strict=True)
        flags = (True,) * len(rows)
        pack_params(words.data, TokenBatch(positions, positions, regions, flags), 0, serial=1)
        values = np.full((n_rows, given.row_words), np.nan, np.float32)
        values[:-1] = [texts[region].projected[at] for region, at in rows]
        mixed, out = runner.run(program, {params: words, given: values}, *left)
        of_rows = [texts[region].mixed[at] for region, at in rows]
        _compare_rows(checks, "mixed", mixed, np.stack(of_rows))
        _compare_rows(checks, "out", out, np.stack([texts[region].out[at] for region, at in rows]))
        return out.reshape(n_rows, -1)[:-1, : shape.out_words]

    def _program(self, memory: DeltaMemory, n_rows: int) -> tuple[Program, list[TensorRef]]:
        """Make the program of so many rows; returns its tensors: inputs, then what it leaves."""
        shape, n = self.shape, self.shape.n_channels
        params = TensorRef(f"params of {n_rows}", param_words(n_rows))
        widths = n + 2 * shape.n_heads + BEHIND, shape.mixed_words + 1, shape.out_words + 2
        given, mixed, out = (
            TensorRef(f"{name} of {n_rows}", n_rows * width, n_rows)
            for name, width in zip(("projected", "mixed", "out"), widths, strict=True)
        )
        program = Program(f"{n_rows} rows")
        op = OpContext(program, self.tuning, "case", n_rows=n_rows)
        projected = Projected(given, beta_offset=n, alpha_offset=n + shape.n_heads)
        delta_inputs(op, shape, memory, projected, params, mixed)
        split = self.split or choose_split(shape, self.tuning)
        delta_step(op, shape, split, memory, mixed, params, out)
        return program, [params, given, mixed, out]

    def _compare_kept(
        self,
        runner: Runner,
        checks: Checks,
        memory: DeltaMemory,
        texts: dict[int, _Text],
        ends: dict[int, int],
    ) -> None:
        """Compare what is kept of the last positions of each text; the rest is as it was."""
        shape, dim = self.shape, self.shape.head_dim
        kept = [
            runner.fetch(at, N_REGIONS * n_bytes).view(np.float32)
            for at, n_bytes in (
                (memory.ring, shape.ring_bytes),
                (memory.states, shape.states_bytes),
            )
        ]
        rings = kept[0].reshape(N_REGIONS, RING_ROWS, shape.n_channels)
        states = kept[1].reshape(N_REGIONS, shape.n_versions, shape.n_heads, dim, dim)
        others = [region for region in range(N_REGIONS) if region not in texts]
        checks.equal("rings of others", np.isnan(rings[others]), np.ones_like(rings[others], bool))
        for region, text in texts.items():
            for at in range(max(0, ends[region] - RING_ROWS), ends[region]):
                ring = rings[region, at % RING_ROWS]
                checks.equal("ring", ring, text.projected[at, : shape.n_channels])
            for at in range(max(0, ends[region] - shape.n_versions), ends[region]):
                state = states[region, at % shape.n_versions]
                checks.close("state", state, text.states[at], 1.0, 2e-5)


def _compare_rows(checks: Checks, name: str, found: Words, wanted: NDArray[np.float64]) -> None:
    """Compare the rows of a tensor, of which the last is inert, with a twin's [n_rows, width]."""
    found = found.reshape(len(wanted) + 1, -1)
    width = wanted.shape[1]
    checks.close(name, found[:-1, :width].view(np.float32), wanted, 1.0, 2e-5)
    checks.untouched(f"words behind {name}", found[:-1, width:])
    checks.untouched(f"an inert row of {name}", found[-1])


@dataclass(frozen=True)
class DecaysCase(KernelCase):
    """Checks delta_step with a decay for each row of a state, over the first rows of a text."""

    tuning: Tuning
    shape: DeltaShape
    n_rows: int = 5

    def prepare(self, runner: Runner) -> Prepared:
        shape, rng, n = self.shape, np.random.default_rng(0), self.n_rows
        heads, dim, keys = shape.n_heads, shape.head_dim, shape.n_key_heads
        given = rng.normal(0, 0.3, (n, shape.mixed_words)).astype(np.float32)
        gates = given[:, shape.n_channels :]
        gates[:] = rng.uniform(0.1, 1.0, gates.shape)
        memory = DeltaMemory(0, runner.place(np.zeros(shape.states_bytes, np.uint8)), 0, 0, 0)
        params = TensorRef("params", param_words(n))
        mixed, out = TensorRef("mixed", given.size, n), TensorRef("out", n * shape.out_words, n)
        program = Program("decays")
        op = OpContext(program, self.tuning, "case", n_rows=n)
        delta_step(op, shape, choose_split(shape, self.tuning), memory, mixed, params, out)
        words, rows = np.empty(params.n_words, np.uint32), tuple(range(n))
        pack_params(words.data, TokenBatch(rows, rows, (0,) * n, (True,) * n), 0, serial=1)
        state, wanted = np.zeros((heads, dim, dim)), []
        for row in given:
            parts = row[: shape.n_channels].reshape(-1, dim)
            of_head = np.arange(heads) % keys
            q, k, v = parts[of_head], parts[keys + of_head], parts[2 * keys :]
            decays, beta = np.split(row[shape.n_channels :], [heads * dim])
            left, state = twins.delta_step(q, k, v, decays.reshape(heads, dim), beta, state)
            wanted.append(left.ravel())

        def compare(checks: Checks, found: Sequence[Words]) -> None:
            values = found[0].reshape(n, -1).view(np.float32)
            checks.close("out", values, np.array(wanted), 1.0, 2e-5)

        return Prepared(program, (out,), [({params: words, mixed: given}, compare)])


@dataclass(frozen=True)
class GateCase(RowCase):
    """Checks gates of some heads; `normed`: behind a norm."""

    tuning: Tuning
    n_heads: int
    head_dim: int
    gate: Gate
    normed: bool

    def append(self, runner: Runner, op: OpContext, batch: RowBatch) -> Rowed:
        rng, width, offset = np.random.default_rng(0), self.n_heads * self.head_dim, 3
        heads = rng.normal(0, 2, (N_DRAWN, width)).astype(np.float32)
        raw = rng.normal(0, 3, (N_DRAWN, offset + width + 1)).astype(np.float32)
        gain = rng.uniform(-2, 2, self.head_dim).astype(np.float32) if self.normed else None
        address = runner.place(gain) if gain is not None else 0
        refs = batch.tensor("heads", width + 2), batch.tensor("gates", raw.shape[1])
        gates = HeadGates(refs[1], offset, self.gate, address, EPS)
        gate_heads(op, refs[0], self.head_dim, self.n_heads, gates, batch.params_ref)

        def compare(row: int, checks: Checks, words: Sequence[Words]) -> None:
            shape = self.n_heads, self.head_dim
            of_row = raw[row, offset : offset + width].reshape(shape)
            given, is_silu = heads[row].reshape(shape), self.gate == "silu"
            wanted = twins.gate_heads(given, of_row, is_silu, gain, EPS).ravel()
            found = words[0][:width].view(np.float32)
            checks.close("heads", found, wanted, np.abs(wanted) + 1e-6)
            checks.untouched("the words behind", words[0][width:])

        return Rowed({refs[0]: heads, refs[1]: raw}, (refs[0],), compare, lambda of: of.params())


# ----- what is compared -----


def _delta(setting: Setting) -> Iterator[Trial]:
    """Compare with both orders of heads, one version and several, one lane a column and several."""
    odd = replace(SMALL, n_key_heads=3, tiled=False, n_versions=1, n_taps=3, head_dim=64)
    for shape, split in ((SMALL, None), (odd, None), (SMALL, DeltaSplit(8, 4))):
        case = DeltaCase(setting.tuning, shape, split)
        yield Trial(f"{shape.n_heads} heads of {shape.head_dim}, {split}", [case.run])


def _step(setting: Setting) -> Iterator[Trial]:
    """Compare as above, and with a decay for each row of a state."""
    yield from _delta(setting)
    shape = replace(SMALL, n_decays=SMALL.head_dim)
    yield trial(DecaysCase(setting.tuning, shape), what="a decay for each row")


def _gates(setting: Setting) -> Iterator[Trial]:
    kinds: tuple[Gate, ...] = ("silu", "sigmoid")
    for gate in kinds:
        case = GateCase(setting.tuning, 3, 40, gate, normed=gate == "silu")
        yield trial(case, RowsCase(case), what=gate)


# ----- what is measured -----


def _shapes(setup: Setup) -> Iterator[DeltaShape]:
    for mixer in setup.shapes.mixers:
        if isinstance(mixer, DeltaNetSpec):
            yield DeltaShape.of(mixer, n_versions=1)


def _delta_works(setup: Setup) -> Iterator[Work]:
    """Read and write the state of a layer for a token."""
    for shape in _shapes(setup):
        case = DeltaCase(setup.tuning, shape, cuts=((2, 1), (1, 0)))
        text = f"delta rule, {shape.n_heads} heads of {shape.head_dim}"
        n_bytes = 2 * shape.states_bytes
        if setup.variant.family == "delta_inputs":
            n_bytes = 4 * shape.n_channels * (1 + 2 * shape.n_taps)
            text = f"inputs of the {text}"
        yield Work(text, n_bytes, case.run)


def _gate_works(setup: Setup) -> Iterator[Work]:
    for shape in _shapes(setup):
        case = GateCase(setup.tuning, shape.n_heads, shape.head_dim, "silu", normed=True)
        yield Work(f"gates of {shape.n_heads} heads", 12 * shape.out_words, case.run)


# ----- what a model uses -----


@dataclass(frozen=True)
class DeltaProbe:
    """Checks two texts in one batch, each from its beginning on."""

    case: DeltaCase

    def run(self, runner: Runner) -> Checks:
        """Compare all that it leaves."""
        checks = Checks()
        self.case.compare_texts(runner, checks, self.case.cuts)
        return checks


def _delta_probe(used: Used) -> DeltaProbe:
    """Compare both kernels: the second reads what the first leaves."""
    mixer = used.mixer
    return DeltaProbe(DeltaCase(used.tuning, mixer.shape, mixer.split, cuts=((4, 2),)))


def _gate_probe(used: Used) -> GateCase:
    numbers, normed = used.numbers, used.numbers["gain"] != 0
    gate: Gate = "silu" if numbers["is_silu"] else "sigmoid"
    return GateCase(used.tuning, used.groups[0], numbers["head_dim"], gate, normed)


FAMILIES = {
    "delta_inputs": Family(_delta, _delta_works, "reduce_suffix", _delta_probe),
    "delta_step": Family(_step, _delta_works, probe=_delta_probe),
    "gate_heads": Family(_gates, _gate_works, "reduce_suffix", _gate_probe),
}
