"""This module has the NumPy twins of expert_tiles.comp and combine_rows.comp.

A pair is one of the experts that a row chose: row * n_used + rank.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.reference.matvec import Floats

__all__ = ["Sorted", "combine_rows", "expert_tiles"]


class Sorted(NamedTuple):
    """Holds pairs grouped by expert, runs of them that are tiles, and which experts are done."""

    tiles: NDArray[np.int64]  # [n_tiles, 3]: expert, first pair in `pairs`, count
    pairs: NDArray[np.int64]  # of experts that take part
    done: NDArray[np.bool_]  # [n_experts]


def expert_tiles(
    ids: NDArray[np.integer],
    present: NDArray[np.bool_],
    done: NDArray[np.bool_],
    tile_columns: int,
) -> Sorted:
    """Sort the pairs of ids [n_rows, n_used] by expert, those of experts present and not done."""
    chosen = ids.reshape(-1).astype(np.int64)
    order = np.argsort(chosen, kind="stable")
    pairs = order[(present & ~done)[chosen[order]]]
    experts, starts, counts = np.unique(chosen[pairs], return_index=True, return_counts=True)
    tiles = [
        (expert, start + first, min(tile_columns, count - first))
        for expert, start, count in zip(experts, starts, counts, strict=True)
        for first in range(0, count, tile_columns)
    ]
    marked = done.copy()
    marked[experts] = True
    return Sorted(np.array(tiles, np.int64).reshape(-1, 3), pairs, marked)


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
