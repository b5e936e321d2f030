"""Submitting and waiting: errors are told, Ctrl-C works, a lost device stays lost."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from tests.native.conftest import slow_recording
from vkmoe.gpu import _native as native


def empty(device: native.Device) -> native.Recording:
    return device.recorder().finish()


def test_wait_times_out_and_can_be_repeated(device, slow):
    submission = device.submit(slow_recording(device, slow, 300))
    assert submission.wait(timeout_ns=1_000_000) is False
    assert submission.done() is False
    assert submission.wait() is True
    assert submission.done() is True
    assert submission.wait() is True


def test_polling_waits_as_long_as_it_takes(device, slow):
    for expected_ns in (1, 1_000_000, 19_000_000, 10**12):  # too low, and above the 20 ms limit
        submission = device.submit(slow_recording(device, slow, 30))
        assert submission.wait(expected_ns=expected_ns) is True
    submission = device.submit(slow_recording(device, slow, 300))
    assert submission.wait(expected_ns=5_000_000, timeout_ns=2_000_000) is False
    assert submission.wait(expected_ns=5_000_000) is True


def test_a_recording_is_in_flight_only_once(device, slow):
    recording = slow_recording(device, slow, 200)
    submission = device.submit(recording)
    with pytest.raises(RuntimeError, match="in flight"):
        device.submit(recording)
    submission.wait()
    device.submit(recording).wait()


def test_fences_are_used_again(device):
    """Making and destroying one takes NVIDIA's driver as long as a hundred submits."""
    for _ in range(20):
        submissions = [device.submit(empty(device)) for _ in range(3)]
        assert all(submission.wait() for submission in submissions)
    assert native.live_objects()["fence"] <= 6, "three in flight, three of the round before"


def test_wait_is_interruptible(device, slow):
    submission = device.submit(slow_recording(device, slow, 1500))
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        submission.wait()
    assert submission.done() is False, "it was not the interrupt that ended the wait"
    timer.join()
    assert submission.wait() is True


def test_other_threads_run_during_a_wait(device, slow):
    submission = device.submit(slow_recording(device, slow, 500))
    n_steps, stop = 0, threading.Event()

    def step() -> None:
        nonlocal n_steps
        while not stop.is_set():
            n_steps += 1
            time.sleep(0.001)

    thread = threading.Thread(target=step)
    thread.start()
    before = n_steps
    submission.wait()
    progress = n_steps - before
    stop.set()
    thread.join()
    assert progress >= 10


def test_several_threads_may_wait_for_one_submission(device, slow):
    submission = device.submit(slow_recording(device, slow, 100))
    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.append(submission.wait())) for _ in range(4)]
    for thread in threads:
        thread.start()
    device.close()  # may close while they wait
    for thread in threads:
        thread.join()
    assert results == [True] * 4


def test_close_waits_for_submissions_in_flight(instance, slow):
    device = instance.open(0, [])
    submission = device.submit(slow_recording(device, slow, 200))
    device.close()
    assert submission.wait() is True  # it had finished before its fence went


def test_a_dropped_submission_keeps_its_recording(device, slow):
    for _ in range(3):
        device.submit(slow_recording(device, slow, 20))
    device.wait_idle()


def test_an_injected_timeout_only_means_not_done_yet(device):
    native.inject_failure("vkWaitForFences", result="VK_TIMEOUT")
    assert device.submit(empty(device)).wait() is True


@pytest.mark.parametrize("call", ["vkQueueSubmit", "vkWaitForFences"])
def test_memory_errors_do_not_lose_the_device(device, call):
    native.inject_failure(call, result="VK_ERROR_OUT_OF_HOST_MEMORY")
    recording = empty(device)
    with pytest.raises(native.VulkanError, match=call) as caught:
        device.submit(recording).wait()
    assert not isinstance(caught.value, native.DeviceLost)
    assert caught.value.result == "VK_ERROR_OUT_OF_HOST_MEMORY"
    device.wait_idle()
    assert device.submit(recording).wait() is True


@pytest.mark.parametrize("call", ["vkQueueSubmit", "vkWaitForFences", "vkGetFenceStatus"])
def test_a_lost_device_stays_lost(device, slow, call):
    native.inject_failure(call, result="VK_ERROR_DEVICE_LOST")
    recording = slow_recording(device, slow, 20)
    with pytest.raises(native.DeviceLost) as caught:
        submission = device.submit(recording)
        _ = submission.done() if call == "vkGetFenceStatus" else submission.wait()
    assert (caught.value.call, caught.value.result) == (call, "VK_ERROR_DEVICE_LOST")
    assert device.lost
    # A further submit does not reach the driver: this injection is never used up.
    native.inject_failure("vkQueueSubmit", result="VK_ERROR_OUT_OF_HOST_MEMORY")
    for _ in range(2):
        with pytest.raises(native.DeviceLost):
            device.submit(empty(device))
    started = time.monotonic()
    device.close()
    assert time.monotonic() - started < 10


def test_losing_the_device_ends_waits_for_other_submissions(device, slow):
    first = device.submit(slow_recording(device, slow, 200))
    native.inject_failure("vkGetFenceStatus", result="VK_ERROR_DEVICE_LOST")
    with pytest.raises(native.DeviceLost):
        first.done()
    with pytest.raises(native.DeviceLost):
        first.wait()
    with pytest.raises(native.DeviceLost):
        device.wait_idle()


def test_unknown_names_are_refused(device, instance):
    with pytest.raises(ValueError, match="unknown VkResult"):
        native.inject_failure("vkQueueSubmit", result="VK_ERROR_BAD_DAY")
    with pytest.raises(ValueError, match="queue must be"):
        device.submit(empty(device), "graphics")
    with pytest.raises(ValueError, match="unknown device feature"):
        instance.open(0, ["robust_buffer_access"])
    with pytest.raises(IndexError):
        instance.open(99, [])


def test_settling_is_deaf_to_signals(device, slow):
    submission = device.submit(slow_recording(device, slow, 500))
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):  # once the wait is over
        device.settle(10**10)
        timer.join()
    assert submission.done() is True
    assert device.settle(0) is True, "there is nothing left to wait for"
    assert device.submit(empty(device)).wait() is True


def test_what_a_submit_reads_outlives_its_owners_when_it_does_not_settle(instance, host, slow):
    """Kernels read by address what no recording holds; Python lets go of it after Ctrl-C."""
    device = instance.open(0, [])
    buffer = device.buffer(4096, host)
    submission = device.submit(slow_recording(device, slow, 700))
    before = native.live_objects()
    started = time.monotonic()
    assert device.settle(50_000_000) is False
    assert time.monotonic() - started < 0.4, "it waited for the submit"
    assert device.lost
    for further in (submission.wait, submission.done, lambda: device.submit(empty(device))):
        with pytest.raises(native.DeviceLost):
            further()
    buffer.close()
    assert native.live_objects()["memory"] == before["memory"]
    device.close()  # waits for the rest of the submit
    instance.close()
    assert native.live_objects() == {}
