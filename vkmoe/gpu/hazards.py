"""Decides where a program needs barriers, from the byte ranges its commands read and write.

It is the only guard for memory reached by address, which the validation layer cannot see. A barrier
is a full one (compute and transfer, reads and writes), so after it nothing is outstanding.
"""

from __future__ import annotations

from collections import defaultdict
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
    """Holds byte ranges by resource. They are few: most commands need what another has written."""

    def __init__(self) -> None:
        self._ranges: defaultdict[str, set[Range]] = defaultdict(set)

    def add(self, ranges: Iterable[Range]) -> None:
        for item in ranges:
            if item.start < item.end:
                self._ranges[item.resource].add(item)

    def overlaps(self, ranges: Iterable[Range]) -> bool:
        return any(
            item.start < item.end and any(map(item.overlaps, self._ranges[item.resource]))
            for item in ranges
        )
