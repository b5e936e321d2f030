"""Appends what goes round the experts of a prompt's rows: pairs sorted into tiles, sums of pairs.

A pair is one of the experts that a row chose: row * n_used + rank. Kernels that multiply tiles go
between. An expert that has several tiles is read as often; where it is not on the device it may be
brought there first, so that the link carries it once. Shaders: expert_tiles.comp,
bring_experts.comp, combine_rows.comp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from vkmoe.config import MAX_ROWS
from vkmoe.gpu.kernels import kernel
from vkmoe.gpu.program import Dispatch, Range, TensorRef, memory_range, workgroup_lines
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.experts.operations import NO_WORD
from vkmoe.kernels.matmul.operations import N_ROUNDS, TILE_HEADER_WORDS, TILE_WORDS, most_tiles
from vkmoe.kernels.memory.operations import GATHER_WORKGROUP, GROUP_BYTES, UNIT_BYTES
from vkmoe.kernels.router.operations import RouterShape, routing_words, shared_weight_word

EXPERT_TILES = kernel(
    "expert_tiles",
    "r:routing r:params rw:done w:tiles w:sorted_pairs w:brought",
    "address:first_place u32:place_bytes u32:n_places u32:layer u32:row_words u32:tile_columns "
    "u32:clears u32:picks",
    "workgroup_size n_experts n_used",
)
BRING_EXPERTS = kernel(
    "bring_experts", "r:brought", "u32:first_rank u32:skipped_units u32:n_units", "workgroup_size"
)
COMBINE_ROWS = kernel(
    "combine_rows",
    "r:expert_out r:shared_out r:routing r:params rw:hidden r:done",
    "u32:row_vec4s u32:row_words u32:weight_word u32:picks",
    "workgroup_size n_used shared partial adds",
)

N_HALVES = 2  # of the places: experts come to one while those in the other are multiplied
_FEW_ROUNDS, HALF_BYTES = 8, 128 << 20  # of places: rounds cost dispatches, places memory
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

    `tiles` and `sorted_pairs` are as ExpertTiles (matmul.py) has them; tiles are in rising order of
    experts, those of experts that are brought behind the others. `brought` has four words of each
    of those: the addresses of home and place. `done` [n_experts] marks the experts that have had
    tiles since it was cleared.
    """

    routed: RoutedRows
    columns: int

    @property
    def most(self) -> int:
        """Count the tiles at most."""
        return most_tiles(self.columns, self.routed.n_pairs, self.routed.shape.n_experts)

    @property
    def tiles(self) -> TensorRef:
        return TensorRef("tiles", TILE_HEADER_WORDS + TILE_WORDS * self.most)

    @property
    def sorted_pairs(self) -> TensorRef:
        return TensorRef("sorted_pairs", self.routed.n_pairs)

    @property
    def done(self) -> TensorRef:
        return TensorRef("done", self.routed.shape.n_experts)

    @property
    def brought(self) -> TensorRef:
        n_ranks = 2 * self.routed.shape.n_experts  # of all experts, and of a round's idle places
        return TensorRef("brought", 4 * n_ranks)


def places_of_round(n_experts: int, span_bytes: int, half_bytes: int = HALF_BYTES) -> int:
    """Choose how many of a layer's experts are brought at a time: an eighth, or what a half holds.

    More than a half holds where there would be too many rounds else.
    """
    fewest, most = -(-n_experts // (N_ROUNDS - 1)), -(-n_experts // _FEW_ROUNDS)
    return max(fewest, min(most, half_bytes // max(span_bytes, 1)))


@dataclass(frozen=True)
class BroughtPlaces:
    """Describes where experts are brought to: places of two halves, which take turns by rounds."""

    address: int
    place_bytes: int
    n_places: int  # of a half
    n_experts: int  # of a layer

    def __post_init__(self) -> None:
        assert self.place_bytes % UNIT_BYTES == 0 and self.n_places <= self.n_experts, self
        assert self.n_rounds < N_ROUNDS, self

    @property
    def n_rounds(self) -> int:
        """Count the rounds that all experts of a layer take."""
        return -(-self.n_experts // self.n_places)

    def most_experts(self, round_index: int) -> int:
        """Count the experts at most whose tiles are in a round, which are counted from 1.

        Tiles of experts that are not brought lie evenly in the rounds before the last.
        """
        if round_index == self.n_rounds:
            return self.n_places
        return self.n_places + self.n_experts // (round_index + 1) + 1

    def half(self, round_index: int) -> Range:
        """Return the memory of the places of a round, which are counted from 1."""
        n_bytes = self.n_places * self.place_bytes
        return memory_range(self.address + (round_index - 1) % N_HALVES * n_bytes, n_bytes)


def clear_done(op: OpContext, tiles: PairTiles) -> None:
    """Append done = 0: the experts of another layer, or of other rows, are next.

    To the validation layer it reads and writes what `expert_tiles` does; so it says the same.
    """
    op.append(_dispatch(op, tiles, clears=True))


def expert_tiles(
    op: OpContext,
    tiles: PairTiles,
    layer: int,
    table: Range,
    places: BroughtPlaces | None = None,
    picks: bool = False,
) -> None:
    """Append tiles and sorted_pairs = those of experts that have an address and are not done yet.

    Experts that get tiles are done then. With `places`, those at home have theirs in rounds from 1
    on, where `bring_experts` has brought them. `table` is the memory of the expert tables, of which
    the one named in `params` is read; `layer` counts MoE layers as it does. `picks`: the pairs of
    rows that want logits take part alone.
    """
    assert 8 * (layer + 1) * tiles.routed.shape.n_experts <= table.end - table.start
    op.append(_dispatch(op, tiles, layer, table=(table,), places=places, picks=picks))


def _dispatch(
    op: OpContext,
    tiles: PairTiles,
    layer: int = 0,
    clears: bool = False,
    table: tuple[Range, ...] = (),
    places: BroughtPlaces | None = None,
    picks: bool = False,
) -> Dispatch:
    routed, on_gpu = tiles.routed, op.tuning.mapping == "lanes"
    numbers = {
        **routed.numbers,
        "workgroup_size": _SORT_LANES if on_gpu else op.tuning.workgroup_size,
        "n_experts": routed.shape.n_experts,
        "first_place": places.address if places else 0,
        "place_bytes": places.place_bytes if places else 0,
        "n_places": places.n_places if places else 0,
        "layer": layer,
        "tile_columns": tiles.columns,
        "clears": int(clears),
        "picks": int(picks),
    }
    tensors = {
        **routed.tensors,
        "done": tiles.done,
        "tiles": tiles.tiles,
        "sorted_pairs": tiles.sorted_pairs,
        "brought": tiles.brought,
    }
    return EXPERT_TILES.dispatch("expert_tiles", numbers, tensors, (1, 1, 1), op.label, reads=table)


def bring_experts(
    op: OpContext,
    tiles: PairTiles,
    places: BroughtPlaces,
    round_index: int,
    part: slice,
    homes: tuple[Range, ...],
) -> None:
    """Append the copies of a round's experts from their homes to the places their tiles name.

    Of each span the bytes of `part` are copied. `homes` are the bytes that the homes may lie in.
    """
    n_bytes = part.stop - part.start
    assert part.start % UNIT_BYTES == 0 and n_bytes % UNIT_BYTES == 0, part
    assert 0 <= part.start < part.stop <= places.place_bytes, part
    assert 1 <= round_index <= places.n_rounds, round_index
    op.append(
        BRING_EXPERTS.dispatch(
            "bring_experts",
            {
                "workgroup_size": GATHER_WORKGROUP,
                "first_rank": (round_index - 1) * places.n_places,
                "skipped_units": part.start // UNIT_BYTES,
                "n_units": n_bytes // UNIT_BYTES,
            },
            {"brought": tiles.brought},
            (*workgroup_lines(-(-n_bytes // GROUP_BYTES)), places.n_places),
            op.label,
            reads=homes,
            writes=(places.half(round_index),),
        )
    )


class SharedRows(NamedTuple):
    """Describes what a shared expert gave: f32 [n_rows][width]. `gated`: its weight is routed."""

    tensor: TensorRef
    gated: bool

    def weight_word(self, shape: RouterShape) -> int:
        """Find the word of its weight in a row's routing."""
        assert not self.gated or shape.shared_gate, "no weight is routed for the shared expert"
        return shared_weight_word(shape.n_used) if self.gated else NO_WORD


class Combining(NamedTuple):
    """Says which results of experts are added up, and where to."""

    partial: bool = False  # one that is not done is left out: another device computes it
    picks: bool = False  # for the rows that want logits alone
    adds: bool = True  # to what the rows are; else in its place

    @property
    def numbers(self) -> dict[str, int]:
        """Return them as kernels name them."""
        return {name: int(value) for name, value in self._asdict().items()}


ALL_ADDED = Combining()


def combine_rows(
    op: OpContext,
    tiles: PairTiles,
    expert_out: TensorRef,
    hidden: TensorRef,
    how: Combining = ALL_ADDED,
    shared: SharedRows | None = None,
) -> None:
    """Append hidden[row] += sum of weight * expert_out[pair] by rising rank, then the shared one's.

    expert_out is f32 [n_rows * n_used][width], hidden f32 [n_rows][width]; rows that are not in use
    stay what they are. One of whose experts some is not done becomes NaN, unless it is combined in
    part. A shared expert's weight is 1 if it is not gated.
    """
    routed = tiles.routed
    row_vec4s = expert_out.n_words // routed.n_pairs // 4
    assert expert_out.n_words == 4 * row_vec4s * routed.n_pairs, expert_out
    op.append(
        COMBINE_ROWS.dispatch(
            "combine_rows",
            {
                **routed.numbers,
                **how.numbers,
                "workgroup_size": _COMBINE_LANES,
                "shared": int(shared is not None),
                "row_vec4s": row_vec4s,
                "weight_word": shared.weight_word(routed.shape) if shared else NO_WORD,
            },
            {
                **routed.tensors,
                "expert_out": expert_out,
                "shared_out": shared.tensor if shared else expert_out,  # which is not read then
                "hidden": hidden.part(0, routed.n_rows * 4 * row_vec4s),
                "done": tiles.done,
            },
            (-(-row_vec4s // _COMBINE_LANES), op.n_rows, 1),
            op.label,
        )
    )
