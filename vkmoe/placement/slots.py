"""How many slots a number of bytes makes, and how many bytes slots take.

Pure. Split evenly: each layer has the same number, and what is left over gives one more to the
first layers it is enough for.
"""

from __future__ import annotations

from collections.abc import Sequence

from vkmoe.facts import DeviceInfo
from vkmoe.placement.allocations import arena_bytes

__all__ = ["largest_slots", "slot_arena_bytes", "split_slots"]


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


def slot_arena_bytes(device: DeviceInfo, slots: Sequence[int], slot_bytes: Sequence[int]) -> int:
    """Bytes of slots as they are allocated, at most: one arena for each size."""
    n_of_size: dict[int, int] = {}
    for n_slots, size in zip(slots, slot_bytes, strict=True):
        n_of_size[size] = n_of_size.get(size, 0) + n_slots
    return sum(arena_bytes(device, [size] * n, size * n) for size, n in n_of_size.items())


def largest_slots(
    device: DeviceInfo, n_bytes: int, slot_bytes: Sequence[int], n_experts: int
) -> tuple[int, ...]:
    """The most slots that fit in `n_bytes` with what their allocations add."""
    usable = n_bytes
    while True:
        slots = split_slots(usable, slot_bytes, n_experts)
        excess = slot_arena_bytes(device, slots, slot_bytes) - n_bytes
        if excess <= 0 or not any(slots):
            return slots
        usable -= excess
