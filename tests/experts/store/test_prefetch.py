"""The thread that moves bytes: order, cancelling, what it holds, and random jobs."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from contextlib import suppress

import pytest

from tests.experts.held_uploads import NOWHERE, HeldUploads, copies, inner, names, worker
from vkmoe.errors import GpuError, VkmoeError
from vkmoe.experts.store.copies import (
    Job,
    JobCancelledError,
    Prefetcher,
    QueueFullError,
)

__all__ = ["inner", "worker"]

pytestmark = pytest.mark.timeout(10)


# ----- what it does -----


def test_a_job_copies_and_is_counted(worker: Prefetcher, inner: HeldUploads) -> None:
    job = worker.start(copies("a", "b"))
    job.wait()
    assert job.done() and not job.cancel()
    assert names(inner.arrived) == "ab" and job.interval() == (10, 20)
    assert (worker.n_jobs, worker.n_failed) == (1, 0)
    assert worker.busy_ns > 0


def test_starting_does_not_wait(worker: Prefetcher, inner: HeldUploads) -> None:
    inner.hold()
    first, second = worker.start(copies("a")), worker.start(copies("b"))
    inner.wait_until_begun()
    assert not first.done() and not second.done() and first.interval() is None
    inner.let_go(2)
    second.wait()
    assert first.done() and names(inner.arrived) == "ab"


def test_urgent_jobs_go_before_the_others(worker: Prefetcher, inner: HeldUploads) -> None:
    inner.hold()
    worker.start(copies("a"))
    inner.wait_until_begun()
    jobs = [worker.start(copies(name), urgent=name in "de") for name in "bcde"]
    inner.let_go(5)
    for job in jobs:
        job.wait()
    assert names(inner.arrived) == "adebc"


def test_a_job_that_is_waited_for_goes_before_the_others(
    worker: Prefetcher, inner: HeldUploads
) -> None:
    inner.hold()
    worker.start(copies("a"))
    inner.wait_until_begun()
    jobs = [worker.start(copies(name)) for name in "bcd"]
    letting_go = threading.Timer(0.02, inner.let_go, [4])
    letting_go.start()
    jobs[2].wait()
    jobs[1].wait()
    letting_go.join()
    assert names(inner.arrived) == "adbc"


def test_a_cancelled_job_never_begins(worker: Prefetcher, inner: HeldUploads) -> None:
    inner.hold()
    first, second, third = (worker.start(copies(name)) for name in "abc")
    inner.wait_until_begun()
    assert not first.cancel(), "it has begun"
    assert second.cancel() and second.cancel() and second.done()
    with pytest.raises(JobCancelledError):
        second.wait()
    inner.let_go(2)
    third.wait()
    assert names(inner.begun) == names(inner.arrived) == "ac"


def test_a_full_queue_refuses_all_but_urgent_jobs(worker: Prefetcher, inner: HeldUploads) -> None:
    inner.hold()
    worker.start(copies("a"))
    inner.wait_until_begun()
    waiting = [worker.start(copies(name)) for name in "bcde"]
    assert not worker.has_room
    with pytest.raises(QueueFullError):
        worker.start(copies("f"))
    urgent = worker.start(copies("g"), urgent=True)
    waiting[0].cancel()
    assert worker.has_room
    last = worker.start(copies("h"))
    inner.let_go(6)
    last.wait()
    waiting[3].wait()
    assert urgent.done() and sorted(names(inner.arrived)) == list("acdegh")


def test_a_job_that_is_over_holds_no_memory(worker: Prefetcher, inner: HeldUploads) -> None:
    class Buffer:
        pass

    for error in (None, GpuError("injected"), MemoryError()):
        buffer = Buffer()
        gone = weakref.ref(buffer)
        inner.faults["wait"] = [error] if error else []
        job = worker.start([(buffer, NOWHERE, 1)])
        with suppress(GpuError):
            job.wait()
        inner.begun.clear()
        inner.arrived.clear()
        worker.start([]).wait()  # the thread has left the job behind
        del buffer
        gc.collect()
        assert gone() is None, error
        del job


def test_what_waits_is_bounded_however_many_are_started_and_cancelled(
    worker: Prefetcher, inner: HeldUploads
) -> None:
    inner.hold()
    worker.start(copies("a"))
    inner.wait_until_begun()
    for _ in range(1000):
        assert worker.start(copies("b"), urgent=True).cancel()
        assert worker.start(copies("b")).cancel()
    assert not worker._queue.waiting
    inner.let_go(2)
    worker.start(copies("c")).wait()
    assert names(inner.begun) == "ac"


# ----- all at once -----


class _Random(HeldUploads):
    """Takes no time, or some, and fails now and then."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def strike(self, point: str) -> None:
        fate = self._random.random()
        if fate < 0.1:
            raise self._random.choice([GpuError("injected"), MemoryError(), KeyboardInterrupt()])
        if fate < 0.4:
            time.sleep(self._random.random() * 2e-4)


@pytest.mark.parametrize("seed", range(3))
def test_random_jobs_end_as_they_say(seed: int) -> None:
    """Each arrives once, or fails, or is cancelled and was never begun; in half a second."""
    chance, inner = random.Random(seed), _Random(seed)
    open_jobs: list[tuple[int, Job]] = []
    fates: dict[int, str] = {}

    def collect(number: int, job: Job) -> None:
        try:
            job.wait()
            fates[number] = "arrived"
        except JobCancelledError:
            fates[number] = "cancelled"
        except VkmoeError:
            fates[number] = "failed"

    give_up, number = time.monotonic() + 0.5, 0
    with Prefetcher(inner, max_queued=8) as worker:
        while time.monotonic() < give_up:
            action = chance.random()
            if action < 0.6 and worker.has_room:
                job = worker.start([(number, NOWHERE, 1)], urgent=action < 0.1)
                open_jobs.append((number, job))
                number += 1
            elif open_jobs and action < 0.8:
                open_jobs[chance.randrange(len(open_jobs))][1].cancel()
            elif open_jobs and action < 0.95:
                collect(*open_jobs.pop(chance.randrange(len(open_jobs))))
            else:
                time.sleep(chance.random() * 3e-4)
    for one in open_jobs:
        assert one[1].done(), "closing left a job open"
        collect(*one)
    counts = [list(fates.values()).count(fate) for fate in ("arrived", "failed", "cancelled")]
    assert counts[:2] == [worker.n_jobs, worker.n_failed]
    assert sum(counts) == number and min(counts) > 5
    assert sorted(copy[0] for copy in inner.arrived) == sorted(
        number for number, fate in fates.items() if fate == "arrived"
    )
    assert not {copy[0] for copy in inner.begun} & {
        number for number, fate in fates.items() if fate == "cancelled"
    }
