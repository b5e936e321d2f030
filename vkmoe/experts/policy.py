"""What a cache policy is: it orders the resident experts of one pool of slots.

A policy sees numbers of experts (keys.py), never a buffer. All policies pass one contract test,
tests/experts/test_policy_contract.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Sequence

from vkmoe.experts.frequency import DecayedCounts
from vkmoe.experts.keys import KeySpace

__all__ = ["Policy"]


class Policy(ABC):
    """Which experts hold the `capacity` slots of a pool, and which of them would leave next.

    With more than one layer in the pool, `floor` is the number of slots below which a layer does
    not lose an expert to another layer.
    """

    def __init__(
        self, capacity: int, space: KeySpace, counts: DecayedCounts, floor: int = 0
    ) -> None:
        assert capacity >= 1, capacity
        self.capacity = capacity
        self.space = space
        self.counts = counts
        self.floor = floor

    @abstractmethod
    def use(self, keys: Sequence[int]) -> list[int]:
        """A token used these distinct keys, most important first; call it once per token and pool.

        Mutates the order of the resident ones. Returns those that are not resident, in order.
        `counts` must have counted the uses before.
        """

    @abstractmethod
    def victim(self, newcomer: int, needed: Container[int]) -> int | None:
        """Who must leave for `newcomer`; None if nobody may. Mutates nothing.

        Never a pinned key, never one in `needed` (what the current token uses, what is being
        copied), never below another layer's floor; the key inserted last only if nobody else may.
        """

    @abstractmethod
    def insert(self, key: int) -> None:
        """`key`, not resident, takes a free slot. Must hold: len(self) < capacity."""

    @abstractmethod
    def remove(self, key: int) -> None:
        """A resident key leaves its slot. A pin of it stays noted for when it comes back."""

    @abstractmethod
    def pin(self, key: int) -> None:
        """Never let `key` leave. Of a key that is not resident: from its next insertion on."""

    @abstractmethod
    def unpin(self, key: int) -> None:
        """Take a pin back, of a resident key or not; does nothing to one that has none."""

    @abstractmethod
    def is_pinned(self, key: int) -> bool: ...

    @abstractmethod
    def __contains__(self, key: object) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """Resident keys, those that would leave first in front; the order is the policy's own."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raises AssertionError if the policy contradicts itself (tests)."""
