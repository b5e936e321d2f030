"""Compares the kernels that read whole matrices with their twins: matvec, matvec_residual,
matvec_heads and embed, one random configuration each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.runner import SENTINEL, Runner
from vkmoe.ops.context import OpContext
from vkmoe.ops.matvec import HeadParts, embed, matvec, matvec_heads, matvec_residual
from vkmoe.ops.tuning import Tuning
from vkmoe.reference.matvec import embed as embed_twin
from vkmoe.reference.matvec import matvec as matvec_twin
from vkmoe.reference.matvec import matvec_heads as heads_twin
from vkmoe.reference.matvec import matvec_residual as residual_twin
from vkmoe.selftest.comparison import Checks
from vkmoe.selftest.inputs import PARAMS, Bytes, Placed, params_words, place_matrix
from vkmoe.selftest.norms import LeftState, NormedInput

__all__ = ["EmbedCase", "HeadsCase", "MatvecCase", "ResidualCase"]

Floats = NDArray[np.float32]
Wide = NDArray[np.float64]


@dataclass(frozen=True)
class MatvecCase:
    """Checks matrices [(type, rows)] of `n_columns` times one x, plus biases if it is `biased`.

    `n_partials` 0: without the norm.
    """

    tuning: Tuning
    segments: tuple[tuple[str, int], ...]
    n_columns: int
    n_partials: int = 0
    seed: int = 0
    biased: bool = False

    @property
    def biases(self) -> Floats:
        """Draw float32 [rows of all matrices], of the size of the products."""
        n_rows = sum(n_rows for _, n_rows in self.segments)
        return _biases(n_rows, self.seed) * np.float32(self.biased)

    def run(self, runner: Runner, file_rows: Sequence[Bytes] | None = None) -> Checks:
        """Compare; `file_rows` are given matrices in place of random ones.

        Rows with a value that is not finite are left out.
        """
        placed, source, words = self._run(runner, file_rows)
        checks = Checks()
        parts = [_twin_rows(item, source.x, source.scale) for item in placed]
        wanted, magnitude = (np.concatenate(part) for part in zip(*parts, strict=True))
        wanted, magnitude = wanted + self.biases, magnitude + np.abs(self.biases)
        sound = np.isfinite(wanted)
        checks.n_left_out = int(np.count_nonzero(~sound))
        found = words[:-1].view(np.float32)
        checks.close("y", found[sound], wanted[sound], magnitude[sound])
        checks.equal("the word behind y", words[-1:], np.array([SENTINEL], np.uint32))
        return checks

    def words(self, runner: Runner, file_rows: Sequence[Bytes]) -> NDArray[np.uint32]:
        """Return the bits of y, nothing compared."""
        return self._run(runner, file_rows)[2][:-1]

    def _run(
        self, runner: Runner, file_rows: Sequence[Bytes] | None
    ) -> tuple[list[Placed], NormedInput, NDArray[np.uint32]]:
        rng = np.random.default_rng(self.seed)
        source = NormedInput(self.n_columns, self.n_partials, rng)
        given: Sequence[Bytes | None] = file_rows or [None] * len(self.segments)
        placed = [
            place_matrix(runner, kind, n_rows, self.n_columns, rng, rows)
            for (kind, n_rows), rows in zip(self.segments, given, strict=True)
        ]
        y = TensorRef("y", sum(n_rows for _, n_rows in self.segments) + 1)
        program = self._program(runner, placed, source, y)
        (words,) = runner.run(program, source.inputs, y)
        return placed, source, words

    def time(self, runner: Runner) -> float | None:
        """Measure GB of weights per second on the device."""
        rng = np.random.default_rng(self.seed)
        placed = [
            place_matrix(runner, kind, n_rows, self.n_columns, rng)
            for kind, n_rows in self.segments
        ]
        source = NormedInput(self.n_columns, self.n_partials, rng)
        y = TensorRef("y", sum(n_rows for _, n_rows in self.segments) + 1)
        program = self._program(runner, placed, source, y)
        runner.run(program, source.inputs)
        runtime = runner.nanoseconds(program)
        n_bytes = sum(item.matrix.n_bytes for item in placed)
        return n_bytes / runtime if runtime else None

    def _program(
        self, runner: Runner, placed: Sequence[Placed], source: NormedInput, y: TensorRef
    ) -> Program:
        program = Program("matvec")
        matvec(
            OpContext(program, self.tuning, "matvec"),
            [item.matrix for item in placed],
            source.x_ref,
            y,
            source.norm if self.n_partials else None,
            source.partials_ref,
            bias=runner.place(self.biases) if self.biased else 0,
        )
        return program


def _biases(n_rows: int, seed: int) -> Floats:
    return np.random.default_rng([seed, 7]).standard_normal(n_rows).astype(np.float32)


def _twin_rows(placed: Placed, x: Floats, scale: float) -> tuple[Wide, Wide]:
    """Compute products [n_rows] and sums of terms' magnitudes; NaN for rows with a damaged one.

    Rows that repeat are computed once.
    """
    values = placed.values
    sound = np.all(np.isfinite(values), axis=1)
    wanted, magnitude = np.full((2, len(values)), np.nan)
    wanted[sound] = matvec_twin(values[sound], x, scale)
    magnitude[sound] = matvec_twin(np.abs(values[sound]), np.abs(x), scale)
    return placed.repeated(wanted), placed.repeated(magnitude)


@dataclass(frozen=True)
class ResidualCase:
    """Checks hidden += one matrix times x, plus biases if it is `biased`."""

    tuning: Tuning
    type: str
    n_rows: int
    n_columns: int
    seed: int = 0
    biased: bool = False

    @property
    def biases(self) -> Floats:
        """Draw float32 [n_rows]."""
        return _biases(self.n_rows, self.seed) * np.float32(self.biased)

    def run(self, runner: Runner) -> Checks:
        program, left, placed, x, x_ref = self._make(runner)
        words = runner.run(program, {x_ref: x, left.refs.hidden: left.before}, *left.outputs)
        checks = Checks()
        values = np.resize(placed.values, (self.n_rows, self.n_columns))
        wanted = residual_twin(values, x, left.before, left.gain, self.biases)
        magnitude = np.abs(left.before) + _twin_rows(placed, x, 1.0)[1] + np.abs(self.biases)
        left.compare(checks, words, wanted, magnitude, self.tuning.rows)
        return checks

    def time(self, runner: Runner) -> float | None:
        """Measure GB of weights per second on the device."""
        program, left, placed, x, x_ref = self._make(runner)
        runner.run(program, {x_ref: x, left.refs.hidden: left.before})
        runtime = runner.nanoseconds(program)
        return placed.matrix.n_bytes / runtime if runtime else None

    def _make(self, runner: Runner) -> tuple[Program, LeftState, Placed, Floats, TensorRef]:
        rng = np.random.default_rng(self.seed)
        placed = place_matrix(runner, self.type, self.n_rows, self.n_columns, rng)
        x, x_ref = NormedInput(self.n_columns, 0, rng).x, TensorRef("x", self.n_columns)
        left = LeftState(runner, self.n_rows, -(-self.n_rows // self.tuning.rows), rng)
        program = Program("matvec_residual")
        bias = runner.place(self.biases) if self.biased else 0
        op = OpContext(program, self.tuning, "residual")
        matvec_residual(op, placed.matrix, x_ref, left.refs, bias=bias)
        return program, left, placed, x, x_ref


@dataclass(frozen=True)
class HeadsCase:
    """Checks `n_heads` matrices [n_rows, n_columns]; x has NaN before, between, behind parts."""

    tuning: Tuning
    type: str
    n_heads: int
    n_rows: int
    n_columns: int
    x_offset: int = 0
    x_gap: int = 0  # words between the parts
    seed: int = 0

    def run(self, runner: Runner) -> Checks:
        rng = np.random.default_rng(self.seed)
        n_rows = self.n_heads * self.n_rows
        placed = place_matrix(runner, self.type, n_rows, self.n_columns, rng)
        stride = self.n_columns + self.x_gap
        parts = rng.standard_normal((self.n_heads, self.n_columns)).astype(np.float32)
        laid_out = np.full((self.n_heads, stride), np.nan, np.float32)
        laid_out[:, : self.n_columns] = parts
        x = np.append(np.full(self.x_offset, np.nan, np.float32), laid_out)
        x_ref, y_ref = TensorRef("x", x.size), TensorRef("y", n_rows + 1)
        program = Program("matvec_heads")
        op, heads = (
            OpContext(program, self.tuning, "heads"),
            HeadParts(x_ref, stride, self.x_offset),
        )
        matvec_heads(op, placed.matrix, self.n_heads, heads, y_ref, x_ref)
        (words,) = runner.run(program, {x_ref: x}, y_ref)
        weights = placed.values.reshape(self.n_heads, self.n_rows, self.n_columns)
        found = words[:-1].view(np.float32).reshape(self.n_heads, self.n_rows)
        checks = Checks()
        magnitude = heads_twin(np.abs(weights), np.abs(parts))
        checks.close("y of heads", found, heads_twin(weights, parts), magnitude)
        checks.equal("the word behind y", words[-1:], np.array([SENTINEL], np.uint32))
        return checks


@dataclass(frozen=True)
class EmbedCase:
    """Checks rows of an embedding matrix, token by token; ids beyond the vocabulary are clamped."""

    tuning: Tuning
    type: str
    n_vocab: int
    n_columns: int
    tokens: tuple[int, ...]
    seed: int = 0

    def run(self, runner: Runner) -> Checks:
        rng = np.random.default_rng(self.seed)
        placed = place_matrix(runner, self.type, self.n_vocab, self.n_columns, rng)
        group_width = 32 * self.tuning.workgroup_size
        left = LeftState(runner, self.n_columns, -(-self.n_columns // group_width), rng)
        program = Program("embed")
        embed(OpContext(program, self.tuning, "embed"), placed.matrix, PARAMS, left.refs)
        checks = Checks()
        values = np.resize(placed.values, (self.n_vocab, self.n_columns))
        for token in self.tokens:
            words = runner.run(program, {PARAMS: params_words(token=token)}, *left.outputs)
            wanted = embed_twin(values, token, left.gain)
            # A weight is a difference of two terms; the row's largest stands for their size.
            magnitude = np.full(self.n_columns, np.abs(wanted.hidden).max())
            left.compare(checks, words, wanted, magnitude, group_width)
        return checks
