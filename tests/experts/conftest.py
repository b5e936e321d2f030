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
            recording = opened.native.recorder(queue=queue).finish()
            opened.native.submit(recording, queue=queue).wait()
        del recording
        yield opened
