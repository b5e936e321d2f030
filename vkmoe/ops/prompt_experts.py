"""Appends what goes round the experts of a prompt's rows: pairs sorted into tiles, sums of pairs.

A pair is one of the experts that a row chose: row * n_used + rank. Kernels that multiply tiles go
between. Shaders: expert_tiles.comp, combine_rows.comp. Twins: vkmoe/reference/prompt_experts.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from vkmoe.config import MAX_ROWS
from vkmoe.gpu.kernels import kernel
from vkmoe.gpu.program import Dispatch, Range, TensorRef
from vkmoe.ops.context import OpContext
from vkmoe.ops.experts import NO_WORD
from vkmoe.ops.matmul import TILE_WORDS, most_tiles
from vkmoe.ops.router import RouterShape, routing_words, shared_weight_word

__all__ = [
    "PairTiles",
    "RoutedRows",
    "SharedRows",
    "clear_done",
    "combine_rows",
    "expert_tiles",
]

EXPERT_TILES = kernel(
    "expert_tiles",
    "r:routing r:params rw:done w:tiles w:sorted_pairs",
    "u32:layer u32:row_words u32:tile_columns u32:clears",
    "workgroup_size n_experts n_used",
)
COMBINE_ROWS = kernel(
    "combine_rows",
    "r:expert_out r:shared_out r:routing r:params rw:hidden r:done",
    "u32:row_vec4s u32:row_words u32:weight_word",
    "workgroup_size n_used shared",
)

_SORT_LANES = 128  # on GPUs: all of them allow as many
_COMBINE_LANES = 64  # on CPU drivers too, where a workgroup costs as much as some of its sums


@dataclass(frozen=True)
class RoutedRows:
    """Describes the routing of a batch's rows: words [n_rows][row_words], as router_topk leaves it.

    Of the rows in `tensor` those are routed that `params` has in use.
    """

    tensor: TensorRef
    row_words: int
    shape: RouterShape
    params: TensorRef

    def __post_init__(self) -> None:
        assert self.row_words >= routing_words(self.shape) and 1 <= self.n_rows <= MAX_ROWS, self

    @property
    def n_rows(self) -> int:
        return self.tensor.n_words // self.row_words

    @property
    def n_pairs(self) -> int:
        return self.n_rows * self.shape.n_used

    @property
    def numbers(self) -> dict[str, int]:
        """Return what kernels need, as they name it."""
        return {"row_words": self.row_words, "n_used": self.shape.n_used}

    @property
    def tensors(self) -> dict[str, TensorRef]:
        return {"routing": self.tensor, "params": self.params}


@dataclass(frozen=True)
class PairTiles:
    """Lays out the tiles of pairs that have their expert in common, `columns` pairs at most each.

    `tiles` has their number in the first word of its header; then (expert, first, count, 0) of
    each, in rising order of experts, where `sorted_pairs` has `count` pairs from `first` on. `done`
    [n_experts] marks the experts that have had tiles since it was cleared.
    """

    routed: RoutedRows
    columns: int

    @property
    def most(self) -> int:
        """Count the tiles at most."""
        return most_tiles(self.columns, self.routed.n_pairs, self.routed.shape.n_experts)

    @property
    def tiles(self) -> TensorRef:
        return TensorRef("tiles", TILE_WORDS * (1 + self.most))

    @property
    def sorted_pairs(self) -> TensorRef:
        return TensorRef("sorted_pairs", self.routed.n_pairs)

    @property
    def done(self) -> TensorRef:
        return TensorRef("done", self.routed.shape.n_experts)


def clear_done(op: OpContext, tiles: PairTiles) -> None:
    """Append done = 0: the experts of another layer, or of other rows, are next.

    To the validation layer it reads and writes what `expert_tiles` does; so it says the same.
    """
    op.append(_dispatch(op, tiles, layer=0, clears=True))


def expert_tiles(op: OpContext, tiles: PairTiles, layer: int, table: Range) -> None:
    """Append tiles and sorted_pairs = those of experts that have an address and are not done yet.

    Experts that get tiles are done then. `table` is the memory of the expert tables, of which the
    one named in `params` is read; `layer` counts MoE layers as it does.
    """
    assert 8 * (layer + 1) * tiles.routed.shape.n_experts <= table.end - table.start
    op.append(_dispatch(op, tiles, layer, clears=False, table=(table,)))


def _dispatch(
    op: OpContext, tiles: PairTiles, layer: int, clears: bool, table: tuple[Range, ...] = ()
) -> Dispatch:
    routed, on_gpu = tiles.routed, op.tuning.mapping == "lanes"
    numbers = {
        **routed.numbers,
        "workgroup_size": _SORT_LANES if on_gpu else op.tuning.workgroup_size,
        "n_experts": routed.shape.n_experts,
        "layer": layer,
        "tile_columns": tiles.columns,
        "clears": int(clears),
    }
    tensors = {
        **routed.tensors,
        "done": tiles.done,
        "tiles": tiles.tiles,
        "sorted_pairs": tiles.sorted_pairs,
    }
    return EXPERT_TILES.dispatch("expert_tiles", numbers, tensors, (1, 1, 1), op.label, reads=table)


class SharedRows(NamedTuple):
    """Describes what a shared expert gave: f32 [n_rows][width]. `gated`: its weight is routed."""

    tensor: TensorRef
    gated: bool


def combine_rows(
    op: OpContext,
    tiles: PairTiles,
    expert_out: TensorRef,
    hidden: TensorRef,
    width: int,
    shared: SharedRows | None = None,
) -> None:
    """Append hidden[row] += sum of weight * expert_out[pair] by rising rank, then the shared one's.

    expert_out is f32 [n_rows * n_used][width], hidden f32 [n_rows][width]; rows that are not in use
    stay what they are, and one of whose experts some is not done becomes NaN. A shared expert's
    weight is 1 if it is not gated.
    """
    assert width % 4 == 0, width
    routed = tiles.routed
    gated = shared is not None and shared.gated
    assert not gated or routed.shape.shared_gate, "no weight is routed for the shared expert"
    row_vec4s = width // 4
    op.append(
        COMBINE_ROWS.dispatch(
            "combine_rows",
            {
                **routed.numbers,
                "workgroup_size": _COMBINE_LANES,
                "shared": int(shared is not None),
                "row_vec4s": row_vec4s,
                "weight_word": shared_weight_word(routed.shape.n_used) if gated else NO_WORD,
            },
            {
                **routed.tensors,
                "expert_out": expert_out.part(0, routed.n_pairs * width),
                # Without a shared expert the shader reads none, but something must be bound.
                "shared_out": shared.tensor if shared else expert_out,
                "hidden": hidden.part(0, routed.n_rows * width),
                "done": tiles.done,
            },
            (-(-row_vec4s // _COMBINE_LANES), op.n_rows, 1),
            op.label,
        )
    )
