"""Rules for pins, in the words of the options that ask for them."""

from __future__ import annotations

from vkmoe.config import Pins


def warm(n: int, after: int = 64) -> Pins:
    return Pins("use", n, after=after)


def named(*ids: int) -> Pins:
    return Pins("ids", len(ids), ids)
