"""Segmented LRU that looks at how often an expert was used: the default policy.

A newcomer is on probation until it is used again; only then it is protected. Of those on
probation the least used leaves, so a passing expert does not push out a steady one.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from math import inf

from vkmoe.experts.frequency import DecayedCounts
from vkmoe.experts.keys import KeySpace
from vkmoe.experts.members import Members

__all__ = ["PROTECTED_SHARE", "Slru"]

# Of the capacity. On traces of the demo model larger shares hit less, and smaller ones hardly more;
# where the subject changes, a share keeps what is in use now beside what once was.
PROTECTED_SHARE = 0.25


class Slru(Members):
    """Probationary, protected and pinned residents; the pinned count as protected.

    A use on probation promotes. Where more than `share` of the capacity is protected, the least
    recently used protected one that has no pin goes back on probation, as the most recent there.
    The victim is the least used on probation, the least recent of equals; where none of them may
    leave, the least recently used protected one.

    With `frequency` off the victim is the least recent on probation, for comparison.
    """

    def __init__(
        self,
        capacity: int,
        space: KeySpace,
        counts: DecayedCounts,
        floor: int = 0,
        share: float = PROTECTED_SHARE,
        frequency: bool = True,
    ) -> None:
        super().__init__(capacity, space, counts, floor)
        assert 0 <= share <= 1, share
        self.frequency = frequency
        # At least one slot is on probation: a newcomer could not stay otherwise.
        self.n_protected = min(int(capacity * share), capacity - 1)
        # Least recently used first. Plain dicts: smaller than ordered ones, and hundreds are looked
        # up for every token, from memory that the model has pushed out of the processor's caches.
        self._probation: dict[int, None] = {}
        self._protected: dict[int, None] = {}  # those without a pin
        self._held: dict[int, None] = {}  # residents with a pin

    def use(self, keys: Sequence[int]) -> list[int]:
        probation, protected, held = self._probation, self._protected, self._held
        missing = []
        promoted = False
        for key in keys:
            if key in protected:
                del protected[key]
                protected[key] = None
            elif key in probation:
                del probation[key]
                protected[key] = None
                promoted = True
            elif key not in held:
                missing.append(key)
        if promoted:
            self._demote()
        return missing

    def victim(self, newcomer: int, needed: Container[int]) -> int | None:
        newest, floor, frequency = self._newest, self.floor, self.frequency
        counts = self.counts.relative
        fewest, found = inf, None
        for key in self._probation:
            count = counts[key] if frequency else 0.0
            if (
                count < fewest
                and key != newest
                and key not in needed
                and (not floor or self._can_spare(key, newcomer))
            ):
                fewest, found = count, key
        if found is not None:
            return found
        for key in self._protected:
            if key != newest and self._may_leave(key, newcomer, needed):
                return key
        return self._newest_if_it_may(newcomer, needed)

    def insert(self, key: int) -> None:
        self._added(key)
        if key in self._pins:
            self._held[key] = None
            self._demote()
        else:
            self._probation[key] = None

    def remove(self, key: int) -> None:
        for segment in (self._probation, self._protected, self._held):
            if key in segment:
                del segment[key]
                self._removed(key)
                return
        raise KeyError(key)

    def pin(self, key: int) -> None:
        super().pin(key)
        for segment in (self._probation, self._protected):
            if key in segment:
                del segment[key]
                self._held[key] = None
                self._demote()

    def unpin(self, key: int) -> None:
        super().unpin(key)
        if key in self._held:
            del self._held[key]
            self._protected[key] = None
            self._demote()

    def __contains__(self, key: object) -> bool:
        return key in self._probation or key in self._protected or key in self._held

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected) + len(self._held)

    def __iter__(self) -> Iterator[int]:
        """Probation by use, protected by recency, then the newest, then what is pinned."""
        probation = list(self._probation)
        if self.frequency:
            probation.sort(key=self.counts.relative.__getitem__)  # stable: recency breaks ties
        ordinary = [*probation, *self._protected]
        yield from (key for key in ordinary if key != self._newest)
        yield from (key for key in ordinary if key == self._newest)
        yield from self._held

    def check_integrity(self) -> None:
        super().check_integrity()
        assert self._held.keys() <= self._pins, (self._held, self._pins)
        assert not self._pins & (self._probation.keys() | self._protected.keys()), self._pins
        n_protected = len(self._protected) + len(self._held)
        assert n_protected <= self.n_protected or not self._protected, n_protected

    def is_protected(self, key: int) -> bool:
        """Whether a resident key is in the protected segment, pinned or not."""
        return key in self._protected or key in self._held

    def _demote(self) -> None:
        """Bring the protected segment back to its share. Pinned ones stay, however many."""
        protected, probation = self._protected, self._probation
        n_over = len(protected) + len(self._held) - self.n_protected
        for _ in range(min(n_over, len(protected))):
            key = next(iter(protected))
            del protected[key]
            probation[key] = None
