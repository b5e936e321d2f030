"""An open device for the tests of the GPU layer: the one vkmoe chooses, or VKMOE_DEVICE's."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from vkmoe.gpu.device import Device


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with Device(os.environ.get("VKMOE_DEVICE")) as opened:
        yield opened
