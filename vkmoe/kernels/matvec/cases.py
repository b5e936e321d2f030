"""Compares the kernels that read whole matrices with their twins: matvec, matvec_residual,
matvec_heads and embed. Each case is one random configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

import numpy as np
from numpy.typing import NDArray

from vkmoe.gpu.runner import Runner
from vkmoe.kernels.comparison import Checks, Words
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.family import (
    MIXED_TYPE,
    Family,
    Setting,
    Setup,
    Trial,
    Used,
    Work,
    trial,
    weights_work,
)
from vkmoe.kernels.inputs import LeftState, NormedInput, Placed, multiplied, place_matrix
from vkmoe.kernels.launches import kernel_class
from vkmoe.kernels.matvec import twins
from vkmoe.kernels.matvec.operations import embed, matvec, matvec_heads, matvec_residual
from vkmoe.kernels.rows import N_DRAWN, PAIR, BatchCase, RowBatch, RowCase, Rowed, RowsCase
from vkmoe.kernels.tuning import Tuning
from vkmoe.quants.types import Bytes

Floats = NDArray[np.floating]
Wide = NDArray[np.float64]


@dataclass(frozen=True)
class MatvecCase(RowCase):
    """Checks matrices [(type, rows)] of `n_columns` times one x, plus biases if it is `biased`.

    `n_partials` 0: without the norm. `file_rows` are given matrices in place of random ones. Rows
    with a value that is not finite are left out. With `n_heads` there is one matrix for each part
    of x, and `gap` words that are NaN lie behind each part.
    """

    tuning: Tuning
    segments: tuple[tuple[str, int], ...]
    n_columns: int
    n_partials: int = 0
    biased: bool = False
    file_rows: tuple[Bytes, ...] = ()
    n_heads: int = 1
    gap: int = 0

    def append(self, runner: Runner, op: OpContext, batch: RowBatch) -> Rowed:
        rng, n_heads, stride = np.random.default_rng(0), self.n_heads, self.n_columns + self.gap
        source = NormedInput(batch, n_heads * stride, self.n_partials, rng)
        parts_of_x = source.x.reshape(N_DRAWN, n_heads, stride)
        parts_of_x[..., self.n_columns :] = np.nan
        placed = [
            place_matrix(runner, kind, n_heads * n_rows, self.n_columns, rng, rows)
            for (kind, n_rows), rows in zip(
                self.segments, self.file_rows or [None] * len(self.segments), strict=True
            )
        ]
        matrices = [item.matrix for item in placed]
        n_rows = sum(matrix.n_rows for matrix in matrices)
        biases = _biases(n_rows, self.biased)
        y, bias = batch.tensor("y", n_rows + 1), runner.place(biases) if self.biased else 0
        if n_heads > 1:
            matvec_heads(op, matrices[0], n_heads, source.x_ref, stride, y)
        else:
            norm = source.norm if self.n_partials else None
            matvec(op, matrices, source.x_ref, y, norm, bias=bias)

        def compare(row: int, checks: Checks, words: Sequence[Words]) -> None:
            x, scale = parts_of_x[row, :, : self.n_columns], source.scale(row)
            parts = [_products(self.tuning, item, x, scale) for item in placed]
            wanted, magnitude = (np.concatenate(part) for part in zip(*parts, strict=True))
            found, magnitude = words[0][:-1].view(np.float32), magnitude + np.abs(biases)
            checks.close_where_finite("y", found, wanted + biases, magnitude)
            checks.untouched("the word behind y", words[0][-1:])

        return Rowed(source.inputs, (y,), compare)


def _biases(n_rows: int, biased: bool) -> Floats:
    """Draw float32 [n_rows], of the size of the products; zeros unless `biased`."""
    drawn = np.random.default_rng(7).standard_normal(n_rows)
    return drawn.astype(np.float32) * np.float32(biased)


def _products(tuning: Tuning, placed: Placed, x: Floats, scale: float = 1.0) -> tuple[Wide, Wide]:
    """Compute products [n_rows] and sums of terms' magnitudes; rows that repeat only once.

    x [n_heads, n_columns].
    """
    values = placed.values.reshape(len(x), -1, x.shape[1])
    x, n_rows = multiplied(tuning, placed.matrix.type, x), placed.matrix.n_rows
    magnitude = scale * twins.matvec_heads(np.abs(values), np.abs(x))
    return np.resize(scale * twins.matvec_heads(values, x), n_rows), np.resize(magnitude, n_rows)


@dataclass(frozen=True)
class ResidualCase(RowCase):
    """Checks hidden += one matrix times x, plus biases if it is `biased`; = unless it `adds`."""

    tuning: Tuning
    type: str
    n_rows: int
    n_columns: int
    biased: bool = False
    adds: bool = True

    def append(self, runner: Runner, op: OpContext, batch: RowBatch) -> Rowed:
        rng = np.random.default_rng(0)
        placed = place_matrix(runner, self.type, self.n_rows, self.n_columns, rng)
        source = NormedInput(batch, self.n_columns, 0, rng)
        kernel = kernel_class("matvec_residual", self.type, self.n_rows, self.n_columns)
        group = self.tuning.launch(kernel).rows
        left = LeftState(runner, batch, self.n_rows, group, rng, self.adds)
        biases = _biases(self.n_rows, self.biased)
        bias = runner.place(biases) if self.biased else 0
        matvec_residual(op, placed.matrix, source.x_ref, left.refs, bias=bias)

        def compare(row: int, checks: Checks, words: Sequence[Words]) -> None:
            values = np.resize(placed.values, (self.n_rows, self.n_columns))
            before = left.before[row]
            x = multiplied(self.tuning, self.type, source.x[row])
            wanted = twins.matvec_residual(values, x, before, left.gain, biases)
            _, sizes = _products(self.tuning, placed, source.x[row : row + 1])
            left.compare(checks, words, wanted, np.abs(before) + sizes + np.abs(biases))

        inputs = {source.x_ref: source.x, **left.inputs}
        return Rowed(inputs, left.outputs, compare)


@dataclass(frozen=True)
class EmbedCase(RowCase):
    """Checks rows of an embedding matrix, token by token; ids beyond the vocabulary are clamped."""

    tuning: Tuning
    type: str
    n_vocab: int
    n_columns: int
    tokens: tuple[int, ...]
    scale: float = 1.0
    leaves: bool = True  # something for a norm

    @property
    def n_compared(self) -> int:
        return len(self.tokens)

    def append(self, runner: Runner, op: OpContext, batch: RowBatch) -> Rowed:
        rng = np.random.default_rng(0)
        placed = place_matrix(runner, self.type, self.n_vocab, self.n_columns, rng)
        left = LeftState(runner, batch, self.n_columns, 32 * self.tuning.workgroup_size, rng)
        output = left.refs if self.leaves else replace(left.refs, gain=0)
        n_left = embed(op, placed.matrix, batch.params_ref, output, self.scale)
        assert (n_left > 0) == self.leaves
        values = np.resize(placed.values, (self.n_vocab, self.n_columns))
        tokens = [*islice(cycle(self.tokens), N_DRAWN)]

        def compare(row: int, checks: Checks, words: Sequence[Words]) -> None:
            wanted = twins.embed(values, tokens[row], left.gain, self.scale)
            # A weight is a difference of two terms; the row's largest stands for their size.
            magnitude = np.full(self.n_columns, np.abs(wanted.hidden).max())
            compared = left.compare if self.leaves else left.compare_hidden
            compared(checks, words, wanted, magnitude)

        return Rowed({}, left.outputs, compare, lambda of: of.params(tokens))


# ----- what is compared -----


def _matvec(setting: Setting) -> Iterator[Trial]:
    kind, tuning = setting
    yield trial(
        MatvecCase(tuning, ((kind, 5), (kind, 3), (kind, 7)), 768, n_partials=3, biased=True),
        MatvecCase(replace(tuning, rows=1), ((kind, 1),), 256),
        MatvecCase(tuning, ((kind, 11),), 512, n_heads=3, gap=4),
        RowsCase(MatvecCase(tuning, ((kind, 6),), 512, n_partials=37, biased=True), PAIR),
    )


def _matvec_residual(setting: Setting) -> Iterator[Trial]:
    kind, tuning = setting
    case = ResidualCase(tuning, kind, 13, 512, biased=True)
    yield trial(case, RowsCase(case, PAIR))
    if kind == MIXED_TYPE:
        alone = replace(case, adds=False)
        yield trial(alone, RowsCase(alone, PAIR), what="without adding")


def _embed(setting: Setting) -> Iterator[Trial]:
    case = EmbedCase(setting.tuning, setting.axis, 5, 768, (0, 3, 4, 5, 0xFFFFFFFF))
    scaled = replace(case, tokens=(2,), scale=53.0659966)  # as Gemma 4 26B has it: 2816^(1/2)
    silent = replace(scaled, leaves=False)
    yield trial(case, scaled, silent, RowsCase(case, PAIR), RowsCase(silent, PAIR))


# ----- what a model uses -----


def _matvec_probe(used: Used) -> BatchCase:
    numbers, n_heads, gap = used.numbers, 1, 0
    if numbers["x_stride"]:  # a part of x for each head
        n_heads, gap = min(3, used.groups[1]), 4
    case = MatvecCase(
        used.launched("matvec"),
        used.segments,
        used.n_columns,
        numbers["n_partials"],
        biased=numbers["bias"] != 0,
        n_heads=n_heads,
        gap=gap,
    )
    return BatchCase(case, numbers["columns"])


def _matvec_residual_probe(used: Used) -> BatchCase:
    numbers, tuning = used.numbers, used.launched("matvec_residual")
    biased, adds = numbers["bias"] != 0, numbers["adds"] != 0
    case = ResidualCase(tuning, used.variant.axis, used.n_rows, used.n_columns, biased, adds)
    return BatchCase(case, numbers["columns"])


def _embed_probe(used: Used) -> EmbedCase:
    scale, leaves = used.numbers["scale"], used.numbers["gain"] != 0
    tokens = (0, 3, 5)
    return EmbedCase(used.tuning, used.variant.axis, 5, used.n_columns, tokens, scale, leaves)


# ----- what is measured -----


EMBED_ROWS = 64  # a dispatch reads one row, whatever the vocabulary
ROUTER_TYPES = ("F32", "F16", "BF16")  # which converters leave routers in


def _matvec_works(setup: Setup) -> Iterator[Work]:
    shapes, kind, tuning = setup.shapes, setup.variant.axis, setup.tuning
    n_partials = -(-shapes.width // tuning.rows)
    stacks = {"q/k/v": shapes.qkv, "head": (shapes.n_vocab,)}
    if kind in ROUTER_TYPES:
        stacks["router"] = (shapes.router.n_experts,)
    for role, rows in stacks.items():
        biased = shapes.experts.biases and role != "head"
        segments = tuple((kind, n) for n in rows)
        case = MatvecCase(tuning, segments, shapes.width, n_partials, biased=biased)
        text = f"{'+'.join(map(str, rows))} x {shapes.width}"
        yield weights_work(setup, role, text, case.run, (sum(rows), shapes.width))
    if shapes.latent is not None:
        latent, n_heads = shapes.latent, shapes.latent.n_heads
        heads = {"k": (latent.kv_rank, latent.nope_dim), "v": (latent.value_dim, latent.kv_rank)}
        for what, (n_rows, n_columns) in heads.items():
            stack = MatvecCase(tuning, ((kind, n_rows),), n_columns, n_heads=n_heads)
            text = f"{n_heads} x {n_rows} x {n_columns}"
            form = n_heads * n_rows, n_columns
            yield weights_work(setup, f"heads of {what}", text, stack.run, form)


def _matvec_residual_works(setup: Setup) -> Iterator[Work]:
    shapes, kind = setup.shapes, setup.variant.axis
    biased = shapes.experts.biases
    case = ResidualCase(setup.tuning, kind, shapes.width, shapes.o_columns, biased=biased)
    text = f"{shapes.width} x {shapes.o_columns}"
    yield weights_work(setup, "o", text, case.run, (shapes.width, shapes.o_columns))


def _embed_works(setup: Setup) -> Iterator[Work]:
    width, kind = setup.shapes.width, setup.variant.axis
    case = EmbedCase(setup.tuning, kind, EMBED_ROWS, width, (EMBED_ROWS - 1,))
    yield weights_work(setup, "embed", f"1 x {width}", case.run, (1, width))


FAMILIES = {
    "matvec": Family(_matvec, _matvec_works, "dot_suffix", _matvec_probe),
    "matvec_residual": Family(
        _matvec_residual, _matvec_residual_works, "dot_suffix", _matvec_residual_probe
    ),
    "embed": Family(_embed, _embed_works, probe=_embed_probe),
}
