"""An uploader that does nothing until it is told to, and fails where it is told to; and a
prefetcher that works through it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from vkmoe.experts.store.copies import Copy, Prefetcher

LIMIT_S = 10.0  # nothing here waits for longer


class HeldUploads:
    """Copies arrive at once, or with `hold()` one for each `let_go()`; notes their order."""

    def __init__(self) -> None:
        self.begun: list[Copy] = []
        self.arrived: list[Copy] = []
        self.faults: dict[str, list[BaseException]] = {"start": [], "wait": []}  # strike in turn
        self.always: dict[str, BaseException] = {}
        self.has_begun = threading.Semaphore(0)
        self._gate: threading.Semaphore | None = None

    def hold(self) -> None:
        self._gate = threading.Semaphore(0)

    def let_go(self, n: int = 1) -> None:
        assert self._gate is not None
        self._gate.release(n)

    def wait_until_begun(self, n: int = 1) -> None:
        for _ in range(n):
            assert self.has_begun.acquire(timeout=LIMIT_S), "the worker did not begin"

    def strike(self, point: str) -> None:
        """Raise what is to be raised there."""
        if self.faults[point]:
            raise self.faults[point].pop(0)
        if point in self.always:
            raise self.always[point]

    def start(self, copies: Sequence[Copy], urgent: bool = False) -> _Held:
        self.begun += copies
        self.has_begun.release()
        self.strike("start")
        return _Held(self, copies)

    def pass_gate(self) -> None:
        if self._gate is not None:
            assert self._gate.acquire(timeout=LIMIT_S), "nobody let the copy go"


class _Held:
    def __init__(self, owner: HeldUploads, copies: Sequence[Copy]) -> None:
        self._owner, self._copies = owner, copies

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        self._owner.pass_gate()
        self._owner.strike("wait")
        self._owner.arrived += self._copies

    def cancel(self) -> bool:
        return False

    def interval(self) -> tuple[int, int] | None:
        return (10, 20)


@pytest.fixture
def inner() -> HeldUploads:
    return HeldUploads()


@pytest.fixture
def worker(inner: HeldUploads) -> Iterator[Prefetcher]:
    """Closed afterwards, however the test ends; then no thread may be left."""
    before = set(threading.enumerate())
    made = Prefetcher(inner, max_queued=4, end_limit_s=2.0)
    yield made
    if inner._gate is not None:
        inner.let_go(1000)
    made.close()
    assert set(threading.enumerate()) == before


NOWHERE: Any = None


def copies(*names: str) -> list[Copy]:
    """Spans of 100 bytes; only their names matter here."""
    return [(name, NOWHERE, 100) for name in names]


def names(moved: list[Copy]) -> str:
    return "".join(copy[0] for copy in moved)
