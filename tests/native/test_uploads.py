"""The upload queue: recordings that reuse their command buffers, and many copies in one call."""

from __future__ import annotations

import numpy as np
import pytest

from tests.native.test_commands import run, words
from vkmoe.gpu import _native as native


def test_upload_recordings_reuse_their_command_buffers(device, host):
    target = device.buffer(16, host)

    def upload(word: int) -> None:
        recorder = device.recorder(queue="upload")
        recorder.fill(target, 0, 16, word)
        run(device, recorder, "upload")

    upload(1)
    device.wait_idle()
    n_before = native.live_objects()["command_buffer"]
    for word in range(2, 100):
        upload(word)
        assert words(target).tolist() == [word] * 4
    assert native.live_objects()["command_buffer"] == n_before


def test_one_call_uploads_between_many_places(device, host):
    """Runs between the same two buffers, other buffers between them, and within one buffer."""
    source, other, target = (device.buffer(64, host) for _ in range(3))
    words(source)[:] = np.arange(16)
    words(other)[:] = np.arange(100, 116)
    words(target)[:] = 0
    submission = device.upload(
        [
            ((source, 0, source.address), (target, 16, target.address + 16), 4),
            ((source, 60, source.address + 60), (target, 8, target.address + 8), 4),
            ((other, 4, other.address + 4), (target, 32, target.address + 32), 12),
            ((source, 4, source.address + 4), (target, 60, target.address + 60), 4),
            ((source, 0, source.address), (source, 32, source.address + 32), 8),
            ((source, 4, source.address + 4), (source, 48, source.address + 48), 4),
        ]
    )
    assert submission.wait() is True and submission.done()
    assert words(target).tolist() == [0, 0, 15, 0, 0, 0, 0, 0, 101, 102, 103, 0, 0, 0, 0, 1]
    assert words(source).tolist() == [*range(8), 0, 1, 10, 11, 1, 13, 14, 15]


def test_an_upload_that_does_not_fit_copies_nothing(device, host):
    source, target = device.buffer(64, host, "home"), device.buffer(64, host, "slot")
    closed = device.buffer(64, host)
    closed.close()
    words(source)[:] = 7
    words(target)[:] = 0
    fits = ((source, 0, 0), (target, 0, 0), 16)
    bad = [
        (((source, 60, 0), (target, 0, 0), 8), ValueError, "home"),
        (((source, 0, 0), (target, 2**64 - 1, 0), 8), ValueError, "slot"),
        (((source, 0, 0), (target, 0, 0), 0), ValueError, "home"),
        (((source, 0, 0), (source, 8, 0), 16), ValueError, "overlaps"),
        (((closed, 0, 0), (target, 0, 0), 16), RuntimeError, "closed"),
        (((source, 0, 0), (closed, 0, 0), 16), RuntimeError, "closed"),
        ((("buffer", 0, 0), (target, 0, 0), 16), TypeError, "Buffer"),
        (((source, -1, 0), (target, 0, 0), 16), TypeError, "integers"),
        (((source, 0, 0), (target, 0, 0), "16"), TypeError, "integers"),
        ((source, target, 16), TypeError, "places"),
        (((source, 0, 0), (target, 0, 0)), TypeError, "places"),
        (((), (target, 0, 0), 16), TypeError, "places"),
    ]
    for _ in range(10):  # more failures than there are upload recordings
        for copy, error, text in bad:
            with pytest.raises(error, match=text):
                device.upload([fits, copy])
    with pytest.raises(TypeError):
        device.upload(fits)
    device.wait_idle()
    assert words(target).tolist() == [0] * 16
    device.upload([fits]).wait()
    assert words(target).tolist() == [7] * 4 + [0] * 12
    device.close()
    with pytest.raises(RuntimeError, match="closed"):
        device.upload([fits])


def test_upload_recordings_are_limited(device):
    alive = [device.recorder(queue="upload") for _ in range(64)]
    with pytest.raises(RuntimeError, match="at most 64"):
        device.recorder(queue="upload")
    alive.pop()
    device.recorder(queue="upload")
