"""Rivals measured in turns, and the ratios that this allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from vkmoe.bench.measure import MIN_REPEATS, Summary, resamples, summarise
from vkmoe.errors import VkmoeError


class UnfairRatioError(VkmoeError):
    """Refuses a ratio of measurements that do not allow one."""


class Arms:
    """Collects what rivals scored, in the order it was measured."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self._taken: list[tuple[str, float]] = []

    def add(self, arm: str, value: float) -> None:
        self._taken.append((arm, value))

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for name, _ in self._taken))

    def summary(self, arm: str) -> Summary:
        return summarise(self.values(arm))

    def values(self, arm: str) -> list[float]:
        return [value for name, value in self._taken if name == arm]

    def ratio(self, above: str, below: str, card: Mapping[str, Any]) -> Summary:
        """Divide the medians; the interval resamples whole rounds.

        Raises UnfairRatioError unless the arms were taken in turns, at least MIN_REPEATS times, and
        `card` states clocks and link, which change what is measured.
        """
        self._check_turns((above, below))
        missing = [key for key in ("clocks", "link") if not card.get(key)]
        if missing:
            raise UnfairRatioError(
                f"no ratio: the card does not state {' and '.join(missing)}",
                "make the card with environment.describe",
            )
        tops, bottoms = np.array(self.values(above)), np.array(self.values(below))
        draws = resamples(tops.size)
        ratios = np.median(tops[draws], axis=1) / np.median(bottoms[draws], axis=1)
        low, high = np.percentile(ratios, (2.5, 97.5))
        return Summary(
            float(np.median(tops) / np.median(bottoms)), float(low), float(high), tops.size
        )

    def _check_turns(self, wanted: tuple[str, str]) -> None:
        order, names = [name for name, _ in self._taken], self.names
        if set(wanted) - set(names):
            raise UnfairRatioError(f"no ratio: only {names} were measured", "measure both arms")
        rounds = [order[i : i + len(names)] for i in range(0, len(order), len(names))]
        if any(sorted(one) != sorted(names) for one in rounds):
            raise UnfairRatioError(
                "no ratio: the arms were not measured in turns", "measure them with take_turns"
            )
        if len(rounds) < MIN_REPEATS:
            raise UnfairRatioError(
                f"no ratio from {len(rounds)} repeats", f"use --repeats {MIN_REPEATS} or more"
            )


def take_turns(arms: Mapping[str, Callable[[], float]], repeats: int, unit: str) -> Arms:
    """Measure every arm `repeats` times, in turns, the first arm changing from round to round."""
    taken = Arms(unit)
    names = list(arms)
    for index in range(repeats):
        for name in names if index % 2 == 0 else reversed(names):
            taken.add(name, arms[name]())
    return taken
