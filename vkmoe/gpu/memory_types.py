"""This module chooses which Vulkan memory type serves which intent, by flags alone.

Intents: `device` for weights, caches and slots; `host` for homes and staging;
`readback` for what the CPU reads; `bar` for small tables the CPU writes and the GPU reads.

Tables are never in host memory on a discrete device: every workgroup would read them over the bus,
which takes about 26 us each. Where device memory is not mapped they are in `device` memory, and
their writes are staged.
"""

from __future__ import annotations

from typing import Literal

from vkmoe.facts import DeviceInfo, MemoryType

__all__ = ["Intent", "memory_type_candidates"]

Intent = Literal["device", "host", "readback", "bar"]

# AMD's debugging types: coherent or uncached on the device, ten times slower.
EXCLUDED = frozenset(
    {"DEVICE_COHERENT_AMD", "DEVICE_UNCACHED_AMD", "PROTECTED", "LAZILY_ALLOCATED"}
)


def memory_type_candidates(device: DeviceInfo, intent: Intent) -> list[int]:
    """List the memory type indices that can serve an intent, best first; a sound driver has some.

    A CPU or integrated device has one memory, so `device` memory there is also mapped. On a
    discrete device it is never the host's: a full card is an error, not a tenfold slowdown.
    """
    if intent == "bar" and not device.is_uma:
        window = _ranked(device, "bar")
        return window + [index for index in _ranked(device, "device") if index not in window]
    return _ranked(device, intent)


def _ranked(device: DeviceInfo, intent: Intent) -> list[int]:
    scored = []
    for index, item in enumerate(device.memory_types):
        if item.flags & EXCLUDED:
            continue
        score = _score(item, intent, device.is_uma)
        if score is not None:
            scored.append((-score, index))
    return [index for _, index in sorted(scored)]


def _score(item: MemoryType, intent: Intent, is_uma: bool) -> int | None:
    """Score a memory type for an intent: higher is better; None means unusable."""
    local = "DEVICE_LOCAL" in item.flags
    visible = "HOST_VISIBLE" in item.flags
    coherent = "HOST_COHERENT" in item.flags
    cached = "HOST_CACHED" in item.flags
    if intent == "device":
        # Mapped weights are written without a flush.
        if (not local and not is_uma) or (visible and not coherent):
            return None
        # Slots and weights keep out of the small mapped window of discrete cards.
        return 4 * local + 2 * (visible == is_uma) + cached * is_uma
    if not visible:
        return None
    if intent == "readback":
        return 4 * cached + 2 * coherent + (not local)
    if not coherent:
        return None
    if intent == "host":
        return 4 * (not local) + 2 * (not cached) if not is_uma else 4 * cached + 2 * local
    if not local and not is_uma:
        return None
    return 4 * local + 2 * (not cached)
