"""One open device for all kernel tests: the one vkmoe chooses, or the one VKMOE_DEVICE names."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from vkmoe.gpu.device import Device
from vkmoe.gpu.runner import Runner


@pytest.fixture(scope="session")
def device() -> Iterator[Device]:
    with Device(os.environ.get("VKMOE_DEVICE")) as opened:
        yield opened


@pytest.fixture
def runner(device: Device) -> Iterator[Runner]:
    with Runner(device) as made:
        yield made
