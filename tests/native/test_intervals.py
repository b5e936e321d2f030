"""When submits began and ended: of recordings with two timestamps, and of timed uploads."""

from __future__ import annotations

import itertools

import pytest

from tests.native.conftest import slow_recording
from vkmoe.gpu import _native as native


def stamped(device: native.Device, queue: str = "compute") -> native.Recording:
    recorder = device.recorder(n_timestamps=2, queue=queue)
    recorder.timestamp(0)
    recorder.timestamp(1)
    return recorder.finish()


@pytest.mark.parametrize("features", [[], ["host_query_reset"]], ids=["commands", "host"])
def test_intervals_follow_each_other_whoever_resets_the_queries(instance, host, features):
    """Submits of a recording again and again, and uploads between them."""
    device = instance.open(0, features)
    assert device.has_timestamps() and device.has_timestamps("upload") and device.has_common_clock
    place = (device.buffer(64, host), 0, 0), (device.buffer(64, host), 0, 0), 64
    recording = stamped(device)
    intervals = []
    for _ in range(3):
        for submission in (device.submit(recording), device.upload([place], timed=True)):
            submission.wait()
            intervals.append(submission.interval())
    assert None not in intervals
    times = list(itertools.chain.from_iterable(intervals))
    assert times == sorted(times), intervals
    assert recording.timestamps() == list(intervals[4])
    device.close()


def test_an_interval_is_as_long_as_the_work(device, slow):
    kernel = device.kernel(slow, [device.tensor(64)], [], 0)
    recorder = device.recorder(n_timestamps=2)
    recorder.timestamp(0)
    recorder.dispatch(kernel, (24, 1, 1))
    recorder.timestamp(1)
    recording = recorder.finish()
    empty, busy = device.submit(stamped(device)), device.submit(recording)
    busy.wait()
    empty.wait()
    (_, idle), (started, ended) = empty.interval(), busy.interval()
    assert idle <= started < ended < started + 60 * 10**9
    assert ended - started > 10**6


def test_an_interval_outlives_the_next_submit(device):
    recording = stamped(device)
    first = device.submit(recording)
    first.wait()
    known = first.interval()
    second = device.submit(recording)
    second.wait()
    assert first.interval() == known < second.interval()


def test_what_is_not_timed_has_no_interval(device, host):
    place = (device.buffer(64, host), 0, 0), (device.buffer(64, host), 0, 0), 64
    for submission in (device.upload([place]), device.submit(device.recorder().finish())):
        submission.wait()
        assert submission.interval() is None


def test_there_is_no_interval_before_the_end(device, slow):
    submission = device.submit(slow_recording(device, slow, 200))
    with pytest.raises(RuntimeError, match="not been seen to finish"):
        submission.interval()
    submission.wait()
    assert submission.interval() is None


def test_a_time_that_cannot_be_read_harms_nothing(device):
    recording = stamped(device)
    native.inject_failure("vkGetQueryPoolResults", result="VK_ERROR_OUT_OF_HOST_MEMORY")
    submission = device.submit(recording)
    assert submission.wait() is True
    assert submission.interval() is None
    submission = device.submit(recording)
    assert submission.wait() is True and submission.interval() is not None


def test_timed_uploads_reuse_their_queries(device, host):
    place = (device.buffer(64, host), 0, 0), (device.buffer(64, host), 0, 0), 64
    for timed in (True, False, True, False):
        device.upload([place], timed=timed).wait()
    device.wait_idle()
    live = native.live_objects()
    for _ in range(20):
        device.upload([place], timed=True).wait()
    device.wait_idle()
    assert native.live_objects() == live and live["query_pool"] == 1
