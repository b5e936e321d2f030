"""Ctrl-C at a chosen line of the bookkeeping."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["ctrl_c_after"]


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
