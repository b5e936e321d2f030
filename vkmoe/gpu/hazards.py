"""Decides where a program needs barriers, from the byte ranges its commands read and write.

It is the only guard for memory reached by address, which the validation layer cannot see. A barrier
is a full one (compute and transfer, reads and writes), so after it nothing is outstanding.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from vkmoe.gpu.program import Command, Range

__all__ = ["plan_barriers"]


def plan_barriers(commands: Sequence[Command]) -> list[bool]:
    """Decide for each command whether a barrier must come before it.

    True when it reads what an earlier command since the last barrier wrote (RAW), writes what one
    read (WAR), or writes what one wrote (WAW). Independent commands get none.
    """
    pending_reads, pending_writes = _RangeSet(), _RangeSet()
    barriers = []
    for command in commands:
        needed = (
            pending_writes.overlaps(command.reads)
            or pending_writes.overlaps(command.writes)
            or pending_reads.overlaps(command.writes)
        )
        if needed:
            pending_reads, pending_writes = _RangeSet(), _RangeSet()
        pending_reads.add(command.reads)
        pending_writes.add(command.writes)
        barriers.append(needed)
    return barriers


class _RangeSet:
    """Holds byte ranges by resource, kept as sorted, disjoint intervals."""

    def __init__(self) -> None:
        self._intervals: dict[str, list[tuple[int, int]]] = {}

    def add(self, ranges: Iterable[Range]) -> None:
        for item in ranges:
            if item.start >= item.end:
                continue
            intervals = self._intervals.setdefault(item.resource, [])
            first, last = _touching(intervals, item.start, item.end)
            merged = intervals[first:last]
            start = min([item.start, *(low for low, _ in merged)])
            end = max([item.end, *(high for _, high in merged)])
            del intervals[first:last]
            insort(intervals, (start, end))

    def overlaps(self, ranges: Iterable[Range]) -> bool:
        for item in ranges:
            if item.start >= item.end:
                continue
            intervals = self._intervals.get(item.resource, [])
            first, last = _touching(intervals, item.start, item.end)
            if any(low < item.end and item.start < high for low, high in intervals[first:last]):
                return True
        return False


def _touching(intervals: list[tuple[int, int]], start: int, end: int) -> tuple[int, int]:
    """Find the indices [first, last) of the intervals that touch or overlap [start, end)."""
    first = bisect_left(intervals, (start, -1))
    if first > 0 and intervals[first - 1][1] >= start:
        first -= 1
    last = first
    while last < len(intervals) and intervals[last][0] <= end:
        last += 1
    return first, last
