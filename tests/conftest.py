"""How the tests are run: their order, and Ctrl-C."""

from __future__ import annotations

import signal

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The native tests demand that no Vulkan object is alive in the process when they begin, so
    they come before every test that keeps a device or a model open for others. Then the file that
    takes longest, or one of two processes would end with it alone."""
    first = ("tests/native/", "tests/swiftshader/")
    items.sort(key=lambda item: [not item.nodeid.startswith(folder) for folder in first])


def pytest_configure() -> None:
    """Ctrl-C is tested; a shell that starts a job in the background makes it ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
