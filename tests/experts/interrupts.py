"""Ctrl-C at a chosen line of the bookkeeping."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any, TypeAlias

__all__ = ["Line", "apart", "ctrl_c_after", "ctrl_c_at_new_line"]

Line: TypeAlias = tuple[str, int]  # file and number


@contextmanager
def ctrl_c_after(n_lines: int) -> Iterator[list[int]]:
    """Ctrl-C before that line of the code of vkmoe.experts; lists the lines that ran."""
    ran: list[int] = []

    def local(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            if len(ran) == n_lines:
                raise KeyboardInterrupt
            ran.append(frame.f_lineno)
        return local

    def entered(frame: FrameType, event: str, argument: object) -> Any:
        return local if "/vkmoe/experts/" in frame.f_code.co_filename else None

    sys.settrace(entered)
    try:
        yield ran
    finally:
        sys.settrace(None)


@contextmanager
def ctrl_c_at_new_line(struck: set[Line], occasion: int = 1) -> Iterator[None]:
    """Ctrl-C before a line of vkmoe.experts that is not among those `struck`, when it comes to run
    for the first, second, ... time here. Adds it to them; does nothing where there is none.
    """
    met: Counter[Line] = Counter()

    def local(frame: FrameType, event: str, argument: object) -> Any:
        line = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and line not in struck:
            met[line] += 1
            if met[line] == occasion:
                struck.add(line)
                raise KeyboardInterrupt
        return local

    def entered(frame: FrameType, event: str, argument: object) -> Any:
        return local if "/vkmoe/experts/" in frame.f_code.co_filename else None

    sys.settrace(entered)
    try:
        yield
    finally:
        sys.settrace(None)


def apart(test: Callable[..., None]) -> Callable[..., None]:
    """A test after which no exception counts as being handled, whatever it did.

    CPython goes on to report one (sys.exc_info) when a trace function raised while it was handled.
    A generator has a state of its own for that, which ends with it.
    """

    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        def body() -> Iterator[None]:
            test(*arguments, **named)
            yield

        next(body())

    return run
