"""One device for all engines of a file, as tests/engine has it."""

from tests.engine.conftest import one_device

__all__ = ["one_device"]
