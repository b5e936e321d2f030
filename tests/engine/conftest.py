"""Tunings, the demo model loaded once per file, and a check for leaks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernels.tunings import ODD_LAUNCHES
from tests.live import live_objects
from tests.samples import sampled
from vkmoe.gpu import _native as native
from vkmoe.gpu.transfer import Transfer
from vkmoe.kernels.tuning import Tuning
from vkmoe.llm import LLM

# The mapping of this driver (None), and the one of real GPUs without and with subgroups; there
# every class of kernels is launched in a way of its own.
TUNINGS = {
    "default": None,
    "lanes": Tuning("lanes", 64, 4, False),
    "lanes+subgroup": Tuning("lanes", 64, 4, True, launches=ODD_LAUNCHES),
}


# The mapping of GPUs without subgroups has the kernels of the one with them, but for their sums.
@pytest.fixture(params=sampled(TUNINGS, "lanes".__ne__), ids=str)
def tuning(request: pytest.FixtureRequest) -> Tuning | None:
    return TUNINGS[request.param]


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    """The demo model, loaded once for the tests of a file that leave it as it was."""
    with LLM() as llm:
        yield llm


@pytest.fixture
def nothing_left(own_device: None) -> Iterator[None]:
    """The test must leave as many Vulkan objects as it found. A lent device keeps some."""
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
