"""SIGTERM and a closed terminal end a command in order: what a run leaves behind is written.

Ctrl-C is not the subject of this module: Python turns it into KeyboardInterrupt by itself.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Stopped", "stopped_by_signals"]

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)
)  # Windows has no SIGHUP


class Stopped(SystemExit):
    """Somebody asked the process to end; its code is that of a shell, 128 and the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.name = signal.Signals(number).name


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Raise Stopped in the main thread on the first of these signals; others are ignored then.

    A signal that is ignored already (nohup) or has another handler is left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    terminals = [number for number in (1, 2) if os.isatty(number)]
    ours = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_DFL]

    def stop(number: int, _: FrameType | None) -> None:
        for each in ours:
            signal.signal(each, signal.SIG_IGN)  # a second one would tear the files
        if number != signal.SIGTERM:
            _let_go(terminals)
        raise Stopped(number)

    for number in ours:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _let_go(descriptors: list[int]) -> None:
    """The terminal is gone: whatever is still said goes nowhere, instead of failing."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in descriptors:
        os.dup2(nowhere, number)
    os.close(nowhere)
