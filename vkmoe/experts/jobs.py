"""Jobs on their way from the engine's thread to the one that does them.

There are no locks: what two threads share changes by single atomic steps of CPython (a deque's
methods, `dict.setdefault`), so that Ctrl-C between any two lines leaves it sound. That relies on
the global interpreter lock: a build of Python without it needs locks here.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue

from vkmoe.errors import GpuError, VkmoeError
from vkmoe.experts.uploads import Copy

__all__ = ["SLICE_S", "Job", "JobCancelledError", "JobQueue"]

SLICE_S = 0.1  # Ctrl-C is answered this quickly where waiting cannot be interrupted


class JobCancelledError(GpuError):
    """The job never began; nothing was written."""


class Job:
    """Copies that wait for their turn, are under way, or are over: an `Upload`."""

    __slots__ = ("_ended", "_error", "_fate", "_interval", "_over", "_queue", "copies")

    def __init__(self, queue: JobQueue, copies: Sequence[Copy]) -> None:
        self._queue, self.copies = queue, copies
        self._fate: dict[str, str] = {}  # "is": "begun" or "cancelled", whoever came first
        self._over = False
        self._ended = threading.Lock()  # released at the end: a hint to look again
        self._ended.acquire()
        self._error: VkmoeError | None = None
        self._interval: tuple[int, int] | None = None

    @property
    def cancelled(self) -> bool:
        return self._fate.get("is") == "cancelled"

    @property
    def begun(self) -> bool:
        return self._fate.get("is") == "begun"

    def done(self) -> bool:
        """Whether it is over: arrived, failed or cancelled; never waits."""
        return self._over or self.cancelled

    def wait(self) -> None:
        """Wait until it is over; from now on it goes before jobs that nobody waits for.

        Raises what it failed with, always a VkmoeError; the targets' bytes are undefined then.
        JobCancelledError where it was cancelled.
        """
        if not self.done():
            self._queue.wait_for(self)
        if self.cancelled:
            raise JobCancelledError("the copy was cancelled")
        if self._error is not None:
            raise self._error

    def cancel(self) -> bool:
        """Whether it had not begun and now never will: nothing was written."""
        if not self._fate and self._fate.setdefault("is", "cancelled") == "cancelled":
            self._queue.forget(self)
            self.copies = ()
        return self.cancelled

    def interval(self) -> tuple[int, int] | None:
        """When the bytes moved, as its uploader knows it; None before the end, or if unknown."""
        return self._interval

    # ----- on the worker's thread -----

    def begin(self) -> bool:
        """Whether it is the worker's to do: nobody has cancelled it, and it was not begun before.

        After Ctrl-C it may wait in a queue twice.
        """
        return not self.begun and self._fate.setdefault("is", "begun") == "begun"

    def end(self, error: VkmoeError | None, interval: tuple[int, int] | None = None) -> None:
        """It is over. Does nothing the second time."""
        if not self._over:
            self.copies, self._error, self._interval = (), error, interval
            self._over = True
            with suppress(RuntimeError):  # released already
                self._ended.release()

    def look(self, limit_s: float) -> bool:
        """Whether it is over; waits for that for at most `limit_s`."""
        return self.done() or self._ended.acquire(timeout=max(limit_s, 0.0)) or self.done()


class JobQueue:
    """Jobs that wait, urgent ones before the others. One thread adds them, one takes them."""

    def __init__(self, is_alive: Callable[[], bool]) -> None:
        """`is_alive`: whether the thread that takes jobs is."""
        self._is_alive = is_alive
        self._urgent: deque[Job] = deque()
        self._later: deque[Job] = deque()
        self._wakeups: SimpleQueue[None] = SimpleQueue()
        self._ending = False
        self.running: Job | None = None  # or the last one that was

    @property
    def n_later(self) -> int:
        """How many wait that are not urgent."""
        return len(self._later)

    @property
    def waiting(self) -> list[Job]:
        return [*self._urgent, *self._later]

    def add(self, job: Job, urgent: bool) -> None:
        (self._urgent if urgent else self._later).append(job)
        self._wake()

    def end(self) -> None:
        """Let `take` return None once no job waits."""
        self._ending = True
        self._wake()

    def wait_for(self, job: Job) -> None:
        """Wait until it is over. Raises GpuError where nobody is left to do it."""
        if job in self._later:
            self._urgent.append(job)  # first: Ctrl-C may leave it in both, but not in none
            self._remove(self._later, job)
        while not job.look(SLICE_S):
            if not self._is_alive() and not job.done():
                raise GpuError("the thread that copies experts has ended")

    def forget(self, job: Job) -> None:
        """It waits no more."""
        self._remove(self._urgent, job)
        self._remove(self._later, job)

    def take(self) -> Job | None:
        """The next job, begun, once there is one; None when it is time to end."""
        while True:
            job = self._first()
            if job is not None:
                self.running = job  # before it begins: who drains looks here last
                begun = job.begin()
                self.forget(job)
                if begun:
                    return job
            elif self._ending:
                return None
            else:
                self._wakeups.get()

    def _first(self) -> Job | None:
        for queue in (self._urgent, self._later):
            with suppress(IndexError):
                return queue[0]
        return None

    def _wake(self) -> None:
        if self._wakeups.empty():  # else the worker is going to look anyway
            self._wakeups.put(None)

    @staticmethod
    def _remove(queue: deque[Job], job: Job) -> None:
        with suppress(ValueError):
            queue.remove(job)
