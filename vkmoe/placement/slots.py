"""How many slots a number of bytes makes, and how many bytes slots take.

Pure. Split evenly: each layer has the same number, and what is left over gives one more to the
first layers it is enough for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from vkmoe.facts import DeviceInfo
from vkmoe.placement.allocations import arena_bytes

__all__ = ["N_LANDING", "READ_AT_HOME", "MissWays", "SlotLayout", "split_slots"]

N_LANDING = 2  # slots of a layer in which experts land while they are read, at most


class MissWays(NamedTuple):
    """How an expert without a slot is served, and whether it may stay where it landed."""

    way: Literal["read", "gather"] = "read"
    promote: bool = False
    reason: str = ""  # for the way, in a few words


READ_AT_HOME = MissWays()


@dataclass(frozen=True)
class SlotLayout:
    """What slots take on a device: their own bytes, those to land in, and room to gather."""

    device: DeviceInfo
    span_bytes: Sequence[int]  # of an expert in each MoE layer
    n_experts: int
    n_used: int
    ways: MissWays

    @property
    def n_landing(self) -> int:
        """Slots that each layer has besides its own: no more than a token can miss there."""
        return min(N_LANDING, self.n_used) if self.ways.promote else 0

    def own_bytes(self, slots: Sequence[int]) -> int:
        """Of `slots[layer]` slots as they are allocated, at most: one arena for each size."""
        return self._arenas(slots, 0)

    def landing_bytes(self, slots: Sequence[int]) -> int:
        """Of the landing slots besides, in the same arenas."""
        return self._arenas(slots, self.n_landing) - self._arenas(slots, 0)

    def n_bytes(self, slots: Sequence[int]) -> int:
        """Of both."""
        return self._arenas(slots, self.n_landing)

    @property
    def n_gathered(self) -> int:
        """Places that all layers share, as many as a token can miss in one."""
        return self.n_used if self.ways.way == "gather" else 0

    @property
    def gather_bytes(self) -> int:
        """Of those places, each for the largest expert."""
        size, n_places = max(self.span_bytes, default=0), self.n_gathered
        return arena_bytes(self.device, [size] * n_places, size * n_places)

    def largest(self, n_bytes: int) -> tuple[int, ...]:
        """The most slots of each layer that fit in `n_bytes`, landing slots and what allocations
        add included; all 0 if not one each.
        """
        usable = n_bytes - self.n_landing * sum(self.span_bytes)
        while True:
            slots = split_slots(usable, self.span_bytes, self.n_experts)
            excess = self.n_bytes(slots) - n_bytes
            if excess <= 0 or not any(slots):
                return slots
            usable -= excess

    def _arenas(self, slots: Sequence[int], n_landing: int) -> int:
        n_of_size: dict[int, int] = {}
        for n_slots, size in zip(slots, self.span_bytes, strict=True):
            n_all = n_slots + n_landing if n_slots else 0
            n_of_size[size] = n_of_size.get(size, 0) + n_all
        return sum(arena_bytes(self.device, [size] * n, size * n) for size, n in n_of_size.items())


def split_slots(n_bytes: int, slot_bytes: Sequence[int], n_experts: int) -> tuple[int, ...]:
    """Slots per layer that `n_bytes` are enough for, at most `n_experts`; all 0 if not one each."""
    n_slots = min(n_experts, max(0, n_bytes) // sum(slot_bytes))
    rest = n_bytes - n_slots * sum(slot_bytes)
    slots = []
    for size in slot_bytes:
        more = 0 < n_slots < n_experts and size <= rest
        rest -= size * more
        slots.append(n_slots + more)
    return tuple(slots)
