"""An open device for the tests of the cache."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.live import live_objects_but_fences
from vkmoe.gpu import _native as native
from vkmoe.gpu.device import Device


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """The test must leave as many Vulkan objects as it found, on a device that stays open."""
    before = live_objects_but_fences()
    yield
    native.clear_injections()
    assert live_objects_but_fences() == before


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    """The device, with what it keeps from its first submits made already."""
    with Device(os.environ.get("VKMOE_DEVICE")) as opened:
        for queue in ("compute", "upload"):
            n_timestamps = 2 * opened.native.has_timestamps(queue)  # as uploads have them
            recorder = opened.native.recorder(n_timestamps, queue)
            for index in range(n_timestamps):
                recorder.timestamp(index)
            recording = recorder.finish()
            opened.native.submit(recording, queue=queue).wait()
        del recorder, recording
        yield opened
