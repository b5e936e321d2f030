"""An independent judge of barriers: compares every pair of commands.

Shares no code with vkmoe/gpu/hazards.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from vkmoe.gpu.program import Command, Range


def conflict(first: Command, second: Command) -> str:
    """The hazard between two commands in this order: "RAW", "WAR", "WAW", or "" for none."""
    for name, earlier, later in (
        ("RAW", first.writes, second.reads),
        ("WAR", first.reads, second.writes),
        ("WAW", first.writes, second.writes),
    ):
        if any(_share_a_byte(one, other) for one in earlier for other in later):
            return name
    return ""


def unguarded(commands: Sequence[Command], barriers: Sequence[bool]) -> list[tuple[int, int]]:
    """All pairs of commands that conflict without a barrier between them."""
    return [
        (i, j)
        for j in range(len(commands))
        for i in range(j)
        if not any(barriers[i + 1 : j + 1]) and conflict(commands[i], commands[j])
    ]


def _share_a_byte(one: Range, other: Range) -> bool:
    if one.resource != other.resource:
        return False
    return max(one.start, other.start) < min(one.end, other.end)
