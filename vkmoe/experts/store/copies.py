"""Moves bytes of experts: copies by the upload queue, a thread that starts them, and a budget.

Owns what a copy and an uploader are, the recordings in flight, the thread with its jobs and what is
counted of them, and how many bytes may be copied while a token runs. Does not decide what is moved,
nor when a slot may be written: that is up to the one that starts a copy.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from typing import Any, Protocol, TypeAlias

from vkmoe.closing import Closing
from vkmoe.errors import DeviceLostError, GpuError, OutOfMemoryError, VkmoeError
from vkmoe.gpu.arena import Placement
from vkmoe.gpu.backend import Submission
from vkmoe.gpu.device import Device, translated, vulkan_errors
from vkmoe.gpu.link_speed import LinkSpeed
from vkmoe.interrupts import SLICE_S, checkpoint

log = logging.getLogger("vkmoe")
MAX_QUEUED = 16  # jobs that are not urgent; a job is one submit's worth of copies
END_LIMIT_S = 5.0  # for the running job, when all is to end
NO_MEMORY = OutOfMemoryError("copying experts failed, without memory left to say why")
DOING = "uploading experts"
SETTLE_NS = 10_000_000_000  # that copies may go on after an error; then the device counts as lost
COPY_SHARE = 0.25
NEW_WEIGHT = 1 / 8  # of the last token in the running means

# One span to copy: from, to, bytes. A plain tuple: one is made for every expert that moves.
# From: a Placement, or what another uploader copies from (of the file: an expert's number).
Copy: TypeAlias = tuple[Any, Placement, int]


class Upload(Protocol):
    """Follows copies that are under way."""

    def done(self) -> bool:
        """Return whether all bytes have arrived; never waits."""

    def wait(self) -> None:
        """Wait for the end. Raises VkmoeErrors: then the targets' bytes are and stay undefined."""

    def cancel(self) -> bool:
        """Return whether the copies had not begun and now never will: nothing was written."""

    def interval(self) -> tuple[int, int] | None:
        """Return begin and end in nanoseconds of their queue's clock; None: not known."""


class Uploader(Protocol):
    """Copies bytes: by the upload queue or a thread, or in tests slowly or with failures."""

    def start(self, copies: Sequence[Copy], urgent: bool = False) -> Upload:
        """Begin to copy, before what is not urgent. Raises VkmoeErrors, with nothing begun."""


class Uploads:
    """Copies by one submit on the upload queue (the compute queue, where there is one queue)."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._timed = device.native.has_timestamps("upload")
        # Whether copies and submits that compute have one queue.
        self.in_order = not device.native.has_upload_queue

    def start(self, copies: Sequence[Copy], urgent: bool = False) -> Upload:
        try:  # no context manager: nearly every token comes here
            return _Upload(self._device, self._device.native.upload(copies, self._timed))
        except vulkan_errors() as error:
            raise translated(error, DOING) from error


def come_in_order(uploads: Uploader) -> bool:
    """Return whether a submit finds what is copied before it, without a wait of the host."""
    return isinstance(uploads, Uploads) and uploads.in_order


class _Upload:
    """Follows a submit on the upload queue."""

    __slots__ = ("_device", "_submission")

    def __init__(self, device: Device, submission: Submission) -> None:
        self._device, self._submission = device, submission

    def done(self) -> bool:
        try:
            return self._submission.done()
        except vulkan_errors() as error:
            raise translated(error, DOING) from error

    def wait(self) -> None:
        try:
            self._submission.wait()
        except MemoryError:
            self._settle()
            raise
        except vulkan_errors() as error:
            self._settle()
            raise translated(error, DOING) from error

    def _settle(self) -> None:
        """Wait for a copy that goes on although waiting failed: its targets become others' soon."""
        with suppress(RuntimeError):  # the first error is the one to tell
            self._device.native.settle(SETTLE_NS, self._submission)

    def cancel(self) -> bool:
        return False

    def interval(self) -> tuple[int, int] | None:
        return self._submission.interval() if self._submission.done() else None


class QueueFullError(GpuError):
    """Too many jobs wait already, so nothing was begun. Start it later, or make it urgent."""


class JobCancelledError(GpuError):
    """The job never began; nothing was written."""


class Prefetcher(Closing):
    """Starts copies on a thread of its own, one job after the other; is an `Uploader`.

    One thread, the engine's, starts, waits and cancels. The worker survives whatever a job raises;
    but after a DeviceLostError every job fails with it at once. Raises OutOfMemoryError where the
    system refuses a thread.
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
        self._thread = threading.Thread(target=self._work, name=f"vkmoe {name}", daemon=True)
        self._queue = JobQueue(self._thread.is_alive)
        self._lost: DeviceLostError | None = None
        self._closed = False
        self._first_failure, self._has_stumbled = "", False
        self.n_jobs = 0  # jobs that arrived
        self.n_failed = 0  # jobs
        self.busy_ns = 0  # of the worker
        try:
            self._thread.start()
        except RuntimeError as error:
            raise OutOfMemoryError(f"no thread for {name}: {error}", "see `ulimit -u`") from error
        atexit.register(self.close)

    @property
    def has_room(self) -> bool:
        """Return whether a job that is not urgent may be started now."""
        return len(self._queue.later) < self._max_queued

    def start(self, copies: Sequence[Copy], urgent: bool = False) -> Job:
        """Let the worker copy. `copies` must not change. Urgent jobs go before all others.

        Raises, with nothing begun: QueueFullError unless it is urgent, DeviceLostError.
        """
        assert not self._closed, "closed"
        if self._lost is not None:
            raise self._lost
        if not urgent and not self.has_room:
            raise QueueFullError(f"{self._max_queued} jobs wait already", "start it later")
        job = Job(self._queue, copies)
        self._queue.add(job, urgent)
        return job

    def drain(self) -> bool:
        """Cancel what has not begun, wait for what has; return whether that was within the limit.

        Afterwards nothing is written.
        """
        for job in self._queue.waiting:
            job.cancel()
        running = self._queue.running
        return running is None or running.look(self._end_limit_s)

    def close(self) -> None:
        """Drain, and end the thread. One that does not end in time is left, with a warning."""
        first, self._closed = not self._closed, True
        self._queue.end()
        if self.drain():
            self._thread.join(self._end_limit_s)
        elif (running := self._queue.running) is not None:
            log.warning("a copy of experts does not end (%s): its thread is left", self._name)
            running.end(GpuError("the copy of experts did not end"))
        atexit.unregister(self.close)
        if first and self.n_failed:
            failed = f"{self.n_failed} of {self.n_jobs + self.n_failed} jobs failed"
            log.warning("%s: %s; %s", self._name, failed, self._first_failure)

    # ----- on the worker's thread -----

    def _work(self) -> None:
        while True:
            try:
                job = self._queue.take()
                if job is None:
                    return
                self._run(job)
            except BaseException as error:  # MemoryError of our own bookkeeping, most likely
                self._stumbled(error)
                time.sleep(SLICE_S)  # there may be more memory later
            finally:
                job = self._queue.running
                if job is not None:
                    job.end(NO_MEMORY)  # unless it has ended, as nearly always

    def _run(self, job: Job) -> None:
        began, failure, interval = time.perf_counter_ns(), None, None
        try:
            if self._lost is not None:
                raise self._lost
            upload = self._uploads.start(job.copies)
            upload.wait()
            interval = upload.interval()
            self.n_jobs += 1
        except BaseException as error:  # whatever it is: a job must not end the thread
            failure = self._failed(error)
        self.busy_ns += time.perf_counter_ns() - began
        job.end(failure, interval)

    def _failed(self, error: BaseException) -> VkmoeError:
        """Count a failure. Returns the error that collecting the job raises."""
        self.n_failed += 1
        if isinstance(error, DeviceLostError):
            self._lost = error
        try:
            raised = as_vkmoe_error(error)
            if not self._first_failure:
                self._first_failure = f"the first: {raised}"
                if raised is not error:
                    log.warning("a copy of experts failed unexpectedly\n%s", _text(error))
            for one in (raised, error):
                one.__traceback__ = None  # its frames hold the job and its memory
        except BaseException:
            return NO_MEMORY
        return raised

    def _stumbled(self, error: BaseException) -> None:
        """Warn once of an error of our own bookkeeping."""
        first, self._has_stumbled = not self._has_stumbled, True
        if first:
            with suppress(BaseException):  # without memory left to say so; the thread goes on
                log.warning("%s: keeping account of jobs failed\n%s", self._name, _text(error))


def _text(error: BaseException) -> str:
    """Return the error with its traceback as text: the object holds on to memory."""
    return "".join(traceback.format_exception(error))


def as_vkmoe_error(error: BaseException) -> VkmoeError:
    """Return the error as one of vkmoe's: those that collect a job need not know others."""
    if isinstance(error, VkmoeError):
        return error
    kind = OutOfMemoryError if isinstance(error, MemoryError) else GpuError
    raised = kind(f"copying experts failed with {type(error).__name__}: {error}")
    raised.__cause__ = error
    return raised


class Job:
    """Follows copies that wait for their turn, are under way, or are over: an `Upload`."""

    __slots__ = ("_error", "_interval", "_is_over", "_queue", "cancelled", "copies")

    def __init__(self, queue: JobQueue, copies: Sequence[Copy]) -> None:
        self._queue, self.copies = queue, copies
        self.cancelled = self._is_over = False
        self._error: VkmoeError | None = None
        self._interval: tuple[int, int] | None = None

    def done(self) -> bool:
        """Return whether the job is over: arrived, failed or cancelled; never waits."""
        return self._is_over

    def wait(self) -> None:
        """Wait until the job is over; from now on it goes before jobs that none waits for.

        Raises what it failed with, always a VkmoeError; the targets' bytes are undefined then.
        JobCancelledError where it was cancelled. Ctrl-C may end the waiting, and nothing else.
        """
        if not self._is_over:
            self._queue.wait_for(self)
        if self.cancelled:
            raise JobCancelledError("the copy was cancelled")
        if self._error is not None:
            raise self._error

    def cancel(self) -> bool:
        """Return whether the job had not begun and now never will: nothing was written."""
        if not self._is_over and self._queue.forget(self):
            self.cancelled = True
            self.end(None)
        return self.cancelled

    def interval(self) -> tuple[int, int] | None:
        """Return when the bytes moved, by its uploader; None before the end, or if unknown."""
        return self._interval

    def end(self, error: VkmoeError | None, interval: tuple[int, int] | None = None) -> None:
        """Note that the job is over. Does nothing the second time."""
        with self._queue.changed:
            if not self._is_over:
                self.copies, self._error, self._interval = (), error, interval
                self._is_over = True
                self._queue.changed.notify_all()

    def look(self, limit_s: float) -> bool:
        """Return whether the job is over; waits for that for at most `limit_s`."""
        with self._queue.changed:
            return self._queue.changed.wait_for(self.done, limit_s)


class JobQueue:
    """Holds jobs that wait, urgent ones first. One thread adds them, one takes them."""

    def __init__(self, is_alive: Callable[[], bool]) -> None:
        """Begin empty; `is_alive` returns whether the thread that takes jobs is."""
        self._is_alive = is_alive
        self.changed = threading.Condition()  # its lock guards all that follows, and jobs' ends
        self._urgent: deque[Job] = deque()
        self.later: deque[Job] = deque()  # those that are not urgent
        self._is_ending = False
        self.running: Job | None = None  # or the last one that was

    @property
    def waiting(self) -> list[Job]:
        with self.changed:
            return [*self._urgent, *self.later]

    def add(self, job: Job, urgent: bool) -> None:
        with self.changed:
            (self._urgent if urgent else self.later).append(job)
            self.changed.notify_all()

    def end(self) -> None:
        """Let `take` return None once no job waits."""
        with self.changed:
            self._is_ending = True
            self.changed.notify_all()

    def wait_for(self, job: Job) -> None:
        """Wait until a job is over. Raises GpuError where no thread is left to do it."""
        with self.changed:
            if job in self.later:
                self.later.remove(job)
                self._urgent.append(job)
        while not job.look(SLICE_S):
            checkpoint()
            if not self._is_alive() and not job.done():
                raise GpuError("the thread that copies experts has ended")

    def forget(self, job: Job) -> bool:
        """Take a job out of the queue; return whether it was there."""
        with self.changed:
            for queue in (self._urgent, self.later):
                if job in queue:
                    queue.remove(job)
                    return True
        return False

    def take(self) -> Job | None:
        """Return the next job, which begins, once there is one; None when it is time to end."""
        with self.changed:
            while not (self._urgent or self.later):
                if self._is_ending:
                    return None
                self.changed.wait()
            self.running = (self._urgent or self.later).popleft()
            return self.running


class CopyBudget:
    """Says how many bytes may be copied in the background while the next token runs.

    It goes by the tokens so far: running means of their time and of what they missed. Misses are
    read over the same link, and a token waits for them but not for copies. So at most a quarter of
    what the link can copy in the time of a token, and at most what the expected misses leave of it;
    the aim is that reads in place get at most 15 % slower. But at least one expert, or a slow link
    would let nothing in.
    """

    def __init__(self, link: LinkSpeed | None, largest_bytes: int) -> None:
        """Begin without a token; no link: no limit. `largest_bytes` are those of an expert."""
        self._link, self._largest_bytes = link, largest_bytes
        self._token_s = self._missed_bytes = 0.0
        self._weight = 1.0  # of the next token; the first counts whole

    def token(self, seconds: float, missed_bytes: float) -> None:
        """Note how long a token took, from its submit to its end, and how much it missed."""
        self._token_s += self._weight * (seconds - self._token_s)
        self._missed_bytes += self._weight * (missed_bytes - self._missed_bytes)
        self._weight = NEW_WEIGHT

    @property
    def n_bytes(self) -> float:
        """Return the bytes that the next token may copy; one expert before the first."""
        if self._link is None:
            return inf
        left_s = self._token_s - self._missed_bytes / self._link.read_bytes_per_second
        share_s = min(COPY_SHARE * self._token_s, left_s)
        return max(share_s * self._link.copy_bytes_per_second, self._largest_bytes)
