"""Takes Ctrl-C at checkpoints: it ends the work of a model between two steps, never amid one.

`at_checkpoints` puts Ctrl-C off while a model is at work, and `checkpoint` lets it act: there it
raises KeyboardInterrupt. So code between two checkpoints need not be safe against an exception at
any line. Outside of that work, and in all threads but the main one, Ctrl-C does what Python and the
program make of it. Other signals are put off alike if their handlers are set by `handle`.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` wraps it, at 5 us a call for an enum
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import wraps
from math import inf
from time import monotonic
from types import FrameType
from typing import Any, ParamSpec, TypeVar

INTERRUPTED = 130  # exit code
SLICE_S = 0.1  # what waits for something looks this often whether a signal came
PATIENCE_S = 0.5  # a second Ctrl-C sooner than that is the same wish

Handler = Callable[[int, FrameType | None], Any]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_is_at_work = False
_handlers: dict[int, Handler] = {}  # the program's, by signal
_came: deque[int] = deque()  # signals that were put off
_first_s = inf  # when Ctrl-C came first, in the work at hand


@contextmanager
def at_checkpoints() -> Iterator[None]:
    """Put Ctrl-C off until the next checkpoint; the end is one too.

    Then the handler that the program has for SIGINT is called. A second Ctrl-C ends the process
    where the first one had no effect for half a second, unless the program has a handler of its
    own. Does nothing within another `at_checkpoints`, or in a thread that gets no signals.
    """
    if _is_at_work or not _is_main():
        yield
        return
    try:
        _begin()
        yield
    finally:
        _end()


def works_at_checkpoints(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Have a function work within `at_checkpoints`; within others it is just called."""

    @wraps(function)
    def inner(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if _is_at_work or not _is_main():
            return function(*args, **kwargs)
        try:  # no context manager: every token comes here
            _begin()
            return function(*args, **kwargs)
        finally:
            _end()

    return inner


def handle(number: int, handler: Handler) -> None:
    """Set what a signal does: at once, or, while a model is at work, at the next checkpoint."""
    _handlers[number] = handler
    _signal.signal(number, _note)


def checkpoint() -> None:
    """Let signals act that were put off: Ctrl-C raises KeyboardInterrupt.

    Must hold: what the caller works on is sound, and stays usable if this raises.
    """
    while _came and _is_main():
        number = _came.popleft()
        _handlers[number](number, None)


@contextmanager
def acquired(lock: threading.Lock) -> Iterator[None]:
    """Hold a lock; waiting for it is full of checkpoints."""
    while not lock.acquire(timeout=SLICE_S):
        checkpoint()
    try:
        yield
    finally:
        lock.release()


def result_of(future: Future[Result]) -> Result:
    """Return what a future gives; waiting for it is full of checkpoints."""
    while not future.done():
        checkpoint()
        wait([future], SLICE_S)
    return future.result()


def _begin() -> None:
    """Begin to put Ctrl-C off; `_end` undoes what was done of it."""
    global _is_at_work, _first_s
    handler = _signal.getsignal(signal.SIGINT)
    if callable(handler) and handler is not _note:  # else it is ignored, or set already
        handle(signal.SIGINT, handler)
    _first_s, _is_at_work = inf, True


def _end() -> None:
    """Let Ctrl-C act at once again, and now, if it came."""
    global _is_at_work
    _is_at_work = False
    if _signal.getsignal(signal.SIGINT) is _note:
        _signal.signal(signal.SIGINT, _handlers[signal.SIGINT])
    checkpoint()


def _is_main() -> bool:
    """Say whether Python runs handlers of signals in this thread."""
    return threading.current_thread() is threading.main_thread()


def _note(number: int, frame: FrameType | None) -> None:
    """Do what a signal does, or note it until the next checkpoint."""
    global _first_s
    handler = _handlers[number]
    if not _is_at_work:
        handler(number, frame)
        return
    if number == signal.SIGINT and handler is signal.default_int_handler:
        _first_s = min(_first_s, monotonic())
        if monotonic() - _first_s > PATIENCE_S:
            os._exit(INTERRUPTED)
    if number not in _came:
        _came.append(number)
