"""Counts the host memory that is free, by /proc/meminfo and both versions of the memory cgroup.

Page cache counts as free: the kernel drops it before it refuses memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FALLBACK_BYTES = 4 << 30  # where /proc/meminfo does not say


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
    kibibytes = _numbers(meminfo).get("MemAvailable:")
    available = FALLBACK_BYTES if kibibytes is None else kibibytes * 1024
    for folder, names in _cgroups(cgroups, membership):
        limit = _number(folder / names.limit)
        if limit is not None:
            stat = _numbers(folder / "memory.stat")
            page_cache = sum(stat.get(name, 0) for name in names.page_cache)
            needed = max(0, (_number(folder / names.used) or 0) - page_cache)
            available = min(available, max(0, limit - needed))
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


def _number(path: Path) -> int | None:
    """Read the number in a file; None for `max` or where there is no such file."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _numbers(path: Path) -> dict[str, int]:
    """Read the numbers behind names, one in a line; {} where there is no such file."""
    fields = (line.split() for line in _lines(path))
    return {field[0]: int(field[1]) for field in fields if len(field) > 1 and field[1].isdigit()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
