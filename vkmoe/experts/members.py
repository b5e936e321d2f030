"""What all policies keep alike: pins, residents per layer, the newest entry, who may leave.

Knows no order; that is what a policy adds.
"""

from __future__ import annotations

from collections.abc import Container

from vkmoe.experts.frequency import DecayedCounts
from vkmoe.experts.keys import KeySpace
from vkmoe.experts.policy import Policy

__all__ = ["Members"]


class Members(Policy):
    """A policy's bookkeeping without its order. Subclasses call `_added` and `_removed`."""

    def __init__(
        self, capacity: int, space: KeySpace, counts: DecayedCounts, floor: int = 0
    ) -> None:
        super().__init__(capacity, space, counts, floor)
        self._pins: set[int] = set()  # resident or not
        self._newest: int | None = None  # the key inserted last, while resident
        self._per_layer = [0] * space.n_layers  # residents

    def pin(self, key: int) -> None:
        self._pins.add(key)

    def unpin(self, key: int) -> None:
        self._pins.discard(key)

    def is_pinned(self, key: int) -> bool:
        return key in self._pins

    def _added(self, key: int) -> None:
        """Must hold: `key` is not resident and a slot is free. To be called first."""
        assert len(self) < self.capacity, (key, self.capacity)
        assert key not in self, key
        self._newest = key
        self._per_layer[self.space.layer(key)] += 1

    def _removed(self, key: int) -> None:
        self._per_layer[self.space.layer(key)] -= 1
        if key == self._newest:
            self._newest = None

    def _may_leave(self, key: int, newcomer: int, needed: Container[int]) -> bool:
        """Whether a resident key may make room, were it not the newest."""
        return key not in needed and key not in self._pins and self._can_spare(key, newcomer)

    def _can_spare(self, key: int, newcomer: int) -> bool:
        """Whether the floor lets `key`'s layer lose an expert to `newcomer`'s."""
        if not self.floor:
            return True
        layer = self.space.layer(key)
        return layer == self.space.layer(newcomer) or self._per_layer[layer] > self.floor

    def _newest_if_it_may(self, newcomer: int, needed: Container[int]) -> int | None:
        """The victim where nobody else may leave: a pool of one slot would never change again."""
        newest = self._newest
        if newest is None or not self._may_leave(newest, newcomer, needed):
            return None
        return newest

    def check_integrity(self) -> None:
        keys = list(self)
        assert len(keys) == len(set(keys)) == len(self) <= self.capacity, (keys, len(self))
        assert all(key in self for key in keys), keys
        assert all(0 <= key < self.space.n_keys for key in keys), keys
        layers = [self.space.layer(key) for key in keys]
        counted = [layers.count(layer) for layer in range(self.space.n_layers)]
        assert counted == self._per_layer, (counted, self._per_layer)
        assert self._newest is None or self._newest in self, self._newest
