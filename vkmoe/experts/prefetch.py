"""A thread that moves bytes while the engine's own thread goes on with the token.

Owns the thread, the jobs that wait for it, and what is counted of them. Does not decide what is
moved, nor when a place may be written: who starts a job has seen to that.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

from vkmoe.closing import Closing
from vkmoe.errors import DeviceLostError, GpuError, OutOfMemoryError, VkmoeError
from vkmoe.experts.uploads import Copy, Uploader

__all__ = ["Job", "JobCancelledError", "Prefetcher", "QueueFullError"]

log = logging.getLogger("vkmoe")
MAX_QUEUED = 16  # jobs that are not urgent; a job is one submit's worth of copies
SLICE_S = 0.1  # Ctrl-C is answered this quickly where waiting cannot be interrupted
END_LIMIT_S = 5.0  # for the running job, when all is to end
NO_MEMORY = OutOfMemoryError("copying experts failed, without memory left to say why")

QUEUED, RUNNING, CANCELLED = range(3)


class QueueFullError(GpuError):
    """As many jobs wait as may; nothing was begun. Start it later, or make it urgent."""


class JobCancelledError(GpuError):
    """The job never began; nothing was written."""


class Job:
    """Copies that wait for their turn, are under way, or are over: an `Upload`."""

    __slots__ = ("_copies", "_ended", "_error", "_interval", "_over", "_owner", "_state")

    def __init__(self, owner: Prefetcher, copies: Sequence[Copy]) -> None:
        self._owner, self._copies = owner, copies
        self._state, self._over = QUEUED, False
        self._ended = threading.Event()
        self._error: VkmoeError | None = None
        self._interval: tuple[int, int] | None = None

    def done(self) -> bool:
        """Whether it is over: arrived, failed or cancelled; never waits."""
        return self._over

    def wait(self) -> None:
        """Wait until it is over; it goes before jobs that nobody waits for.

        Raises what it failed with, always a VkmoeError; the targets' bytes are undefined then.
        JobCancelledError where it was cancelled.
        """
        if not self._over:
            self._owner._await(self)
        if self._error is not None:
            raise self._error

    def cancel(self) -> bool:
        """Whether it had not begun and now never will: nothing was written."""
        return self._owner._cancel(self)

    def interval(self) -> tuple[int, int] | None:
        """When the bytes moved, as its uploader knows it; None before the end, or if unknown."""
        return self._interval

    def _end(self, error: VkmoeError | None) -> None:
        if not self._over:  # its owner may have given it up
            self._copies = ()
            self._error = error
            self._over = True
            self._ended.set()


class Prefetcher(Closing):
    """Starts copies on a thread of its own, one job after the other. Itself an `Uploader`.

    Jobs are started and cancelled by one thread, the engine's. The worker survives whatever a job
    raises; but after a DeviceLostError every job fails with it at once. Raises
    OutOfMemoryError where the system refuses a thread.
    """

    def __init__(
        self,
        uploads: Uploader,
        name: str = "prefetch",
        max_queued: int = MAX_QUEUED,
        end_limit_s: float = END_LIMIT_S,
    ) -> None:
        self._uploads, self._name = uploads, name
        self._max_queued, self._end_limit_s = max_queued, end_limit_s
        self._lock = threading.Lock()  # of the queues; never held while bytes move
        self._wake = threading.Condition(self._lock)
        self._urgent: deque[Job] = deque()
        self._later: deque[Job] = deque()
        self._running: Job | None = None
        self._lost: DeviceLostError | None = None
        self._closing = False
        self._first_failure = ""
        self.n_jobs = self.n_bytes = 0  # that arrived
        self.n_cancelled = self.n_failed = 0  # jobs
        self.busy_ns = 0  # the worker's
        self.waited_ns = 0  # by those who waited for a job
        self._thread = threading.Thread(target=self._work, name=f"vkmoe {name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise OutOfMemoryError(f"no thread for {name}: {error}", "see `ulimit -u`") from error
        atexit.register(self.close)

    def start(self, copies: Sequence[Copy], urgent: bool = False) -> Job:
        """Let the worker copy. `copies` must not change. Urgent jobs go before all others.

        Raises, with nothing begun: QueueFullError unless it is urgent, DeviceLostError.
        """
        assert not self._closing, "closed"
        if self._lost is not None:
            raise self._lost
        if not urgent and not self.has_room:
            raise QueueFullError(f"{self._max_queued} jobs wait already", "start it later")
        job, queue = Job(self, copies), self._urgent if urgent else self._later
        with self._lock:  # not the condition: Ctrl-C inside its `__enter__` would keep it locked
            self._wake.notify()  # first: after Ctrl-C a job that waits has a worker who knows
            queue.append(job)
        return job

    @property
    def has_room(self) -> bool:
        """Whether a job that is not urgent may be started now."""
        return len(self._later) < self._max_queued

    def drain(self) -> bool:
        """Cancel what has not begun and wait for what has; whether that ended within the limit.

        Afterwards nothing is written, also by jobs whose start Ctrl-C has torn.
        """
        with self._lock:
            waiting = [*self._urgent, *self._later]
        for job in waiting:
            self._cancel(job)
        running, give_up = self._running, time.monotonic() + self._end_limit_s
        while running is not None and not running._over:
            left = give_up - time.monotonic()
            if left <= 0 or not self._thread.is_alive():
                return False
            running._ended.wait(min(left, SLICE_S))
        return True

    def close(self) -> None:
        """Drain, and end the thread. One that does not end in time is left behind, and told of."""
        give_up = time.monotonic() + self._end_limit_s
        with self._lock:
            already, self._closing = self._closing, True
            self._wake.notify()
        ended = self.drain()
        running = self._running
        if not ended and running is not None:
            log.warning("a copy of experts does not end (%s): its thread is left", self._name)
            running._end(GpuError("the copy did not end"))
        while ended and self._thread.is_alive() and time.monotonic() < give_up:
            self._thread.join(SLICE_S)
        atexit.unregister(self.close)
        if self.n_failed and not already:
            n_all, first = self.n_jobs + self.n_failed, self._first_failure
            log.warning("%s: %d of %d jobs failed; %s", self._name, self.n_failed, n_all, first)

    # ----- on the engine's thread -----

    def _await(self, job: Job) -> None:
        started = time.perf_counter_ns()
        with self._lock:
            if job in self._later:
                self._urgent.append(job)  # first: after Ctrl-C it may be in both, but not in none
                self._later.remove(job)
        try:
            while not job._over and not job._ended.wait(SLICE_S):
                if not self._thread.is_alive() and not job._over:
                    raise GpuError(f"the thread of {self._name} has ended")
        finally:
            self.waited_ns += time.perf_counter_ns() - started

    def _cancel(self, job: Job) -> bool:
        with self._lock:
            if job._state != QUEUED:
                return job._state == CANCELLED
            job._state = CANCELLED  # from here on the worker passes it over
            for queue in (self._urgent, self._later):
                if job in queue:
                    queue.remove(job)
            self.n_cancelled += 1
        job._end(JobCancelledError("cancelled"))
        return True

    # ----- on the worker's thread -----

    def _work(self) -> None:
        while True:
            try:
                job = self._next()
                if job is None:
                    return
                self._run(job)
            except BaseException:  # MemoryError of our own bookkeeping: there may be more later
                time.sleep(SLICE_S)
            job = None  # or its memory would be held while the thread sleeps

    def _next(self) -> Job | None:
        """The next job, once there is one; None when it is time to end."""
        with self._lock:
            self._running = None
            while True:
                while queue := self._urgent or self._later:
                    job = queue.popleft()
                    if job._state == QUEUED:
                        job._state, self._running = RUNNING, job
                        return job
                if self._closing:
                    return None
                self._wake.wait()

    def _run(self, job: Job) -> None:
        started, told = time.perf_counter_ns(), None
        try:
            if self._lost is not None:
                raise self._lost
            upload = self._uploads.start(job._copies)
            upload.wait()
            job._interval = upload.interval()
            self.n_bytes += sum([n_bytes for _, _, n_bytes in job._copies])
            self.n_jobs += 1
        except BaseException as error:  # KeyboardInterrupt too: a job must not end the thread
            told = self._failed(error)
        self.busy_ns += time.perf_counter_ns() - started
        job._end(told)

    def _failed(self, error: BaseException) -> VkmoeError:
        """Count a failure. Returns what those who collect the job are told."""
        self.n_failed += 1
        if isinstance(error, DeviceLostError):
            self._lost = error
        try:
            told = _told(error)
            if not self._first_failure:
                self._first_failure = f"the first: {told}"
                if told is not error:
                    log.warning("a copy of experts failed unexpectedly", exc_info=error)
            for one in (told, error):
                one.__traceback__ = None  # its frames hold the job and its memory
        except BaseException:
            return NO_MEMORY
        return told


def _told(error: BaseException) -> VkmoeError:
    """The error in terms of vkmoe's: whoever collects a job need not know others."""
    if isinstance(error, VkmoeError):
        return error
    kind = OutOfMemoryError if isinstance(error, MemoryError) else GpuError
    told = kind(f"copying experts failed with {type(error).__name__}: {error}")
    told.__cause__ = error
    return told
