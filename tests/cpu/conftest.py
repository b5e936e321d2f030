"""What tests of the CPU device need: that it was built."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.needs import missing


@pytest.fixture
def native() -> ModuleType:
    """The extension, which a build with -DVKMOE_CPU=OFF leaves out."""
    try:
        from vkmoe.cpu import _native
    except ImportError:
        missing("vkmoe was built without the CPU device")
    return _native
