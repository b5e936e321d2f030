"""What allocations really take: chunks of arenas, rounding, and the heap they come from.

Pure: repeats for plans without a device the arithmetic of gpu/arena.py and Kompute. Sums are upper
bounds, and close ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Literal

from vkmoe.facts import DeviceInfo, PlanLine
from vkmoe.gpu.arena import ALIGNMENT, PREFERRED_CHUNK, chunk_cap, round_up
from vkmoe.gpu.memory_types import Intent, memory_type_candidates

__all__ = [
    "GRANULARITY",
    "allocated",
    "arena_bytes",
    "heap_of",
    "is_mapped",
    "plan_line",
    "tensor_heap",
]

# Drivers round an allocation up, by at most this: the largest page of today's GPUs.
GRANULARITY = 64 << 10


def allocated(n_bytes: int) -> int:
    """Bound the bytes one allocation takes from its heap."""
    return round_up(n_bytes, GRANULARITY)


def arena_bytes(device: DeviceInfo, spans: Sequence[int], expected_bytes: int) -> int:
    """Bound the bytes an Arena takes for these spans, placed in this order.

    Where a chunk ends depends on how its driver aligns it: the worse of both extremes counts.
    """
    return max(_chunk_bytes(device, spans, expected_bytes, lost) for lost in (0, ALIGNMENT - 1))


def heap_of(device: DeviceInfo, intent: Intent) -> int:
    """Find the heap that `Device.allocate` tries first for an intent."""
    return device.memory_types[memory_type_candidates(device, intent)[0]].heap


def plan_line(device: DeviceInfo, item: str, intent: Intent, n_bytes: int, reason: str) -> PlanLine:
    """Make a line of the plan for memory of an intent."""
    place: Literal["device", "host"] = "device" if intent in ("device", "bar") else "host"
    return PlanLine(item, place, n_bytes, reason, heap_of(device, intent))


def is_mapped(device: DeviceInfo, intent: Intent) -> bool:
    """Say whether the host writes such memory itself; if not, what goes there is staged."""
    item = device.memory_types[memory_type_candidates(device, intent)[0]]
    return "HOST_VISIBLE" in item.flags


def tensor_heap(device: DeviceInfo) -> int:
    """Find the heap of Kompute's tensors: it takes the first device-local type."""
    return next(item.heap for item in device.memory_types if "DEVICE_LOCAL" in item.flags)


def _chunk_bytes(device: DeviceInfo, spans: Sequence[int], expected_bytes: int, lost: int) -> int:
    """Follow Arena.place and Arena._grow; chunks begin `lost` bytes before an aligned address."""
    cap = min(PREFERRED_CHUNK, chunk_cap(device))
    total = room = 0
    remaining = expected_bytes
    for span, alike in groupby(spans):
        n_bytes, n_left = round_up(span), sum(1 for _ in alike)
        while n_left:
            if n_bytes > room:
                size = max(n_bytes, min(remaining, cap // max(n_bytes, 1) * n_bytes))
                total += allocated(size + ALIGNMENT)
                room = size + ALIGNMENT - lost
            n_placed = min(n_left, room // n_bytes) if n_bytes else n_left
            n_left -= n_placed
            room -= n_placed * n_bytes
            remaining -= n_placed * n_bytes
    return total
