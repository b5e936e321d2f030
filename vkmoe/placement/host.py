"""How much host memory may be used: what the kernel calls available, within the cgroup's limit."""

from __future__ import annotations

from pathlib import Path

__all__ = ["available_bytes"]

FALLBACK_BYTES = 4 << 30


def available_bytes(
    proc: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """Bytes of host memory that can be allocated without swapping."""
    available = _meminfo(proc)
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is not None:
        available = min(available, max(0, limit - (used or 0)))
    return available


def _meminfo(path: Path) -> int:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return FALLBACK_BYTES
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return FALLBACK_BYTES


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
