"""An open device for the tests of the cache."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.engine.conftest import nothing_left
from vkmoe.gpu.device import Device

__all__ = ["nothing_left"]


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
