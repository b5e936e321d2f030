"""The demo model on the CPU, whose kernels need no compiling."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vkmoe.cpu.variants import has_cpu


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if has_cpu():
            patch.setenv("VKMOE_DEVICE", "cpu")
        yield
