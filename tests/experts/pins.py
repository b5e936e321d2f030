"""Rules for pins, in the words of the options that ask for them."""

from __future__ import annotations

from vkmoe.config import Pins

__all__ = ["first_n", "most_used", "named", "warm"]


def warm(n: int, after: int = 64) -> Pins:
    return Pins("use", n, after=after, again=True)


def most_used(n: int, after: int = 4096) -> Pins:
    return Pins("use", n, after=after)


def first_n(n: int) -> Pins:
    return Pins("first", n)


def named(*ids: int) -> Pins:
    return Pins("ids", len(ids), ids)
