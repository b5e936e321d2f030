"""Least frequently and least recently used leaves first, both in one score.

    score = decayed uses / (1 + tokens since the last use)

The score of vLLM's CachedWeightProvider (pull request 37190).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.frequency import DecayedCounts
from vkmoe.experts.keys import KeySpace
from vkmoe.experts.members import Members

__all__ = ["Lfru"]


class Lfru(Members):
    """The resident with the lowest score leaves; of equals, the one in the lowest place.

    An insertion counts as a use. Scores are computed for all places of the pool at once.
    """

    def __init__(
        self, capacity: int, space: KeySpace, counts: DecayedCounts, floor: int = 0
    ) -> None:
        super().__init__(capacity, space, counts, floor)
        self._uses: NDArray[np.float64] = np.asarray(counts.relative)  # a view
        self._place: dict[int, int] = {}  # of each resident key
        self._free = list(range(capacity))[::-1]
        self._keys = np.zeros(capacity, np.int64)  # 0 in free places
        self._used_at = np.zeros(capacity, np.int64)  # tokens
        self._excluded = np.full(capacity, np.inf)  # inf for free and pinned places, else 0
        self._used_at_view = memoryview(self._used_at.data)  # writes one number faster

    def use(self, keys: Sequence[int]) -> list[int]:
        place, used_at, now = self._place, self._used_at_view, self.counts.now
        missing = []
        for key in keys:
            if key in place:
                used_at[place[key]] = now
            else:
                missing.append(key)
        return missing

    def victim(self, newcomer: int, needed: Container[int]) -> int | None:
        scores = self._scores()
        if self._newest is not None:
            scores[self._place[self._newest]] = np.inf
        if self.floor:
            self._exclude_layers_at_floor(scores, newcomer)
        while True:
            lowest = int(scores.argmin())
            if scores[lowest] == np.inf:
                return self._newest_if_it_may(newcomer, needed)
            key = int(self._keys[lowest])
            if key not in needed:
                return key
            scores[lowest] = np.inf

    def insert(self, key: int) -> None:
        self._added(key)
        place = self._free.pop()
        self._place[key] = place
        self._keys[place] = key
        self._used_at[place] = self.counts.now
        self._excluded[place] = np.inf if key in self._pins else 0.0

    def remove(self, key: int) -> None:
        place = self._place.pop(key)
        self._excluded[place] = np.inf
        self._free.append(place)
        self._removed(key)

    def pin(self, key: int) -> None:
        super().pin(key)
        if key in self._place:
            self._excluded[self._place[key]] = np.inf

    def unpin(self, key: int) -> None:
        super().unpin(key)
        if key in self._place:
            self._excluded[self._place[key]] = 0.0

    def __contains__(self, key: object) -> bool:
        return key in self._place

    def __len__(self) -> int:
        return len(self._place)

    def __iter__(self) -> Iterator[int]:
        """By score, then the newest, then what is pinned."""
        scores = self._scores()
        order = np.argsort(scores, kind="stable")
        ordinary = self._keys[order[np.isfinite(scores[order])]].tolist()
        yield from (key for key in ordinary if key != self._newest)
        yield from (key for key in ordinary if key == self._newest)
        yield from (key for key in self._place if key in self._pins)

    def check_integrity(self) -> None:
        super().check_integrity()
        places = sorted([*self._place.values(), *self._free])
        assert places == list(range(self.capacity)), places
        for key, place in self._place.items():
            assert self._keys[place] == key, (key, place, self._keys[place])
            assert (self._excluded[place] == np.inf) == (key in self._pins), key
        assert np.isinf(self._excluded[self._free]).all(), self._free

    def _scores(self) -> NDArray[np.float64]:
        """A score for each place: float64 [capacity], inf where nobody may be taken."""
        since = self.counts.now - self._used_at
        scores: NDArray[np.float64] = self._uses[self._keys] / (1 + since) + self._excluded
        return scores

    def _exclude_layers_at_floor(self, scores: NDArray[np.float64], newcomer: int) -> None:
        layers = self._keys // self.space.n_experts
        at_floor = np.asarray(self._per_layer)[layers] <= self.floor
        scores[at_floor & (layers != self.space.layer(newcomer))] = np.inf
