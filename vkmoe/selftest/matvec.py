"""Compares the kernels that read whole matrices with their twins: matvec, matvec_residual,
matvec_heads and embed; and rms_norm. Each case is one random configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.runner import Runner
from vkmoe.ops.context import OpContext
from vkmoe.ops.launches import kernel_class
from vkmoe.ops.matvec import HeadParts, embed, matvec, matvec_heads, matvec_residual
from vkmoe.ops.norms import rms_norm
from vkmoe.ops.tuning import Tuning
from vkmoe.quants.types import Bytes
from vkmoe.reference import matvec as twins
from vkmoe.selftest.comparison import Checks, KernelCase, Prepared, Words
from vkmoe.selftest.inputs import (
    PARAMS,
    LeftState,
    NormedInput,
    Placed,
    multiplied,
    params_words,
    place_matrix,
)

__all__ = ["EmbedCase", "HeadsCase", "MatvecCase", "ResidualCase", "RmsNormCase"]

Floats = NDArray[np.floating]
Wide = NDArray[np.float64]


@dataclass(frozen=True)
class MatvecCase(KernelCase):
    """Checks matrices [(type, rows)] of `n_columns` times one x, plus biases if it is `biased`.

    `n_partials` 0: without the norm. `file_rows` are given matrices in place of random ones. Rows
    with a value that is not finite are left out.
    """

    tuning: Tuning
    segments: tuple[tuple[str, int], ...]
    n_columns: int
    n_partials: int = 0
    seed: int = 0
    biased: bool = False
    file_rows: tuple[Bytes, ...] = ()

    def prepare(self, runner: Runner) -> Prepared:
        rng = np.random.default_rng(self.seed)
        source = NormedInput(self.n_columns, self.n_partials, rng)
        placed = [
            place_matrix(runner, kind, n_rows, self.n_columns, rng, rows)
            for (kind, n_rows), rows in zip(
                self.segments, self.file_rows or [None] * len(self.segments), strict=True
            )
        ]
        n_rows = sum(n_rows for _, n_rows in self.segments)
        biases = _biases(n_rows, self.seed, self.biased)
        y, program = TensorRef("y", n_rows + 1), Program("matvec")
        matvec(
            OpContext(program, self.tuning, "matvec"),
            [item.matrix for item in placed],
            source.x_ref,
            y,
            source.norm if self.n_partials else None,
            source.partials_ref,
            bias=runner.place(biases) if self.biased else 0,
        )

        def compare(checks: Checks, words: Sequence[Words]) -> None:
            parts = [_products(self.tuning, item, source.x, source.scale) for item in placed]
            wanted, magnitude = (np.concatenate(part) for part in zip(*parts, strict=True))
            found, magnitude = words[0][:-1].view(np.float32), magnitude + np.abs(biases)
            checks.close_where_finite("y", found, wanted + biases, magnitude)
            checks.untouched("the word behind y", words[0][-1:])

        n_bytes = sum(item.matrix.n_bytes for item in placed)
        return Prepared(program, (y,), [(source.inputs, compare)], n_bytes)


def _biases(n_rows: int, seed: int, biased: bool) -> Floats:
    """Draw float32 [n_rows], of the size of the products; zeros unless `biased`."""
    drawn = np.random.default_rng([seed, 7]).standard_normal(n_rows)
    return drawn.astype(np.float32) * np.float32(biased)


def _products(tuning: Tuning, placed: Placed, x: Floats, scale: float = 1.0) -> tuple[Wide, Wide]:
    """Compute products [n_rows] and sums of terms' magnitudes; rows that repeat only once."""
    values, n_rows = placed.values, placed.matrix.n_rows
    x = multiplied(tuning, placed.matrix.type, x)
    magnitude = twins.matvec(np.abs(values), np.abs(x), scale)
    return np.resize(twins.matvec(values, x, scale), n_rows), np.resize(magnitude, n_rows)


@dataclass(frozen=True)
class ResidualCase(KernelCase):
    """Checks hidden += one matrix times x, plus biases if it is `biased`."""

    tuning: Tuning
    type: str
    n_rows: int
    n_columns: int
    seed: int = 0
    biased: bool = False

    def prepare(self, runner: Runner) -> Prepared:
        rng = np.random.default_rng(self.seed)
        placed = place_matrix(runner, self.type, self.n_rows, self.n_columns, rng)
        source = NormedInput(self.n_columns, 0, rng)
        kernel = kernel_class("matvec_residual", self.type, self.n_rows, self.n_columns)
        left = LeftState(runner, self.n_rows, self.tuning.launch(kernel).rows, rng)
        biases = _biases(self.n_rows, self.seed, self.biased)
        program = Program("matvec_residual")
        op = OpContext(program, self.tuning, "residual")
        bias = runner.place(biases) if self.biased else 0
        matvec_residual(op, placed.matrix, source.x_ref, left.refs, bias=bias)

        def compare(checks: Checks, words: Sequence[Words]) -> None:
            values = np.resize(placed.values, (self.n_rows, self.n_columns))
            x = multiplied(self.tuning, self.type, source.x)
            wanted = twins.matvec_residual(values, x, left.before, left.gain, biases)
            _, sizes = _products(self.tuning, placed, source.x)
            left.compare(checks, words, wanted, np.abs(left.before) + sizes + np.abs(biases))

        inputs = {source.x_ref: source.x, left.refs.hidden: left.before}
        return Prepared(program, left.outputs, [(inputs, compare)], placed.matrix.n_bytes)


@dataclass(frozen=True)
class HeadsCase(KernelCase):
    """Checks `n_heads` matrices [n_rows, n_columns]; x has NaN before, between, behind parts."""

    tuning: Tuning
    type: str
    n_heads: int
    n_rows: int
    n_columns: int
    x_offset: int = 0
    x_gap: int = 0  # words between the parts

    def prepare(self, runner: Runner) -> Prepared:
        rng = np.random.default_rng(0)
        n_rows, stride = self.n_heads * self.n_rows, self.n_columns + self.x_gap
        placed = place_matrix(runner, self.type, n_rows, self.n_columns, rng)
        parts = rng.standard_normal((self.n_heads, self.n_columns)).astype(np.float32)
        x = np.full(self.x_offset + self.n_heads * stride, np.nan, np.float32)
        x[self.x_offset :].reshape(self.n_heads, stride)[:, : self.n_columns] = parts
        x_ref, y_ref = TensorRef("x", x.size), TensorRef("y", n_rows + 1)
        program, heads = Program("matvec_heads"), HeadParts(x_ref, stride, self.x_offset)
        op = OpContext(program, self.tuning, "heads")
        matvec_heads(op, placed.matrix, self.n_heads, heads, y_ref, x_ref)

        def compare(checks: Checks, words: Sequence[Words]) -> None:
            weights = placed.values.reshape(self.n_heads, self.n_rows, self.n_columns)
            rounded = multiplied(self.tuning, self.type, parts)
            wanted = twins.matvec_heads(weights, rounded)
            found = words[0][:-1].view(np.float32).reshape(wanted.shape)
            magnitude = twins.matvec_heads(np.abs(weights), np.abs(rounded))
            checks.close("y of heads", found, wanted, magnitude)
            checks.untouched("the word behind y", words[0][-1:])

        return Prepared(program, (y_ref,), [({x_ref: x}, compare)])


@dataclass(frozen=True)
class EmbedCase(KernelCase):
    """Checks rows of an embedding matrix, token by token; ids beyond the vocabulary are clamped."""

    tuning: Tuning
    type: str
    n_vocab: int
    n_columns: int
    tokens: tuple[int, ...]
    seed: int = 0

    def prepare(self, runner: Runner) -> Prepared:
        rng = np.random.default_rng(self.seed)
        placed = place_matrix(runner, self.type, self.n_vocab, self.n_columns, rng)
        left = LeftState(runner, self.n_columns, 32 * self.tuning.workgroup_size, rng)
        program = Program("embed")
        embed(OpContext(program, self.tuning, "embed"), placed.matrix, PARAMS, left.refs)
        values = np.resize(placed.values, (self.n_vocab, self.n_columns))

        def compare(token: int, checks: Checks, words: Sequence[Words]) -> None:
            wanted = twins.embed(values, token, left.gain)
            # A weight is a difference of two terms; the row's largest stands for their size.
            magnitude = np.full(self.n_columns, np.abs(wanted.hidden).max())
            left.compare(checks, words, wanted, magnitude)

        rounds = [
            ({PARAMS: params_words(token=token)}, partial(compare, token)) for token in self.tokens
        ]
        return Prepared(program, left.outputs, rounds)


@dataclass(frozen=True)
class RmsNormCase(KernelCase):
    """Checks `width` values from word `x_offset` on, of size `size`, normalised with `eps`."""

    tuning: Tuning
    width: int
    x_offset: int = 0
    size: float = 1.0
    eps: float = 1e-6

    def prepare(self, runner: Runner) -> Prepared:
        rng = np.random.default_rng(self.width)
        x = np.full(self.x_offset + self.width + 3, np.nan, np.float32)
        part = x[self.x_offset : self.x_offset + self.width]
        part[:] = self.size * rng.standard_normal(self.width)
        gain = rng.uniform(-2.0, 2.0, self.width).astype(np.float32)
        x_ref, y_ref = TensorRef("x", x.size), TensorRef("y", self.width + 2)
        program = Program("rms_norm")
        op, address = OpContext(program, self.tuning, "norm"), runner.place(gain)
        rms_norm(op, x_ref, y_ref, self.width, address, self.eps, x_offset=self.x_offset)

        def compare(checks: Checks, words: Sequence[Words]) -> None:
            found, wanted = words[0], twins.rms_norm(part, gain, self.eps)
            checks.close("y", found[: self.width].view(np.float32), wanted, np.abs(wanted))
            checks.untouched("the words behind y", found[self.width :])

        return Prepared(program, (y_ref,), [({x_ref: x}, compare)])
