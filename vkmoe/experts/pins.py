"""Which experts to hold for good: pure choices by use. Ties go to the lower number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.decide.keys import KeySpace
from vkmoe.experts.decide.settings import PoolSpec

__all__ = ["fill", "hottest", "most_used"]

Values = NDArray[Any]  # uses or decayed counts [n_keys]


def most_used(values: Values, rows: NDArray[np.int64], n: int) -> list[int]:
    """The `n` most used of each row of numbers [n_rows, n_experts]."""
    order = np.argsort(-values[rows], axis=1, kind="stable")[:, :n]
    chosen: list[int] = np.take_along_axis(rows, order, axis=1).reshape(-1).tolist()
    return chosen


def hottest(
    values: Values, pools: Sequence[PoolSpec], space: KeySpace, n: int, taken: Sequence[int]
) -> list[int]:
    """Up to `n` used experts of each layer with slots; half of a pool may be pinned in all.

    `taken` are pinned already. Where the room is too small for all layers of a pool, those whose
    experts were used most are served first.
    """
    left = values.copy()
    left[list(taken)] = 0
    rows = left.reshape(space.n_layers, space.n_experts)
    best = np.argsort(-rows, axis=1, kind="stable")[:, :n].tolist()
    n_taken = Counter(space.layer(key) for key in taken)
    chosen: list[int] = []
    for pool in pools:
        by_layer = []
        for layer in pool.layers:
            first = layer * space.n_experts
            keys = [first + expert for expert in best[layer] if left[first + expert] > 0]
            by_layer.append((-sum(left[keys].tolist()), layer, keys))
        room = max(0, pool.capacity // 2 - sum(n_taken[layer] for layer in pool.layers))
        chosen += [key for _, _, keys in sorted(by_layer) for key in keys][:room]
    return chosen


def fill(values: Values, pool: PoolSpec, space: KeySpace) -> list[int]:
    """Used experts for all slots of a pool, the most used first; every layer gets its floor."""
    rows = np.stack([space.numbers(layer) for layer in pool.layers])
    chosen = most_used(values, rows, pool.floor)
    rest = set(rows.reshape(-1).tolist()) - set(chosen)
    chosen += sorted(rest, key=lambda key: (-values[key], key))
    return [key for key in chosen if values[key] > 0][: pool.capacity]
