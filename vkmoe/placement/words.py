"""Writes bytes and times in words, for messages and as values of options."""

from __future__ import annotations

__all__ = ["in_mib", "in_time", "size_option"]

MIB = 1 << 20


def in_mib(n_bytes: int) -> str:
    """Write bytes for people: whole MiB, tenths where they are few, or KiB."""
    if 0 < n_bytes < MIB:
        return f"{-(-n_bytes // 1024):,} KiB"
    digits = 1 if 0 < n_bytes < 10 * MIB else 0
    return f"{max(0, n_bytes) / MIB:,.{digits}f} MiB"


def in_time(seconds: float) -> str:
    """Write a time for people: whole seconds, minutes or hours, and at least a second."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 6000 else f"{round(seconds / 3600):,} h"


def size_option(n_bytes: int, *, at_most: bool) -> str:
    """Write bytes for an option: whole MiB within the limit, or bytes where there is none."""
    if n_bytes < MIB:
        return str(max(0, n_bytes))
    return f"{n_bytes // MIB if at_most else -(-n_bytes // MIB)}MiB"
