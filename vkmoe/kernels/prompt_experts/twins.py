"""This module has the NumPy twins of expert_tiles.comp, bring_experts.comp and combine_rows.comp.

A pair is one of the experts that a row chose: row * n_used + rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, compress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.kernels.matvec.twins import Floats

N_ROUNDS = 33  # one for experts that are read where they are, the others for those brought


class Sorted(NamedTuple):
    """Holds pairs grouped by expert, runs of them that are tiles, and which experts are done."""

    tiles: NDArray[np.int64]  # [n_tiles, 3]: expert, first pair in `pairs`, count
    pairs: NDArray[np.int64]  # of experts that take part
    done: NDArray[np.bool_]  # [n_experts]
    brought: NDArray[np.int64]  # experts, in their order: `n_each` in each round from 1 on
    n_each: int
    round_starts: NDArray[np.int64]  # [N_ROUNDS + 1]: the first tile of each round


def expert_tiles(
    ids: NDArray[np.integer],
    present: NDArray[np.bool_],
    done: NDArray[np.bool_],
    tile_columns: int,
    at_home: NDArray[np.bool_] | None = None,
    n_places: int = 0,
) -> Sorted:
    """Sort the pairs of ids [n_rows, n_used] by expert, those of experts present and not done.

    With `n_places`, experts that are `at_home` [n_experts] are brought, so many at a time at most,
    and evenly in all rounds that this takes at worst. The tiles of the others lie evenly in the
    rounds before the last of these.
    """
    chosen = ids.reshape(-1).astype(np.int64)
    order = np.argsort(chosen, kind="stable")
    pairs = order[(present & ~done)[chosen[order]]]
    experts, starts, counts = np.unique(chosen[pairs], return_index=True, return_counts=True)
    missed = at_home[experts] if n_places and at_home is not None else np.zeros(len(experts), bool)
    most_rounds = -(-len(present) // max(n_places, 1))
    n_each = max(1, -(-int(missed.sum()) // most_rounds))
    rank = np.cumsum(missed) - 1
    in_place = list[tuple[int, int, int]]()
    rounds: list[list[tuple[int, int, int]]] = [[] for _ in range(N_ROUNDS)]
    for i, expert in enumerate(experts):
        tiles = [
            (expert, starts[i] + first, min(tile_columns, counts[i] - first))
            for first in range(0, counts[i], tile_columns)
        ]
        (rounds[1 + rank[i] // n_each] if missed[i] else in_place).extend(tiles)
    n_beside = max(1, -(-int(missed.sum()) // n_each))
    for index in range(n_beside):
        shared = (i * n_beside // len(in_place) == index for i in range(len(in_place)))
        rounds[index][:0] = compress(in_place, shared)
    marked = done.copy()
    marked[experts] = True
    listed = np.array([*chain(*rounds)], np.int64).reshape(-1, 3)
    round_starts = np.cumsum([0, *map(len, rounds)])
    return Sorted(listed, pairs, marked, experts[missed], n_each, round_starts)


def bring_experts(
    homes: NDArray[np.uint8], places: NDArray[np.uint8], to: Mapping[int, int], part: slice
) -> NDArray[np.uint8]:
    """Return places [n_places, span] with the bytes of `part` of the experts in `to`.

    homes [n_experts, span]; `to` maps an expert to its place.
    """
    result = places.copy()
    for expert, place in to.items():
        result[place, part] = homes[expert, part]
    return result


def combine_rows(
    hidden: Floats,
    expert_out: Floats,
    weights: Floats,
    shared: Floats | None = None,
    shared_weights: Floats | float = 1.0,
) -> NDArray[np.float64]:
    """Compute hidden + sum of weights[row, rank] * expert_out[row, rank], + the shared expert's.

    hidden and shared [n_rows, width], expert_out [n_rows, n_used, width], weights [n_rows, n_used],
    shared_weights [n_rows].
    """
    result = np.asarray(hidden, np.float64).copy()
    result += np.einsum("tr,trw->tw", weights.astype(np.float64), expert_out.astype(np.float64))
    if shared is not None:
        result += np.reshape(np.asarray(shared_weights, np.float64), (-1, 1)) * shared
    return result
