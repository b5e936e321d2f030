"""What is decided about experts: who moves into a slot, and in whose place."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["FREE", "Move"]

FREE = -1


class Move(NamedTuple):
    """An expert that gets a slot: to copy from its home, unless it has landed."""

    pool: int
    key: int  # its number
    victim: int  # whose slot it takes; FREE: one that nobody has
    landed: bool = False  # it keeps its landing slot, and the slot above is the next landing slot
