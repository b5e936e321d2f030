"""Multiplies quantised matrices by all rows of a batch at once, in tiles: the matrices of a layer,
and experts by the pairs (row, rank) that chose them. For prompts.

A product is one sum in an order of its own, whatever the tile, the batch and the place in it.
Which shape of tile a device gets is decided in tuning.py.
Shaders: matmul.comp, expert_matmul.comp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from vkmoe.facts import Activation
from vkmoe.gpu.kernels import KernelSpec, kernel
from vkmoe.gpu.program import Bound, Range, TensorRef
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.experts.operations import (
    ACTIVATIONS,
    BOTH,
    ExpertShape,
    SpanMatrix,
    gate_up_passes,
)
from vkmoe.kernels.matvec.operations import Matrix, bias_range, group_numbers, groups_of_three

_MATMUL_PUSH = (
    "address:weights0 address:weights1 address:weights2 address:bias u32:rows_end0 u32:rows_end1 "
    "u32:n_rows u32:row_bytes u32:n_blocks u32:x_offset u32:x_stride u32:x_head_stride "
    "u32:y_offset u32:y_stride"
)
_TILE = (
    "workgroup_size lane_dots lane_columns "
    "matrix_rows matrix_columns matrix_depth subgroup_size loads_ahead"
)
_OF_EXPERT = "u32:n_rows u32:row_bytes u32:n_blocks u32:x_stride u32:round_index u32:pairs_of_x"
MATMUL = kernel("matmul", "r:x w:y r:params", _MATMUL_PUSH, _TILE)
MATMUL_RESIDUAL = kernel("matmul_residual", "r:x rw:y r:params", _MATMUL_PUSH, f"{_TILE} adds")
GATE_UP = kernel(
    "expert_matmul_gate_up",
    "r:x r:tiles r:sorted r:params rw:y",
    f"address:span u32:gate_offset u32:up_offset u32:gate_bias u32:up_bias {_OF_EXPERT}",
    f"{_TILE} biased pass activation",
)
DOWN = kernel(
    "expert_matmul_down",
    "r:x r:tiles r:sorted r:params w:y",
    f"address:span u32:down_offset u32:down_bias {_OF_EXPERT}",
    f"{_TILE} biased",
)
N_ROUNDS = 33  # of tiles, at most: of experts that are read where they are, then of those brought
# Of a tile in a list, and of the header: where each round begins, to whole tiles.
TILE_WORDS, TILE_HEADER_WORDS = 4, -(-(N_ROUNDS + 1) // 4) * 4


# ----- batches and tiles -----


def most_tiles(columns: int, n_pairs: int, n_experts: int) -> int:
    """Count the tiles of `n_pairs` at worst: every expert may leave one that is not full."""
    return min(n_experts, n_pairs) + n_pairs // columns


class RowParts(NamedTuple):
    """Says where a batch's rows have their parts of a tensor: at word row * `stride`.

    In x both are multiples of 4; `head_stride` is the distance of a row's heads.
    """

    tensor: TensorRef
    stride: int
    head_stride: int = 0

    def part(self, n_rows: int, n_words: int, start: int = 0) -> Bound:
        """Bind the words from the first row's to the last one's, of `n_words` each."""
        return self.tensor.part(start, (n_rows - 1) * self.stride + n_words)

    @property
    def x_numbers(self) -> dict[str, int]:
        """Return where a kernel finds x, as it names it."""
        assert self.stride % 4 == 0 == self.head_stride % 4, self
        strides = {"x_stride": self.stride // 4, "x_head_stride": self.head_stride // 4}
        return {"x_offset": 0, **strides}


def row_parts(tensor: TensorRef, head_stride: int = 0) -> RowParts:
    """Say that rows have their parts where the tensor's rows begin."""
    return RowParts(tensor, tensor.row_words, head_stride=head_stride)


# ----- matrices -----


def matmul(
    op: OpContext,
    matrices: Sequence[Matrix],
    x: RowParts,
    y: RowParts,
    params: TensorRef,
    *,
    bias: int = 0,
    exact: bool = False,
) -> None:
    """Append y[row] = concatenation of matrix @ x[row] over the matrices, plus bias, for all rows.

    Neighbouring matrices of one type (up to three) share a dispatch. `bias` is the address of f32
    [rows of all matrices], 0 for none. `exact`: products are never of f16, as where a router's
    logits decide between experts.
    """
    op = replace(op, tuning=op.tuning.exact) if exact else op
    start = 0
    for group in groups_of_three(matrices):
        n_rows = sum(matrix.n_rows for matrix in group)
        _append_matmul(op, MATMUL, group, x, y, params, {"start": start, "bias": bias})
        start += n_rows


def matmul_residual(
    op: OpContext,
    matrix: Matrix,
    x: RowParts,
    hidden: RowParts,
    params: TensorRef,
    *,
    bias: int = 0,
    adds: bool = True,
) -> None:
    """Append hidden[row] += matrix @ x[row] + bias, for all rows.

    Unless `adds`, hidden[row] = that, and nothing that it held is read.
    """
    more = {"start": 0, "bias": bias, "adds": int(adds)}
    _append_matmul(op, MATMUL_RESIDUAL, [matrix], x, hidden, params, more)


def matmul_heads(
    op: OpContext, stack: Matrix, n_heads: int, x: RowParts, y: RowParts, params: TensorRef
) -> None:
    """Append y[row][head] = W[head] @ x[row][head][:n_columns] for every head and all rows.

    `stack` is [n_heads * rows, n_columns], a head's rows behind those of the head before.
    """
    assert stack.n_rows % n_heads == 0
    _append_matmul(op, MATMUL, [stack], x, y, params, {"n_heads": n_heads})


def _append_matmul(
    op: OpContext,
    spec: KernelSpec,
    group: list[Matrix],
    x: RowParts,
    y: RowParts,
    params: TensorRef,
    more: dict[str, int],
) -> None:
    """Append one dispatch; `more` are the first of its rows in y, the biases, the heads, and
    whether it adds."""
    n_heads, start, bias = more.get("n_heads", 1), more.get("start", 0), more.get("bias", 0)
    kind, n_columns = group[0].type, group[0].n_columns
    numbers, tile = group_numbers(group), op.tuning.tile
    n_all, n_rows = numbers["n_rows"], numbers["n_rows"] // n_heads
    ends = {name: min(numbers[name], n_rows) for name in ("rows_end0", "rows_end1", "n_rows")}
    op.launch(
        spec.dispatch(
            f"{spec.name}.{kind.lower()}{op.tuning.tile_suffix}",
            {
                **tile._asdict(),
                **numbers,
                **ends,
                **x.x_numbers,
                "bias": bias + 4 * start if bias else 0,
                "adds": more.get("adds", 0),
                "y_offset": start,
                "y_stride": y.stride,
            },
            {
                "x": x.part(op.n_rows, (n_heads - 1) * x.head_stride + n_columns),
                "y": y.part(op.n_rows, n_all, start),
                "params": params,
            },
            (-(-op.n_rows // tile.columns), -(-n_rows // tile.dots), n_heads),
            op.label,
            reads=(*(matrix.memory for matrix in group), *bias_range(bias, start, n_all)),
        ),
        tile.launch,
    )


# ----- experts -----


class ExpertTiles(NamedTuple):
    """Says where tiles and sorted pairs are, and which of them are multiplied: those of a round.

    `tiles` u32: word r is the number of the first tile of round r, word r + 1 that of the first
    behind it; from word TILE_HEADER_WORDS on four words of each tile: the address of its expert's
    span (low, high), the first of its pairs in `sorted`, how many. `sorted` u32: pairs,
    row * n_used + rank. `n_experts` is how many have tiles in the round at most.
    """

    tiles: TensorRef
    sorted: TensorRef
    n_experts: int
    n_used: int
    round_index: int = 0


@dataclass(frozen=True)
class TiledExperts:
    """Says which experts a batch is multiplied with, and where they lie.

    With `tiles`, those of a round, wherever their tiles say; else the one at `span`, by all rows: a
    pair is then a row. `params` says how many rows are in use. `memory` is what any of them may lie
    in.
    """

    shape: ExpertShape
    params: TensorRef
    memory: tuple[Range, ...]
    tiles: ExpertTiles | None = None
    span: int = 0

    def n_pairs(self, n_rows: int) -> int:
        """Count the pairs of rows."""
        return n_rows * (self.tiles.n_used if self.tiles else 1)

    def n_tiles(self, columns: int, n_rows: int) -> int:
        """Count the tiles at most."""
        n_pairs = self.n_pairs(n_rows)
        if self.tiles:
            return most_tiles(columns, n_pairs, self.tiles.n_experts)
        return -(-n_pairs // columns)

    @property
    def tensors(self) -> dict[str, TensorRef | Bound]:
        """Return the bindings of lists and parameters."""
        none = self.params.part(0, 0)
        lists = (self.tiles.tiles, self.tiles.sorted) if self.tiles else (none, none)
        return {"tiles": lists[0], "sorted": lists[1], "params": self.params}


def expert_matmul_gate_up(
    op: OpContext,
    experts: TiledExperts,
    x: RowParts,
    act: TensorRef,
    activation: Activation = "silu",
) -> None:
    """Append act[pair] = f(gate @ x[row], up @ x[row]) for all pairs; see `expert_gate_up`.

    x is [rows][stride], of which `n_columns` words are used; act is [pairs][rows of gate].
    """
    n_used = experts.tiles.n_used if experts.tiles else 1
    assert x.stride % 4 == 0, x
    for matrix, which in gate_up_passes(experts.shape):
        numbers = {
            "pass": which,
            "activation": ACTIVATIONS.index(activation),
            "x_stride": x.stride // 4,
            "pairs_of_x": n_used,
        }
        tensors = {"x": x.part(op.n_rows, matrix.n_columns), "y": act}
        _append_experts(op, GATE_UP, experts, matrix, numbers, tensors)


def expert_matmul_down(op: OpContext, experts: TiledExperts, act: TensorRef, y: TensorRef) -> None:
    """Append y[pair] = down @ act[pair] + bias for all pairs, unweighted; y is [pairs][rows]."""
    matrix = experts.shape.down
    numbers = {"x_stride": matrix.n_columns // 4, "pairs_of_x": 1}
    tensors = {"x": act.part(0, experts.n_pairs(op.n_rows) * matrix.n_columns), "y": y}
    _append_experts(op, DOWN, experts, matrix, numbers, tensors)


def _append_experts(
    op: OpContext,
    spec: KernelSpec,
    experts: TiledExperts,
    matrix: SpanMatrix,
    numbers: dict[str, int],
    tensors: dict[str, Any],
) -> None:
    """Append one dispatch; `tensors` are its x and its y."""
    tile, y = op.tuning.tile, tensors["y"]
    n_parts = 2 if numbers.get("pass") == BOTH else 1
    op.launch(
        spec.dispatch(
            f"{spec.name}.{matrix.type.lower()}{op.tuning.tile_suffix}",
            {
                **tile._asdict(),
                **matrix.numbers,
                **experts.shape.numbers,
                **numbers,
                "span": experts.span,
                "round_index": experts.tiles.round_index if experts.tiles else 0,
            },
            {
                **experts.tensors,
                "x": tensors["x"],
                "y": y.part(0, experts.n_pairs(op.n_rows) * matrix.n_rows),
            },
            (experts.n_tiles(tile.columns, op.n_rows), -(-matrix.n_rows * n_parts // tile.dots), 1),
            op.label,
            reads=experts.memory,
        ),
        tile.launch,
    )
