"""Which experts to hold for good: pure choices by use. Ties go to the lower number."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.keys import KeySpace
from vkmoe.experts.settings import PoolSpec

__all__ = ["fill", "hottest", "most_used"]

Values = NDArray[Any]  # uses or decayed counts [n_keys]


def most_used(values: Values, rows: NDArray[np.int64], n: int) -> list[int]:
    """The `n` most used of each row of numbers [n_rows, n_experts]."""
    order = np.argsort(-values[rows], axis=1, kind="stable")[:, :n]
    chosen: list[int] = np.take_along_axis(rows, order, axis=1).reshape(-1).tolist()
    return chosen


def hottest(
    values: Values, pool: PoolSpec, space: KeySpace, n: int, taken: Collection[int]
) -> list[int]:
    """Up to `n` used experts of each layer of a pool, of which half may be pinned in all.

    `taken` are pinned already. When the room is too small for all layers, those whose experts were
    used most are served first.
    """
    n_taken = sum(space.layer(key) in pool.layers for key in taken)
    by_layer = []
    for layer in pool.layers:
        ordered = most_used(values, space.numbers(layer)[None], space.n_experts)
        chosen = [key for key in ordered if key not in taken and values[key] > 0][:n]
        by_layer.append((-float(values[chosen].sum()), layer, chosen))
    room = max(0, pool.capacity // 2 - n_taken)
    return [key for _, _, chosen in sorted(by_layer) for key in chosen][:room]


def fill(values: Values, pool: PoolSpec, space: KeySpace) -> list[int]:
    """Used experts for all slots of a pool, the most used first; every layer gets its floor."""
    rows = np.stack([space.numbers(layer) for layer in pool.layers])
    chosen = most_used(values, rows, pool.floor)
    rest = set(rows.reshape(-1).tolist()) - set(chosen)
    chosen += sorted(rest, key=lambda key: (-values[key], key))
    return [key for key in chosen if values[key] > 0][: pool.capacity]
