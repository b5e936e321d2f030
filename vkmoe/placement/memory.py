"""Counts memory of a plan: how much of it may be used, what an allocation takes, and its line.

Pure. Sums of allocations are upper bounds, and close ones. What the host has free is the subject of
cpu/host_memory.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from vkmoe.choices import BufferName
from vkmoe.facts import Allocation, ArenaLayout, DeviceInfo, Heap, MemoryType
from vkmoe.gpu.arena import round_up
from vkmoe.gpu.device import Intent, memory_type_candidates
from vkmoe.kernels.handover.operations import HANDED, JOINED

MIB, GIB = 1 << 20, 1 << 30
DISPLAY_BYTES = 512 * MIB  # of a device with memory of its own
LEFT_BYTES, LEFT_PERCENT = 2 * GIB, 8  # of host memory, to other programs
# Drivers round an allocation up, by at most this: the largest page of today's GPUs.
GRANULARITY = 64 << 10


def size_option(n_bytes: int, *, at_most: bool) -> str:
    """Write bytes for an option: whole MiB within the limit, or bytes where there is none."""
    if n_bytes < MIB:
        return str(max(0, n_bytes))
    return f"{n_bytes // MIB if at_most else -(-n_bytes // MIB)}MiB"


# ----- what an allocation takes -----


def allocated(n_bytes: int) -> int:
    """Bound the bytes one allocation takes from its heap."""
    return round_up(n_bytes, GRANULARITY)


def layout_bytes(layouts: Iterable[ArenaLayout]) -> int:
    """Bound the bytes that arenas of these layouts take from their heap."""
    return sum(allocated(n_bytes) for layout in layouts for n_bytes in layout.buffers)


def allocation(
    device: DeviceInfo,
    item: str,
    intent: Intent,
    reason: str,
    name: BufferName | None = None,
    layouts: Sequence[ArenaLayout] = (),
    n_bytes: int | None = None,
) -> Allocation:
    """Make a line of the plan for memory of an intent, in the heap that is tried first.

    `n_bytes` are those of `layouts`, unless other lines have a share of them.
    """
    place: Literal["device", "host"] = "device" if intent in ("device", "bar") else "host"
    taken = layout_bytes(layouts) if n_bytes is None else n_bytes
    kind = _first_type(device, intent)
    if name == "tensors":  # Kompute takes the first device-local type
        kind = next(item for item in device.memory_types if "DEVICE_LOCAL" in item.flags)
    return Allocation(item, place, taken, reason, kind.heap, name, tuple(layouts))


def is_mapped(device: DeviceInfo, intent: Intent) -> bool:
    """Say whether the host writes such memory itself; if not, what goes there is staged."""
    return "HOST_VISIBLE" in _first_type(device, intent).flags


def _first_type(device: DeviceInfo, intent: Intent) -> MemoryType:
    """Find the memory type that `Device.allocate` tries first for an intent."""
    return device.memory_types[memory_type_candidates(device, intent)[0]]


# ----- what may be used -----


def device_budget(
    device: DeviceInfo, available_host_bytes: int, margin_bytes: int | None = None
) -> int:
    """Count the bytes of device memory vkmoe may use; integrated and CPU devices share the host's.

    `margin_bytes` of the device are left to others; None: what its kind needs by experience.
    What an integrated device can use of it ends at its heaps, which can be smaller than RAM. A CPU
    device has no other limit than the host's: Mesa 22.3 reports 2 GiB of heap on any machine.
    """
    if device.is_uma:
        shared = max(0, available_host_bytes - (margin_bytes or 0))
        shared = host_budget(available_host_bytes) if margin_bytes is None else shared
        return shared if device.is_cpu else min(shared, _heaps_in_use(device))
    heap = _largest_heap(device)
    free = heap.size - (DISPLAY_BYTES if margin_bytes is None else margin_bytes)
    if heap.budget:  # which leaves out what others use now
        free = min(free, heap.budget - (heap.usage or 0) - (margin_bytes or 0))
    return max(0, free * 95 // 100)


def margin_for(device: DeviceInfo, available_host_bytes: int, n_bytes: int) -> int:
    """Find the margin with which at most `n_bytes` of a device may be used; at least 1."""
    if device.is_uma:
        return max(1, available_host_bytes - n_bytes)
    heap = _largest_heap(device)
    free = min(heap.size, heap.budget - (heap.usage or 0)) if heap.budget else heap.size
    return max(1, free - -(-n_bytes * 100 // 95))


def _largest_heap(device: DeviceInfo) -> Heap:
    local = [heap for heap in device.heaps if heap.device_local]
    return max(local or device.heaps, key=lambda item: item.size)


def _heaps_in_use(device: DeviceInfo) -> int:
    """Count the bytes free, less 5 %, in the heaps that `device` memory falls back through."""
    types = memory_type_candidates(device, "device")
    heaps = [device.heaps[index] for index in {device.memory_types[item].heap for item in types}]
    return sum(max(0, heap.size - (heap.usage or 0)) for heap in heaps) * 95 // 100


def host_budget(available_host_bytes: int) -> int:
    """Count the bytes of host memory that vkmoe takes unasked.

    Other programs grow while a model runs, and a system without page cache is slow. So the greater
    of 2 GiB and 8 % is left to them; of less than 4 GiB, half.
    """
    left = max(LEFT_BYTES, available_host_bytes * LEFT_PERCENT // 100)
    return available_host_bytes - min(left, available_host_bytes // 2)


# ----- what changes a line -----

# By how the item begins; the first that fits counts.
_OPTIONS = {
    "weights ": "--gpu-layers",
    "KV cache": "--ctx-size",
    "rotary table": "--ctx-size",
    "activations of the CPU": "--expert-mode",
    "activations": "--ubatch-size",
    HANDED: "--ubatch-size",
    JOINED: "--ubatch-size",
    "experts": "--expert-mode",
    "addresses of the CPU's": "--expert-mode",
    "staging of experts": "--expert-mode",
    "expert slots": "--expert-cache",
    "landing slots": "--promote-on-read",
    "gathered experts": "--miss",
    "brought experts": "--ubatch-size",
    "host pool": "--host-pool",
    "predictor": "--expert-policy",
    "prompts that left": "--cache-ram",
}


def option_of(line: Allocation) -> str:
    """Name the option that changes how large a line is, unless its reason does; empty: none."""
    if line.reason.startswith("as --"):
        return ""
    found = (option for begin, option in _OPTIONS.items() if line.item.startswith(begin))
    return next(found, "")
