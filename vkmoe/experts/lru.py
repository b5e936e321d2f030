"""Least recently used leaves first: the plain policy that the others are measured by."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence

from vkmoe.experts.frequency import DecayedCounts
from vkmoe.experts.keys import KeySpace
from vkmoe.experts.members import Members

__all__ = ["Lru"]


class Lru(Members):
    """Recency alone. An insertion counts as a use; a pinned key keeps its place in the order."""

    def __init__(
        self, capacity: int, space: KeySpace, counts: DecayedCounts, floor: int = 0
    ) -> None:
        super().__init__(capacity, space, counts, floor)
        self._order: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def use(self, keys: Sequence[int]) -> list[int]:
        order = self._order
        for key in keys:
            if key in order:
                order.move_to_end(key)
        return [key for key in keys if key not in order]

    def victim(self, newcomer: int, needed: Container[int]) -> int | None:
        for key in self._order:
            if key != self._newest and self._may_leave(key, newcomer, needed):
                return key
        return self._newest_if_it_may(newcomer, needed)

    def insert(self, key: int) -> None:
        self._added(key)
        self._order[key] = None

    def remove(self, key: int) -> None:
        del self._order[key]
        self._removed(key)

    def __contains__(self, key: object) -> bool:
        return key in self._order

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        """By recency, then the newest, then what is pinned."""
        ordinary = [key for key in self._order if key not in self._pins]
        yield from (key for key in ordinary if key != self._newest)
        yield from (key for key in ordinary if key == self._newest)
        yield from (key for key in self._order if key in self._pins)
