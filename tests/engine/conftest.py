"""Tunings, the shared folder, the demo model loaded once per file, and a check for leaks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.generate.conftest import shared
from tests.live import live_objects
from tests.ops.tunings import ODD_LAUNCHES
from vkmoe.devices import open_device
from vkmoe.gpu import _native as native
from vkmoe.gpu.device import Device
from vkmoe.gpu.transfer import Transfer
from vkmoe.llm import LLM
from vkmoe.ops.tuning import Tuning

__all__ = ["shared"]

# The mapping of this driver (None), and the one of real GPUs without and with subgroups; there
# every class of kernels is launched in a way of its own.
TUNINGS = {
    "default": None,
    "lanes": Tuning("lanes", 64, 4, False),
    "lanes+subgroup": Tuning("lanes", 64, 4, True, launches=ODD_LAUNCHES),
}


@pytest.fixture(params=TUNINGS)
def tuning(request: pytest.FixtureRequest) -> Tuning | None:
    return TUNINGS[request.param]


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    """The demo model, loaded once for the tests of a file that leave it as it was."""
    with LLM() as llm:
        yield llm


@pytest.fixture(scope="module")
def one_device() -> Iterator[None]:
    """All engines of a file have one device, opened when first asked for: it keeps pipelines, which
    take longer to make than all else that a tiny model needs. Not for tests of what is left."""
    devices: dict[tuple[Any, ...], Device] = {}
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:

        def lent(*asked: Any) -> AbstractContextManager[Device]:
            if asked not in devices:
                devices[asked] = device = stack.enter_context(open_device(*asked))
                patch.setattr(device, "finish", device.native.wait_idle)
            return nullcontext(devices[asked])

        patch.setattr("vkmoe.engine.open_device", lent)
        yield


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """The test must leave as many Vulkan objects as it found."""
    native.clear_injections()
    before = live_objects()
    yield
    native.clear_injections()
    gc.collect()
    assert native.live_objects() == before


@pytest.fixture
def everything_staged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """No memory counts as mapped, and staging is small; lists the bytes of each write."""
    sent: list[int] = []
    write = Transfer.write

    def counted(self: Transfer, target: Any, offset: int, data: NDArray[np.uint8]) -> None:
        sent.append(data.size)
        write(self, target, offset, data)

    monkeypatch.setattr(native.Buffer, "mapped", property(lambda buffer: False))
    monkeypatch.setattr(Transfer, "write", counted)
    small = partial(Transfer, staging_bytes=4096)
    monkeypatch.setattr("vkmoe.weights.placer.Transfer", small)
    return sent
