"""Decides where a program needs barriers, from the byte ranges its commands read and write.

It is the only guard for memory reached by address, which the validation layer cannot see. A barrier
is a full one (compute and transfer, reads and writes), so after it nothing is outstanding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vkmoe.gpu.program import Command, Range


def plan_barriers(commands: Sequence[Command]) -> list[bool]:
    """Decide for each command whether a barrier must come before it.

    True when it reads what an earlier command since the last barrier wrote (RAW), writes what one
    read (WAR), or writes what one wrote (WAW). Independent commands get none.
    """
    read: set[Range] = set()  # since the last barrier: few, as most commands need another's results
    written: set[Range] = set()
    barriers = []
    for command in commands:
        needed = (
            _overlap(written, command.reads)
            or _overlap(written, command.writes)
            or _overlap(read, command.writes)
        )
        if needed:
            read, written = set(), set()
        read.update(command.reads)
        written.update(command.writes)
        barriers.append(needed)
    return barriers


def _overlap(some: Iterable[Range], others: Iterable[Range]) -> bool:
    return any(one.overlaps(other) for one in some for other in others)
