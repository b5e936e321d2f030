"""How tests are run: their order, Ctrl-C, no tuning of the user's, and what a build may lack."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.needs import need_cpu
from vkmoe import remembered


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The native tests demand that no Vulkan object is alive in the process when they begin, so
    they come before every test that keeps a device or a model open for others. Then the files that
    take longest, or one of two processes would end with them alone."""
    first = ("tests/native/", "tests/swiftshader/", "tests/gpu_drivers/", "tests/selftest/")
    items.sort(key=lambda item: [not item.nodeid.startswith(folder) for folder in first])


def pytest_configure() -> None:
    """Ctrl-C is tested; a shell that starts a job in the background makes it ignored.

    Shaders are what most tests are about: they run on lavapipe where there is no GPU, though vkmoe
    itself would choose the CPU there.
    """
    os.environ.setdefault("VKMOE_DEVICE", "vulkan")
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def nothing_remembered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What `vkmoe tune` found for the user has no say in what tests compare."""
    folder = tmp_path_factory.mktemp("tuning")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            remembered, "remembered_path", lambda device, what="tuning": folder / f"{what}.json"
        )
        yield


@pytest.fixture(scope="session")
def cpu_native() -> None:
    """Kernels for the CPU."""
    need_cpu()
