"""The thread that moves bytes: every fault at every point, its end, and Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.experts.held_uploads import HeldUploads, copies, inner, names, worker
from vkmoe.errors import DeviceLostError, GpuError, ModelFileError, OutOfMemoryError, VkmoeError
from vkmoe.experts.store.copies import JobCancelledError, Prefetcher
from vkmoe.interrupts import at_checkpoints

__all__ = ["inner", "worker"]

pytestmark = pytest.mark.timeout(10)


# ----- faults -----

FAULTS = [
    GpuError("injected"), OutOfMemoryError("injected"), ModelFileError("truncated"),
    MemoryError(), OSError(5, "injected"), RuntimeError("too many"), AssertionError(),
    KeyboardInterrupt(), SystemExit(1), StopIteration(),
]  # fmt: skip


@pytest.mark.parametrize("point", ["start", "wait"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_the_worker_survives_a_fault(
    worker: Prefetcher, inner: HeldUploads, fault: BaseException, point: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Once, then never, then three times: each job tells its own, and no other."""
    inner.faults[point] = [fault]
    failing, sound = worker.start(copies("a")), worker.start(copies("b"))
    with pytest.raises(VkmoeError) as raised:
        failing.wait()
    assert raised.value is fault or raised.value.__cause__ is fault
    sound.wait()
    inner.always[point] = fault
    for _ in range(3):
        with pytest.raises(VkmoeError):
            worker.start(copies("c")).wait()
    inner.always.clear()
    worker.start(copies("d"), urgent=True).wait()
    assert names(inner.arrived) == "bd" and (worker.n_jobs, worker.n_failed) == (2, 4)
    unexpected = not isinstance(fault, VkmoeError)
    assert len(caplog.records) == unexpected, "what is unexpected is told once, at once"
    worker.close()
    assert len(caplog.records) == unexpected + 1 and "4 of 6 jobs failed" in caplog.text


@pytest.mark.parametrize("fault", [MemoryError(), KeyboardInterrupt()])
@pytest.mark.parametrize(("owner", "part"), [(Prefetcher, "_run"), (Prefetcher, "_failed")])
def test_the_worker_survives_faults_of_its_own_bookkeeping(
    worker: Prefetcher, inner: HeldUploads, monkeypatch: pytest.MonkeyPatch, owner: type,
    part: str, fault: BaseException, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """And tells of them once."""

    def failing(*_: object) -> None:
        raise fault

    for _ in range(2):
        inner.faults["wait"] = [GpuError("injected")]
        with monkeypatch.context() as patched, pytest.raises(OutOfMemoryError):
            patched.setattr(owner, part, failing)
            worker.start(copies("a")).wait()
        inner.faults["wait"].clear()
        worker.start(copies("b")).wait()
    assert names(inner.arrived) == "bb"
    assert [type(fault).__name__ in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("point", ["start", "wait"])
def test_a_lost_device_fails_every_later_job_at_once(
    worker: Prefetcher, inner: HeldUploads, point: str
) -> None:
    inner.hold()
    first = worker.start(copies("a"))
    inner.wait_until_begun()  # or the worker could be faster than the jobs to come
    inner.faults[point] = [DeviceLostError("injected")]
    later = [worker.start(copies(name)) for name in "bc"]
    inner.let_go()
    for job in later if point == "start" else [first, *later]:
        with pytest.raises(DeviceLostError):
            job.wait()
    with pytest.raises(DeviceLostError):
        worker.start(copies("d"))
    tried = {"start": "ab", "wait": "a"}[point]
    assert names(inner.begun) == tried, "jobs behind it were tried"


def test_a_system_without_threads_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(OutOfMemoryError, match="thread"):
        Prefetcher(HeldUploads())


# ----- its end -----


def test_closing_cancels_what_waits_and_waits_for_what_runs(
    worker: Prefetcher, inner: HeldUploads
) -> None:
    inner.hold()
    jobs = [worker.start(copies("a"))]
    inner.wait_until_begun()
    jobs += [worker.start(copies(name), urgent=name == "c") for name in "bc"]
    letting_go = threading.Timer(0.02, inner.let_go)
    letting_go.start()
    worker.close()
    worker.close()
    assert not worker._thread.is_alive()
    jobs[0].wait()
    for job in jobs[1:]:
        with pytest.raises(JobCancelledError):
            job.wait()
    assert names(inner.begun) == names(inner.arrived) == "a"
    letting_go.join()


def test_draining_leaves_the_worker_alive(worker: Prefetcher, inner: HeldUploads) -> None:
    assert worker.drain()
    inner.hold()
    jobs = [worker.start(copies("a"))]
    inner.wait_until_begun()
    jobs += [worker.start(copies(name), urgent=name == "c") for name in "bc"]
    letting_go = threading.Timer(0.02, inner.let_go)
    letting_go.start()
    assert worker.drain() and all(job.done() for job in jobs) and names(inner.arrived) == "a"
    letting_go.join()
    inner.let_go()
    worker.start(copies("d")).wait()


def test_a_copy_that_never_ends_is_left_behind(
    inner: HeldUploads, caplog: pytest.LogCaptureFixture
) -> None:
    inner.hold()
    worker = Prefetcher(inner, end_limit_s=0.05)
    job = worker.start(copies("a"))
    inner.wait_until_begun()
    assert not worker.drain()
    worker.close()
    worker.close()
    assert "does not end" in caplog.text and worker._thread.daemon
    with pytest.raises(GpuError, match="did not end"):
        job.wait()
    inner.let_go()  # it ends after all: nothing changes, and the thread goes
    worker._thread.join(5)
    assert not worker._thread.is_alive()
    with pytest.raises(GpuError, match="did not end"):
        job.wait()


@pytest.mark.parametrize("stuck", [False, True])
def test_a_program_that_forgets_to_close_still_ends(stuck: bool) -> None:
    program = f"""
import time
from tests.experts.held_uploads import HeldUploads
from vkmoe.experts.store.copies import Prefetcher
inner = HeldUploads()
if {stuck}:
    inner.pass_gate = lambda: time.sleep(60)
worker = Prefetcher(inner, end_limit_s=0.1)
for _ in range(5):
    worker.start([(None, None, 1)])
inner.wait_until_begun()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=8
    )
    assert done.returncode == 0, done.stderr
    assert ("does not end" in done.stderr) == stuck and "Traceback" not in done.stderr


# ----- Ctrl-C -----


def test_ctrl_c_ends_waiting_and_nothing_else(worker: Prefetcher, inner: HeldUploads) -> None:
    inner.hold()
    jobs = [worker.start(copies(name)) for name in "abc"]
    inner.wait_until_begun()
    threading.Timer(0.02, signal.raise_signal, [signal.SIGINT]).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), at_checkpoints():
        jobs[2].wait()
    assert time.monotonic() - began < 0.25
    inner.let_go(3)
    for job in jobs:
        job.wait()
    assert names(inner.arrived) == "acb", "that it was waited for counts"
