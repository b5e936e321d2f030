"""A thread that moves bytes while the engine's own thread goes on with the token.

Owns the thread and what is counted of its jobs. Does not decide what is moved, nor when a place may
be written: who starts a job has seen to that.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress

from vkmoe.closing import Closing
from vkmoe.errors import DeviceLostError, GpuError, OutOfMemoryError, VkmoeError
from vkmoe.experts.jobs import SLICE_S, Job, JobQueue
from vkmoe.experts.uploads import Copy, Uploader

__all__ = ["Prefetcher", "QueueFullError"]

log = logging.getLogger("vkmoe")
MAX_QUEUED = 16  # jobs that are not urgent; a job is one submit's worth of copies
END_LIMIT_S = 5.0  # for the running job, when all is to end
NO_MEMORY = OutOfMemoryError("copying experts failed, without memory left to say why")


class QueueFullError(GpuError):
    """As many jobs wait as may; nothing was begun. Start it later, or make it urgent."""


class Prefetcher(Closing):
    """Starts copies on a thread of its own, one job after the other. Itself an `Uploader`.

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
        self.n_jobs = 0  # that arrived
        self.n_failed = 0  # jobs
        self.busy_ns = 0  # of the worker
        try:
            self._thread.start()
        except RuntimeError as error:
            raise OutOfMemoryError(f"no thread for {name}: {error}", "see `ulimit -u`") from error
        except BaseException:  # Ctrl-C: it may run already, and nobody would end it
            self._queue.end()
            raise
        atexit.register(self.close)

    @property
    def has_room(self) -> bool:
        """Whether a job that is not urgent may be started now."""
        return self._queue.n_later < self._max_queued

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
        """Cancel what has not begun and wait for what has; whether that ended within the limit.

        Afterwards nothing is written, not even by a job whose start Ctrl-C has torn.
        """
        for job in self._queue.waiting:
            job.cancel()
        running, give_up = self._queue.running, time.monotonic() + self._end_limit_s
        while running is not None and not running.look(SLICE_S):
            if time.monotonic() > give_up or not self._thread.is_alive():
                return False
        return True

    def close(self) -> None:
        """Drain, and end the thread. One that does not end in time is left behind, and told of."""
        first, self._closed = not self._closed, True
        self._queue.end()
        if self.drain():
            self._thread.join(self._end_limit_s)
        elif (running := self._queue.running) is not None:
            log.warning("a copy of experts does not end (%s): its thread is left", self._name)
            running.end(GpuError("the copy of experts did not end"))
        atexit.unregister(self.close)
        if first and self.n_failed:
            n_all = self.n_jobs + self.n_failed
            told = (self._name, self.n_failed, n_all, self._first_failure)
            log.warning("%s: %d of %d jobs failed; %s", *told)

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
                if job is not None and job.begun:
                    job.end(NO_MEMORY)  # unless it has ended, as nearly always

    def _run(self, job: Job) -> None:
        began, told, interval = time.perf_counter_ns(), None, None
        try:
            if self._lost is not None:
                raise self._lost
            upload = self._uploads.start(job.copies)
            upload.wait()
            interval = upload.interval()
            self.n_jobs += 1
        except BaseException as error:  # KeyboardInterrupt too: a job must not end the thread
            told = self._failed(error)
        self.busy_ns += time.perf_counter_ns() - began
        job.end(told, interval)

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
                    log.warning("a copy of experts failed unexpectedly\n%s", _text(error))
            for one in (told, error):
                one.__traceback__ = None  # its frames hold the job and its memory
        except BaseException:
            return NO_MEMORY
        return told

    def _stumbled(self, error: BaseException) -> None:
        """Tell once of an error of our own bookkeeping."""
        first, self._has_stumbled = not self._has_stumbled, True
        if first:
            with suppress(BaseException):  # without memory left to say so; the thread goes on
                log.warning("%s: keeping account of jobs failed\n%s", self._name, _text(error))


def _text(error: BaseException) -> str:
    """The error with its traceback, in words: as it is, it holds on to memory."""
    return "".join(traceback.format_exception(error))


def _told(error: BaseException) -> VkmoeError:
    """The error in terms of vkmoe's: whoever collects a job need not know others."""
    if isinstance(error, VkmoeError):
        return error
    kind = OutOfMemoryError if isinstance(error, MemoryError) else GpuError
    told = kind(f"copying experts failed with {type(error).__name__}: {error}")
    told.__cause__ = error
    return told
