"""What keeps an expert out of a slot although somebody may leave for it: worth, and a budget."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.moves import FREE, Move
from vkmoe.experts.settings import PoolSpec

__all__ = ["NO_LIMITS", "Limits", "affordable", "by_worth", "worthwhile"]

Mask = NDArray[np.bool_]  # [n_keys]


class Limits(NamedTuple):
    """Newcomers must be worth more than `margin` times who leaves; pinned ones enter anyway.

    Slots that are given away have at most `budget_bytes`, worth or not.
    """

    worth: NDArray[np.float64] | None = None  # [n_keys]
    margin: float = 1.0
    budget_bytes: float = inf


NO_LIMITS = Limits()


def by_worth(newcomers: Sequence[int], pinned: Mask, worth: NDArray[np.float64]) -> list[int]:
    """The pinned ones first, then those worth most; equals in the order they came."""
    keys = np.array(newcomers, np.int64)
    order = np.argsort(-np.where(pinned[keys], inf, worth[keys]), kind="stable")
    ordered: list[int] = keys[order].tolist()
    return ordered


def worthwhile(
    moves: Sequence[Move], pinned: Mask, worth: NDArray[np.float64], margin: float
) -> list[Move]:
    """In each pool those up to the first whose newcomer is not worth its victim.

    Those after it are worth less, and their victims would leave later.
    """
    keys = np.array([move.key for move in moves], np.int64)
    victims = np.array([move.victim for move in moves], np.int64)
    enters = (victims == FREE) | pinned[keys] | (worth[keys] > margin * worth[victims])
    closed: set[int] = set()
    kept = []
    for move, may in zip(moves, enters.tolist(), strict=True):
        if not may:
            closed.add(move.pool)
        elif move.pool not in closed:
            kept.append(move)
    return kept


def affordable(
    moves: Sequence[Move],
    newcomers: Sequence[int],
    pools: Sequence[PoolSpec],
    budget_bytes: float,
) -> list[Move]:
    """Those up to the first, in the order of the newcomers, that the budget has no room for."""
    sizes = {move.key: pools[move.pool].slot_bytes for move in moves}
    kept: set[int] = set()
    for key in newcomers:
        if key in sizes:
            budget_bytes -= sizes[key]
            if budget_bytes < 0:
                break
            kept.add(key)
    return [move for move in moves if move.key in kept]
