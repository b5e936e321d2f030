"""What tests of the CPU device need: that it was built."""

from __future__ import annotations

from types import ModuleType

import pytest

from vkmoe.cpu import variants


@pytest.fixture
def native(cpu_native: None) -> ModuleType:
    """The extension in the variant that was chosen."""
    return variants.native()


def _able() -> list[str | None]:
    built = variants.built()
    able = variants.runnable(built, variants.features()) if built else []
    return [*able] or [None]


@pytest.fixture(params=_able())
def each_variant(cpu_native: None, request: pytest.FixtureRequest) -> ModuleType:
    """The extension in each variant that this processor runs; a source install has one."""
    return variants.native(request.param)
