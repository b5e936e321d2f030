"""Makes the lines of a plan: what is asked of the device, what that takes at most, and of which
heap.

Pure. Sums are upper bounds, and close ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from vkmoe.choices import BufferName
from vkmoe.facts import Allocation, ArenaLayout, DeviceInfo
from vkmoe.gpu.arena import lay_out_spans, round_up
from vkmoe.gpu.device import Intent, memory_type_candidates

__all__ = [
    "GRANULARITY",
    "allocated",
    "allocation",
    "arena_bytes",
    "buffer",
    "heap_of",
    "is_mapped",
    "layout_bytes",
    "tensor_heap",
]

# Drivers round an allocation up, by at most this: the largest page of today's GPUs.
GRANULARITY = 64 << 10


def allocated(n_bytes: int) -> int:
    """Bound the bytes one allocation takes from its heap."""
    return round_up(n_bytes, GRANULARITY)


def layout_bytes(layouts: Iterable[ArenaLayout]) -> int:
    """Bound the bytes that arenas of these layouts take from their heap."""
    return sum(allocated(n_bytes) for layout in layouts for n_bytes in layout.buffers)


def arena_bytes(device: DeviceInfo, spans: Iterable[int]) -> int:
    """Bound the bytes that an arena of these spans takes from its heap."""
    return layout_bytes([lay_out_spans(device, spans)])


def buffer(*n_bytes: int) -> tuple[ArenaLayout, ...]:
    """Describe buffers that are used whole."""
    return (ArenaLayout(n_bytes),)


def allocation(
    device: DeviceInfo,
    item: str,
    intent: Intent,
    reason: str,
    name: BufferName | None = None,
    layouts: Sequence[ArenaLayout] = (),
    n_bytes: int | None = None,
) -> Allocation:
    """Make a line of the plan for memory of an intent, in the heap `Device.allocate` tries first.

    `n_bytes` are those of `layouts`, unless other lines have a share of them.
    """
    place: Literal["device", "host"] = "device" if intent in ("device", "bar") else "host"
    taken = layout_bytes(layouts) if n_bytes is None else n_bytes
    return Allocation(item, place, taken, reason, heap_of(device, intent), name, tuple(layouts))


def heap_of(device: DeviceInfo, intent: Intent) -> int:
    """Find the heap that `Device.allocate` tries first for an intent."""
    return device.memory_types[memory_type_candidates(device, intent)[0]].heap


def is_mapped(device: DeviceInfo, intent: Intent) -> bool:
    """Say whether the host writes such memory itself; if not, what goes there is staged."""
    item = device.memory_types[memory_type_candidates(device, intent)[0]]
    return "HOST_VISIBLE" in item.flags


def tensor_heap(device: DeviceInfo) -> int:
    """Find the heap of Kompute's tensors: it takes the first device-local type."""
    return next(item.heap for item in device.memory_types if "DEVICE_LOCAL" in item.flags)
