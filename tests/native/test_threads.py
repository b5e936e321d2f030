"""Two Python threads on one device: one submits and waits, the other uploads and waits."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest

from tests.native.conftest import slow_recording
from tests.native.test_commands import words
from vkmoe.gpu import _native as native

SECONDS, DEADLINE_S = 1.0, 30.0  # how long they hammer, and when they count as hanging


def in_threads(*works: Callable[[int], None], seconds: float = SECONDS) -> list[int]:
    """Repeat each work in a thread of its own, told how often it ran before; the numbers of runs.

    Raises what any of them raised.
    """
    stop, errors, runs = threading.Event(), [], [0] * len(works)

    def repeat(number: int, work: Callable[[int], None]) -> None:
        try:
            for run in itertools.count():
                if stop.is_set():
                    break
                work(run)
                runs[number] = run + 1
        except BaseException as error:
            errors.append(error)
            stop.set()

    threads = [threading.Thread(target=repeat, args=item, daemon=True) for item in enumerate(works)]
    for thread in threads:
        thread.start()
    stop.wait(seconds)
    stop.set()
    deadline = time.monotonic() + DEADLINE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    for error in errors:
        raise error
    return runs


def test_one_thread_submits_while_another_uploads(device, host, affine):
    """Both see their own results, in whatever order the calls reach the queue."""
    tensor, readback = device.tensor(16), device.buffer(64, host)
    kernel = device.kernel(affine, [tensor], [16, 1], 4)
    recorder = device.recorder(n_timestamps=2)
    recorder.timestamp(0)
    recorder.dispatch(kernel, (1, 1, 1), (1).to_bytes(4, "little"))
    recorder.barrier()
    recorder.copy(tensor, 0, readback, 0, 64)
    recorder.timestamp(1)
    recording = recorder.finish()
    recorder = device.recorder()
    recorder.fill(tensor, 0, 64, 0)
    device.submit(recorder.finish()).wait()
    source, target = device.buffer(4096, host), device.buffer(4096, host)
    spans = [((source, at, 0), (target, at, 0), 256) for at in range(0, 4096, 256)]

    def token(run: int) -> None:
        submission = device.submit(recording)
        assert submission.wait(expected_ns=(run % 2) * 100_000) is True
        assert words(readback).tolist() == [run + 1] * 16
        assert submission.interval() is not None

    def upload(run: int) -> None:
        words(source)[:] = run
        uploads = [device.upload(spans[i::4], timed=bool(run % 2)) for i in range(4)]
        while not uploads[0].done():
            time.sleep(0)
        for one in uploads:
            assert one.wait() is True
            assert (one.interval() is not None) == bool(run % 2)
        assert (words(target) == run).all()

    n_tokens, n_uploads = in_threads(token, upload)
    assert min(n_tokens, n_uploads) >= 10, (n_tokens, n_uploads)
    device.wait_idle()
    assert device.settle(0) is True


def test_threads_drop_what_they_submitted(device, host):
    """Recordings and buffers come and go in both, unseen by wait(); the ledger stays sound."""
    target = device.buffer(64, host)

    def forget(run: int) -> None:
        recorder = device.recorder(queue=("compute", "upload")[run % 2], n_timestamps=run % 3)
        for index in range(run % 3):
            recorder.timestamp(index)
        recorder.fill(target, 0, 64, run)
        device.submit(recorder.finish(), ("compute", "upload")[run % 2])
        if run % 8 == 7:
            device.wait_idle()

    assert min(in_threads(forget, forget, seconds=0.4)) >= 10
    device.wait_idle()


def test_waiting_for_all_ends_though_another_thread_goes_on(device, host):
    """What is submitted later is that thread's affair."""
    place = (device.buffer(64, host), 0, 0), (device.buffer(64, host), 0, 0), 64
    longest = 0.0

    def wait(run: int) -> None:
        nonlocal longest
        started = time.monotonic()
        if run % 2:
            device.wait_idle()
        else:
            assert device.settle(10**10) is True
        longest = max(longest, time.monotonic() - started)

    uploads: deque[native.Submission] = deque()

    def upload(run: int) -> None:
        uploads.append(device.upload([place]))
        if len(uploads) > 8:  # so many are always in flight
            uploads.popleft().wait()

    n_waits, n_uploads = in_threads(wait, upload, seconds=0.5)
    assert n_waits >= 5 and n_uploads >= 50, (n_waits, n_uploads)
    assert longest < 5


def test_closing_waits_for_a_submit_on_its_way(instance, host):
    """Another thread is inside upload() when the device is closed: it ends, or is refused."""
    for _ in range(20):
        device = instance.open(0, [])
        place = (device.buffer(64, host), 0, 0), (device.buffer(64, host), 0, 0), 64
        begun = threading.Event()
        refused: list[str] = []

        def upload(device=device, place=place, begun=begun, refused=refused) -> None:
            try:
                for _ in range(10_000):
                    device.upload([place], timed=True)
                    begun.set()
            except RuntimeError as error:
                refused.append(str(error))

        thread = threading.Thread(target=upload, daemon=True)
        thread.start()
        assert begun.wait(DEADLINE_S)
        device.close()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        assert refused and all("closed" in text or "upload recordings" in text for text in refused)
    instance.close()
    del device, place, thread
    assert "device" not in native.live_objects()


def test_a_loss_seen_by_one_thread_is_told_to_the_other(device, slow, host):
    submission = device.submit(slow_recording(device, slow, 300))
    place = (device.buffer(64, host), 0, 0), (device.buffer(64, host), 0, 0), 64
    native.inject_failure("vkQueueSubmit", result="VK_ERROR_DEVICE_LOST")
    with pytest.raises(native.DeviceLost):
        in_threads(lambda run: device.upload([place]).wait(), seconds=5)
    with pytest.raises(native.DeviceLost):
        submission.wait()
    assert np.asarray(device.memory_bytes()).sum() > 0
