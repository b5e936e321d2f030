"""Counts the most hits a cache can have: Belady's optimum (IBM Systems Journal 5, 1966), which
knows the future, for a cache that is filled between tokens.

A token's hits are judged by what is held when it begins. After it, the cache may keep any of what
it held and what the token used, so it promotes on demand only and may let an expert pass by. Every
use then opens an interval that lasts to the expert's next use; a slot holds one interval at a time,
and each interval kept is a hit. Dropping the one that ends last whenever there are too many keeps
the most of them.

Residents, profiles and pins, which bring experts in ahead of need, are not bound by this ceiling
unless they are given as `initial`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.decide.keys import KeySpace
from vkmoe.experts.decide.settings import PoolSpec

__all__ = ["belady_hits", "first_uses"]

NEVER = np.iinfo(np.int64).max

Batch = tuple[NDArray[np.int64], int]  # layers [n_pools, layers per pool], slots of each pool


def belady_hits(
    routing: NDArray[np.uint32],
    space: KeySpace,
    pools: Sequence[PoolSpec],
    initial: NDArray[np.bool_] | None = None,
) -> NDArray[np.int64]:
    """Return the hits of each token in each layer, [n_tokens, n_layers].

    `routing` is [n_tokens, n_layers, n_used]. `initial` [n_layers, n_experts] are held when the
    first token begins; empty without. Floors of pools do not bind the optimum.
    """
    numbers = space.keys_of(routing)
    upcoming, first = _next_uses(numbers, space)
    held = np.full(space.n_keys, NEVER)  # when a held expert is used next; NEVER: not held
    if initial is not None:
        held = np.where(initial.reshape(-1), first, NEVER)
    by_layer = held.reshape(space.n_layers, space.n_experts)
    batches = _batches(space, pools)
    hits = np.empty(routing.shape[:2], np.int64)
    for token, keys in enumerate(numbers):
        hits[token] = np.count_nonzero(held[keys] != NEVER, axis=1)
        held[keys] = upcoming[token]
        for layers, capacity in batches:
            rows = by_layer[layers].reshape(len(layers), -1)
            by_layer[layers] = _nearest(rows, capacity).reshape(*layers.shape, -1)
    return hits


def first_uses(
    routing: NDArray[np.uint32], space: KeySpace, initial: NDArray[np.bool_] | None = None
) -> NDArray[np.int64]:
    """Return how many different experts each layer uses, [n_layers], those held initially left out.

    So many misses no cache avoids that is filled on demand.
    """
    used = np.zeros((space.n_layers, space.n_experts), np.bool_)
    for token in routing:
        np.put_along_axis(used, token.astype(np.int64), True, axis=1)
    if initial is not None:
        used &= ~initial
    counts: NDArray[np.int64] = np.count_nonzero(used, axis=1)
    return counts


def _next_uses(
    numbers: NDArray[np.int64], space: KeySpace
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return when each used expert is used next, as `numbers`; when each is used first, [n_keys].

    A use is token * n_keys + key: in order of time, and no two are equal. NEVER: not again.
    """
    upcoming = np.empty_like(numbers)
    following = np.full(space.n_keys, NEVER)
    for token in range(len(numbers) - 1, -1, -1):
        keys = numbers[token]
        upcoming[token] = following[keys]
        following[keys] = token * space.n_keys + keys
    return upcoming, following


def _batches(space: KeySpace, pools: Sequence[PoolSpec]) -> list[Batch]:
    """Group pools of one shape, to be handled at once; layers without a pool hold nothing."""
    groups: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for pool in pools:
        groups.setdefault((len(pool.layers), pool.capacity), []).append(pool.layers)
    without = set(range(space.n_layers)) - {layer for pool in pools for layer in pool.layers}
    if without:
        groups[1, 0] = [(layer,) for layer in sorted(without)]
    return [(np.array(layers, np.int64), capacity) for (_, capacity), layers in groups.items()]


def _nearest(rows: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Return each row with all but its `capacity` smallest entries made NEVER."""
    if capacity == 0:
        return np.full_like(rows, NEVER)
    if capacity >= rows.shape[1]:
        return rows
    last = np.partition(rows, capacity - 1, axis=1)[:, capacity - 1 : capacity]
    return np.where(rows > last, NEVER, rows)
