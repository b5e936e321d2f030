"""Few combinations of choices in which every pair of choices occurs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

Row = tuple[Any, ...]  # a choice for each factor


def pairs(row: Row) -> set[tuple[int, Any, int, Any]]:
    return {(i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2)}


def covering_rows(everything: Sequence[Row]) -> list[Row]:
    """Some of all possible rows, such that every pair occurs; the same ones every time."""
    left = set().union(*map(pairs, everything))
    chosen: list[Row] = []
    while left:
        best = max(everything, key=lambda row: len(pairs(row) & left))
        chosen.append(best)
        left -= pairs(best)
    return chosen
