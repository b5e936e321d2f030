"""Compares the kernels that multiply tiles with their twins: matrices by all rows of a batch, and
experts by the pairs that chose them.

What a row's x and experts are depends on its number alone, so that the same row can be put into
other batches. Whatever no kernel may look at is NaN: rows not in use, gaps, experts without tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vkmoe.batch import TokenBatch
from vkmoe.facts import Activation
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.runner import SENTINEL, Runner
from vkmoe.gpu.token_io import pack_params, param_words
from vkmoe.kernels.comparison import SUM_LIMIT, Checks, KernelCase, Prepared, Words
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.experts.cases import activated_with_sizes
from vkmoe.kernels.experts.operations import ACTIVATIONS, ExpertShape
from vkmoe.kernels.experts.spans import DOWN, GATE, UP, Spans, span_layout
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
from vkmoe.kernels.inputs import WEIGHT_TYPES, Placed, multiplied, place_matrix
from vkmoe.kernels.matmul import twins
from vkmoe.kernels.matmul.operations import (
    TILE_HEADER_WORDS,
    TILE_WORDS,
    ExpertTiles,
    RowParts,
    TiledExperts,
    expert_matmul_down,
    expert_matmul_gate_up,
    matmul,
    matmul_heads,
    matmul_residual,
)
from vkmoe.kernels.prompt_experts.twins import expert_tiles
from vkmoe.kernels.shapes import TINY
from vkmoe.kernels.tuning import Tuning

ROUND = 2  # of tiles: as if experts had been brought
TYPICAL_LIMIT = 2.0**-9  # of errors that f16 leaves in sums of random products

Floats = NDArray[np.floating]
Wide = NDArray[np.float64]


@dataclass(frozen=True)
class Batch:
    """Numbers the rows in use; the program has `n_spare` more."""

    rows: tuple[int, ...]
    n_spare: int = 0

    @property
    def most(self) -> int:
        return len(self.rows) + self.n_spare

    @property
    def params(self) -> TensorRef:
        return TensorRef("params", param_words(self.most))

    def op(self, program: Program, tuning: Tuning) -> OpContext:
        return OpContext(program, tuning, program.name, n_rows=self.most)

    def params_words(self) -> Words:
        """Make the words of the parameters."""
        n = len(self.rows)
        words = np.zeros(self.params.n_words, np.uint32)
        batch = TokenBatch((0,) * n, (0,) * n, (0,) * n, (True,) * n, "prompt")
        pack_params(words.data, batch, 0, serial=1)
        return words

    def draw(self, n_values: int, seed: int) -> Floats:
        """Draw float32 [rows in use, n_values]."""
        drawn = [np.random.default_rng([seed, row]).standard_normal(n_values) for row in self.rows]
        return np.array(drawn, np.float32)

    def draw_experts(self, n_experts: int, n_used: int, seed: int) -> NDArray[np.int64]:
        """Draw the distinct experts of each row [rows in use, n_used]."""
        drawn = [np.random.default_rng([seed, row, 1]).permutation(n_experts) for row in self.rows]
        return np.array([ids[:n_used] for ids in drawn])


@dataclass(frozen=True)
class MatmulCase(KernelCase):
    """Checks matrices [(type, rows)] of `n_columns` times the rows of a batch.

    With `residual` there is one matrix, and what is in y is added to, or overwritten unless it
    `adds`; with `n_heads` one for each part of x. `gap` words lie between rows of y, and between
    parts of x.
    """

    tuning: Tuning
    segments: tuple[tuple[str, int], ...]
    n_columns: int
    batch: Batch
    residual: bool = False
    biased: bool = False
    gap: int = 0
    n_heads: int = 1
    adds: bool = True

    def prepare(self, runner: Runner) -> Prepared:
        rng, n_heads, batch = np.random.default_rng(0), self.n_heads, self.batch
        placed = [
            place_matrix(runner, kind, n_heads * n_rows, self.n_columns, rng)
            for kind, n_rows in self.segments
        ]
        matrices = [item.matrix for item in placed]
        n_rows = sum(matrix.n_rows for matrix in matrices)
        biases = (self.biased * rng.standard_normal(n_rows)).astype(np.float32)
        bias = runner.place(biases) if self.biased else 0
        x = batch.draw(n_heads * self.n_columns, 0).reshape(-1, n_heads, self.n_columns)
        before = batch.draw(n_rows, 1000) if self.adds else np.full((len(x), n_rows), np.nan, "f4")
        (x_words, x_at), (y_words, y_at) = self._padded("x", x), self._padded("y", before[:, None])
        program = Program("matmul")
        op, params = batch.op(program, self.tuning), batch.params
        if self.residual:
            matmul_residual(op, matrices[0], x_at, y_at, params, bias=bias, adds=self.adds)
        elif n_heads > 1:
            matmul_heads(op, matrices[0], n_heads, x_at, y_at, params)
        else:
            matmul(op, matrices, x_at, y_at, params, bias=bias)

        def compare(checks: Checks, words: Sequence[Words]) -> None:
            wanted, sizes, chance = self._twin(placed, x, biases)
            if self.residual and self.adds:
                wanted, sizes = wanted + before, sizes + np.abs(before)
            found = self._in_use(words[0], y_at)[:, 0, :n_rows].view(np.float32)
            checks.close("y", found, wanted, sizes)
            if self.tuning.rounds_factors and n_heads == 1:
                _check_typical(checks, found - wanted, chance)
            others = np.array(words[0])
            self._in_use(others, y_at)[:, 0, :n_rows] = SENTINEL
            checks.untouched("y elsewhere", others)

        inputs = {x_at.tensor: x_words, batch.params: batch.params_words()}
        inputs |= {y_at.tensor: y_words} if self.residual else {}
        return Prepared(program, (y_at.tensor,), [(inputs, compare)])

    def _twin(self, placed: Sequence[Placed], x: Floats, biases: Floats) -> tuple[Wide, Wide, Wide]:
        """Compute the wanted products of all matrices, how far each may be off at most, and the
        sums of squares that say how far they are by chance.
        """
        wanted, sizes, chances, first = [], [], [], 0
        for item in placed:
            shape = (self.n_heads, item.matrix.n_rows // self.n_heads, self.n_columns)
            rounded = multiplied(self.tuning, item.matrix.type, x)
            for head, values in enumerate(np.resize(item.values, shape)):
                bias = biases[first : first + len(values)]
                wanted.append(twins.matmul(values, rounded[:, head], bias))
                sizes.append(_sizes(self.tuning, values, rounded[:, head], bias))
                squares = (np.square(each.astype(np.float64)) for each in (values, x[:, head]))
                chances.append(twins.matmul(*squares))
                first += len(values)
        return (
            np.concatenate(wanted, axis=1),
            np.concatenate(sizes, axis=1),
            np.concatenate(chances, axis=1),
        )

    def _padded(self, name: str, rows: Floats) -> tuple[Words, RowParts]:
        """Put rows in use [n, n_parts, width] between words that are not read."""
        part = rows.shape[2] + self.gap
        words = np.full(self.batch.most * rows.shape[1] * part + 1, SENTINEL, np.uint32)
        at = RowParts(TensorRef(name, len(words)), rows.shape[1] * part, part)
        self._in_use(words, at)[..., : rows.shape[2]] = rows.view(np.uint32)
        return words, at

    def _in_use(self, words: Words, at: RowParts) -> Words:
        """View the rows in use: [n, n_parts, words of a part]."""
        end = len(self.batch.rows) * at.stride
        return words[:end].reshape(len(self.batch.rows), -1, at.head_stride)


@dataclass(frozen=True)
class ExpertMatmulCase(KernelCase):
    """Checks gate and up (types of both), or down (one type), for the pairs of a batch.

    Without `n_used` one expert at a fixed address is multiplied with all rows. `chosen` [rows in
    use][n_used] are experts in place of drawn ones.
    """

    tuning: Tuning
    types: tuple[str, ...]
    n_rows: int
    n_columns: int
    batch: Batch
    n_experts: int = 1
    n_used: int = 0
    biased: bool = False
    activation: Activation = "silu"
    chosen: tuple[tuple[int, ...], ...] = ()

    def prepare(self, runner: Runner) -> Prepared:
        experts = _Experts(self, runner)
        n_pairs = experts.ids.size
        is_down = len(self.types) == 1
        x = self._pairs_x(experts.ids) if is_down else self.batch.draw(self.n_columns, 0)
        x /= np.float32(np.sqrt(20.0 * self.n_columns))
        most_x = self.batch.most * (max(1, self.n_used) if is_down else 1)
        x_ref = TensorRef("x", most_x * self.n_columns)
        y_ref = TensorRef("y", self.batch.most * max(1, self.n_used) * self.n_rows + 1)
        program = Program("expert_matmul")
        op = self.batch.op(program, self.tuning)
        if is_down:
            expert_matmul_down(op, experts.block, x_ref, y_ref)
        else:
            x_at = RowParts(x_ref, self.n_columns)
            expert_matmul_gate_up(op, experts.block, x_at, y_ref, self.activation)

        def compare(checks: Checks, words: Sequence[Words]) -> None:
            wanted, sizes = experts.product(DOWN, x) if is_down else experts.gate_up(x)
            found = words[0][: wanted.size].view(np.float32).reshape(wanted.shape)
            checks.close("y of pairs", found, wanted, sizes)
            checks.untouched("y behind the pairs", words[0][n_pairs * self.n_rows :])

        inputs = {x_ref: x, **experts.inputs}
        return Prepared(program, (y_ref,), [(inputs, compare)])

    def _pairs_x(self, ids: NDArray[np.int64]) -> Floats:
        """Draw x of every pair: [n_pairs, n_columns]."""
        return self.batch.draw(ids.shape[1] * self.n_columns, 0).reshape(ids.size, -1)


def _sizes(tuning: Tuning, weights: Floats, x: Floats, bias: Floats | float = 0.0) -> Wide:
    """Say how far products may be off, over SUM_LIMIT: [n, n_rows]."""
    sizes = twins.matmul(np.abs(weights), np.abs(x), np.abs(bias))
    if tuning.matrix_tile is not None:
        return sizes + twins.matrix_bound(weights, x) / SUM_LIMIT
    return sizes + twins.half_bound(weights, x) / SUM_LIMIT if tuning.half_tiles else sizes


def _check_typical(checks: Checks, errors: Wide, chance: Wide) -> None:
    """Check that errors of f16 are what they are by chance, far below the sure bound.

    Of products in random signs rounding leaves about 2^-11 of the root of the sum of squares.
    """
    typical = np.sqrt(np.mean(np.square(errors) / np.maximum(chance, np.finfo(float).tiny)))
    checks.close("typical error of y", np.array([typical]), np.zeros(1), 1.0, TYPICAL_LIMIT)


def tile_lists(
    ids: NDArray[np.int64], spans: NDArray[np.uint64], tile_columns: int
) -> tuple[Words, NDArray[np.uint32]]:
    """Make the words of a list of tiles, and the sorted pairs, of experts [n, n_used].

    `spans` are the experts' addresses. All tiles but the first, which is of nothing, are those of
    round ROUND.
    """
    everything = np.ones(len(spans), np.bool_)
    found = expert_tiles(ids, everything, ~everything, tile_columns)
    words = np.zeros((1 + len(found.tiles), TILE_WORDS), np.uint32)
    words[1:, :2] = spans[found.tiles[:, 0]].reshape(-1, 1).view(np.uint32)
    words[1:, 2:] = found.tiles[:, 1:]
    starts = np.full(TILE_HEADER_WORDS, len(words), np.uint32)
    starts[: ROUND + 1] = [0] * ROUND + [1]
    return np.concatenate([starts, words.reshape(-1)]), found.pairs.astype(np.uint32)


class _Experts:
    """Draws the spans of a case's experts, and the lists of its pairs."""

    def __init__(self, case: ExpertMatmulCase, runner: Runner) -> None:
        self._case, rng = case, np.random.default_rng(0)
        self.ids = self._draw_ids()
        self._shape, used = self._lay_out(), np.unique(self.ids)
        drawn = Spans(self._shape, case.n_experts, used, case.tuning.layout, rng)
        self._values = [drawn.values(which) for which in (GATE, UP, DOWN)]
        self._biases, placed = drawn.biases, drawn.place(runner)
        spans = np.zeros(case.n_experts, np.uint64)
        spans[used] = placed.addresses[used]
        words, pairs = tile_lists(self.ids, spans, case.tuning.tile.columns)
        batch, n_pairs = case.batch, case.batch.most * case.n_used
        lists = ExpertTiles(
            TensorRef("tiles", max(len(words), 1)),
            TensorRef("sorted", max(n_pairs, 1)),
            case.n_experts,
            case.n_used,
            ROUND,
        )
        self.block = TiledExperts(
            placed.shape,
            batch.params,
            placed.memory,
            lists if case.n_used else None,
            span=0 if case.n_used else int(placed.addresses[0]),
        )
        self.inputs = {batch.params: batch.params_words()}
        self.inputs |= {lists.tiles: words, lists.sorted: pairs} if case.n_used else {}

    def gate_up(self, x: Floats) -> tuple[Wide, Wide]:
        """Compute the wanted values, and how far each may be off."""
        of_pairs = np.repeat(x, self.ids.shape[1], axis=0)
        parts, sizes = zip(*(self.product(which, of_pairs) for which in (GATE, UP)), strict=True)
        return activated_with_sizes(parts, sizes, self._case.activation)

    def product(self, which: int, x: Floats) -> tuple[Wide, Wide]:
        """Multiply x of pairs by GATE, UP or DOWN, and compute how far each value may be off."""
        shape = self._shape
        x = multiplied(self._case.tuning, (shape.gate, shape.up, shape.down)[which].type, x)
        weights, bias, ids = self._values[which], self._biases[which], self.ids.reshape(-1)
        sizes = np.zeros((ids.size, weights.shape[1]))
        for expert in np.unique(ids):
            rows = ids == expert
            sizes[rows] = _sizes(self._case.tuning, weights[expert], x[rows], bias[expert])
        return twins.expert_matmul(weights, x, self.ids, bias), sizes

    def _draw_ids(self) -> NDArray[np.int64]:
        case = self._case
        if case.chosen:
            return np.array(case.chosen)
        if not case.n_used:
            return np.zeros((len(case.batch.rows), 1), np.int64)
        return case.batch.draw_experts(case.n_experts, case.n_used, 0)

    def _lay_out(self) -> ExpertShape:
        case = self._case
        if len(case.types) == 1:
            sizes = case.n_columns, case.n_rows
            return span_layout((None, None, *case.types), *sizes, case.biased, case.tuning.layout)
        sizes = case.n_rows, case.n_columns
        return span_layout((*case.types, None), *sizes, case.biased, case.tuning.layout)


# ----- what is compared -----


_BATCH = Batch(tuple(range(11)), n_spare=2)  # in groups of 8 and 4 columns


def _matmul(setting: Setting) -> Iterator[Trial]:
    """Compare with as many rows as take two groups of columns, not all of the program's."""
    kind, tuning = setting
    segments = ((kind, 37), (kind, 5))
    case = MatmulCase(tuning, segments, 768, _BATCH, biased=True, gap=4)
    yield trial(case, MatmulCase(tuning, ((kind, 11),), 256, _BATCH, gap=4, n_heads=2))


def _matmul_residual(setting: Setting) -> Iterator[Trial]:
    case = MatmulCase(setting.tuning, ((setting.axis, 37),), 512, _BATCH, residual=True)
    yield trial(replace(case, biased=True))
    if setting.axis == MIXED_TYPE:
        yield trial(replace(case, biased=True, adds=False), what="without adding")


def _expert_gate_up_tiles(setting: Setting) -> Iterator[Trial]:
    """Compare routed experts and a fixed one; of one type also with other activations."""
    kind, tuning = setting
    case = ExpertMatmulCase(tuning, (kind, kind), 21, 512, _BATCH, 6, 3)
    yield trial(case, replace(case, n_experts=1, n_used=0))
    if kind == MIXED_TYPE:
        other = WEIGHT_TYPES[(WEIGHT_TYPES.index(kind) + 1) % len(WEIGHT_TYPES)]
        oai = replace(case, biased=True, activation="swiglu_oai")
        yield trial(oai, replace(oai, types=(kind, other)), what="as gpt-oss has it")
        geglu = replace(oai, activation="geglu")
        yield trial(geglu, replace(geglu, types=(kind, other)), what="as Gemma has it")


def _expert_down_tiles(setting: Setting) -> Iterator[Trial]:
    """Compare routed experts without biases and with them, and a fixed one that has some."""
    case = ExpertMatmulCase(setting.tuning, (setting.axis,), 37, 512, _BATCH, 6, 3)
    biased = replace(case, biased=True)
    yield trial(case, biased, replace(biased, n_experts=1, n_used=0))


# ----- what a model uses -----


def _of_two_tiles(used: Used) -> tuple[Tuning, Batch]:
    """Return the tuning of a dispatch, and a batch of a whole tile and a part of one."""
    tuning = used.tuning
    if used.variant.suffix != tuning.tile_suffix:  # a router's
        tuning = tuning.exact
    return tuning, Batch(tuple(range(tuning.tile.columns + 3)), n_spare=2)


def _matmul_probe(used: Used) -> MatmulCase:
    tuning, batch = _of_two_tiles(used)
    return MatmulCase(
        tuning,
        used.segments,
        used.n_columns,
        batch,
        residual=used.variant.family == "matmul_residual",
        biased=used.numbers["bias"] != 0,
        gap=4,
        n_heads=min(3, used.groups[2]),
        adds=used.numbers.get("adds", 1) != 0,
    )


def _expert_matmul_probe(used: Used) -> ExpertMatmulCase:
    (tuning, batch), numbers = _of_two_tiles(used), used.numbers
    gate_up, routed = used.variant.family == "expert_matmul_gate_up", numbers["span"] == 0
    return ExpertMatmulCase(
        tuning,
        used.types if gate_up else (used.variant.axis,),
        used.n_rows,
        used.n_columns,
        batch,
        n_experts=4 if routed else 1,
        n_used=2 if routed else 0,
        biased=numbers["biased"] != 0,
        activation=ACTIVATIONS[numbers.get("activation", 0)],
    )


# ----- what is measured -----


MATMUL_ROWS = 32


def _matmul_works(setup: Setup) -> Iterator[Work]:
    """Multiply a prompt's rows."""
    shapes, kind, tuning = setup.shapes, setup.variant.axis, setup.tuning
    batch = _prompt_batch(setup)
    segments = tuple((kind, n) for n in shapes.qkv)
    case = MatmulCase(tuning, segments, shapes.width, batch, biased=shapes.experts.biases)
    text = f"{batch.most} rows, {'+'.join(map(str, shapes.qkv))} x {shapes.width}"
    yield weights_work(setup, "q/k/v", text, case.run, (sum(shapes.qkv), shapes.width))


def _matmul_residual_works(setup: Setup) -> Iterator[Work]:
    shapes, kind, batch = setup.shapes, setup.variant.axis, _prompt_batch(setup)
    segments = ((kind, shapes.width),)
    case = MatmulCase(setup.tuning, segments, shapes.o_columns, batch, residual=True)
    text = f"{batch.most} rows, {shapes.width} x {shapes.o_columns}"
    yield weights_work(setup, "o", text, case.run, (shapes.width, shapes.o_columns))


def _expert_matmul_works(setup: Setup) -> Iterator[Work]:
    """Multiply a prompt's rows with their experts, of which few are left unused."""
    shapes, kind, batch = setup.shapes, setup.variant.axis, _prompt_batch(setup)
    router, inner, width = shapes.router, shapes.experts.width, shapes.width
    gate_up = setup.variant.family == "expert_matmul_gate_up"
    types, n_rows, n_columns = ((kind, kind), inner, width) if gate_up else ((kind,), width, inner)
    case = ExpertMatmulCase(
        setup.tuning, types, n_rows, n_columns, batch, router.n_experts, router.n_used
    )
    name = "gate/up" if gate_up else "down"
    text = f"{batch.most} rows, {router.n_experts} x {n_rows} x {n_columns}"
    n_read = min(router.n_experts, batch.most * router.n_used) * len(types) * n_rows
    yield weights_work(setup, name, text, case.run, (n_read, n_columns))


def _prompt_batch(setup: Setup) -> Batch:
    return Batch(tuple(range(4 if setup.shapes is TINY else MATMUL_ROWS)))


FAMILIES = {
    "matmul": Family(_matmul, _matmul_works, "tile_suffix", _matmul_probe),
    "matmul_residual": Family(
        _matmul_residual, _matmul_residual_works, "tile_suffix", _matmul_probe
    ),
    "expert_matmul_gate_up": Family(
        _expert_gate_up_tiles, _expert_matmul_works, "tile_suffix", _expert_matmul_probe
    ),
    "expert_matmul_down": Family(
        _expert_down_tiles, _expert_matmul_works, "tile_suffix", _expert_matmul_probe
    ),
}
