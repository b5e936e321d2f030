"""What is decided about experts: who moves into a slot, and in whose place."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["FREE", "Move"]

FREE = -1


class Move(NamedTuple):
    """An expert to copy from its home into a slot."""

    pool: int
    key: int  # its number
    victim: int  # whose slot it takes; FREE: one that nobody has
