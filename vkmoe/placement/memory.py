"""Counts memory: how much of it may be used, what an allocation takes, and bytes in words.

What the host has is read from /proc/meminfo and both versions of the memory cgroup; page cache
counts as free, which the kernel drops before it refuses memory. All else is pure. Sums of
allocations are upper bounds, and close ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from vkmoe.choices import BufferName
from vkmoe.facts import Allocation, ArenaLayout, DeviceInfo, Heap, MemoryType
from vkmoe.gpu.arena import round_up
from vkmoe.gpu.device import Intent, memory_type_candidates

__all__ = [
    "GRANULARITY",
    "allocated",
    "allocation",
    "available_bytes",
    "device_budget",
    "host_budget",
    "is_mapped",
    "layout_bytes",
    "margin_for",
    "option_of",
    "size_option",
]

MIB, GIB = 1 << 20, 1 << 30
FALLBACK_BYTES = 4 * GIB  # of host memory, where /proc/meminfo does not say
DISPLAY_BYTES = 512 * MIB  # of a device with memory of its own
LEFT_BYTES, LEFT_PERCENT = 2 * GIB, 8  # of host memory, to other programs
# Drivers round an allocation up, by at most this: the largest page of today's GPUs.
GRANULARITY = 64 << 10

# ----- in words -----


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


# ----- what may be used of a device -----


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


# ----- what may be used of the host -----


def host_budget(available_host_bytes: int) -> int:
    """Count the bytes of host memory that vkmoe takes unasked.

    Other programs grow while a model runs, and a system without page cache is slow. So the greater
    of 2 GiB and 8 % is left to them; of less than 4 GiB, half.
    """
    left = max(LEFT_BYTES, available_host_bytes * LEFT_PERCENT // 100)
    return available_host_bytes - min(left, available_host_bytes // 2)


class _Names(NamedTuple):
    """Names the files of one version of the memory cgroup, and its page cache in memory.stat."""

    limit: str
    used: str
    page_cache: tuple[str, str]


V1 = _Names(
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
)
V2 = _Names("memory.max", "memory.current", ("inactive_file", "active_file"))


def available_bytes(
    meminfo: Path = Path("/proc/meminfo"),
    cgroups: Path = Path("/sys/fs/cgroup"),
    membership: Path = Path("/proc/self/cgroup"),
) -> int:
    """Count the bytes of host memory that can be allocated without swapping."""
    fields = (line.split() for line in _lines(meminfo))
    free = (int(field[1]) * 1024 for field in fields if field[:1] == ["MemAvailable:"])
    available = next(free, FALLBACK_BYTES)
    for folder, names in _cgroups(cgroups, membership):
        limit = _number(folder / names.limit)
        if limit is not None:
            available = min(available, max(0, limit - _needed(folder, names)))
    return available


def _cgroups(root: Path, membership: Path) -> Iterator[tuple[Path, _Names]]:
    """Yield the cgroups this process is in, and those around them, whose limits hold as well."""
    yield root, V2
    yield root / "memory", V1
    for line in _lines(membership):
        parts = line.split(":", 2)  # hierarchy:controllers:path
        if len(parts) < 3 or not (parts[1] == "" or "memory" in parts[1].split(",")):
            continue
        names, folder = (V1, root / "memory") if parts[1] else (V2, root)
        for name in parts[2].strip("/").split("/"):
            if name in ("", ".."):  # the root, or outside of what this container sees
                break
            folder /= name
            yield folder, names


def _needed(folder: Path, names: _Names) -> int:
    """Count the bytes a cgroup uses without the page cache."""
    fields = (line.split() for line in _lines(folder / "memory.stat"))
    stat = {field[0]: int(field[1]) for field in fields if len(field) == 2 and field[1].isdigit()}
    page_cache = sum(stat.get(name, 0) for name in names.page_cache)
    return max(0, (_number(folder / names.used) or 0) - page_cache)


def _number(path: Path) -> int | None:
    """Read the number in a file; None for `max` or where there is no such file."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


# ----- what changes a line -----

_OPTIONS: dict[BufferName, str] = {
    "KV cache": "--ctx-size",
    "weights": "--gpu-layers",
    "host weights": "--gpu-layers",
    "tensors": "--ubatch-size",
    "experts": "--expert-mode",
    "staged experts": "--expert-mode",
    "handed rows": "--ubatch-size",
    "joined rows": "--ubatch-size",
    "expert slots": "--expert-cache",
    "expert pool": "--host-pool",
    "gathered experts": "--miss",
    "brought experts": "--ubatch-size",
}


_OPTIONS_OF_ITEMS = {
    "predictor": "--expert-predictor",
    "host pool": "--host-pool",
    "landing slots": "--promote-on-read",
    "experts that the CPU": "--expert-mode",
    "addresses of the CPU's": "--expert-mode",
    "addresses of experts": "",
    "addresses of blocks": "",
    "rotary table": "--ctx-size",
    "activations of the CPU": "--expert-mode",
}


def option_of(line: Allocation) -> str:
    """Name the option that changes how large a line is; empty: none does."""
    if line.reason.startswith("as --"):
        return ""  # which it names
    for begin, option in _OPTIONS_OF_ITEMS.items():
        if line.item.startswith(begin):
            return option
    return _OPTIONS.get(line.name, "") if line.name is not None else ""
