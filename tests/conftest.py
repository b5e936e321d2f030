"""How tests are run: their order, Ctrl-C, no tuning of the user's, devices that they share."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from tests.needs import missing, need_cpu
from vkmoe.devices import open_device
from vkmoe.gpu.device import Device
from vkmoe.placement import remembered

os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks a real hub


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "K/N: of the tests marked full those alone that are in the K-th of N shares, from 0"
    parser.addoption("--share", default="0/1", help=words)


@pytest.hookimpl(tryfirst=True)  # before cases are left out by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_to_ci(items)
    left_out = take_share(items, *map(int, config.getoption("share").split("/")))
    config.hook.pytest_deselected(items=left_out)
    put_in_order(items)


def leave_to_ci(items: list[pytest.Item]) -> None:
    """Of a test marked `sample(n)` only n cases run each time, by a hash of their names, so that
    the choice has no pattern and a new case changes it by one at most."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("full"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        (n_cases,) = cases[0].get_closest_marker("sample").args  # type: ignore[union-attr]
        for case in sorted(cases, key=lambda item: crc32(item.nodeid.encode()))[n_cases:]:
            case.add_marker(pytest.mark.full)


def take_share(items: list[pytest.Item], index: int, n_shares: int) -> list[pytest.Item]:
    """Keep the tests that are not marked full, and a share of the others, by a hash of their names.

    Returns those that are left out. Days take turns, as all sweeps together take too long.
    """
    left_out = [
        item
        for item in items
        if item.get_closest_marker("full")
        and crc32(item.nodeid.encode()) % n_shares != index % n_shares
    ]
    others = set(map(id, left_out))
    items[:] = [item for item in items if id(item) not in others]
    return left_out


def put_in_order(items: list[pytest.Item]) -> None:
    """The native tests demand that no Vulkan object is alive in the process when they begin, so
    they come before every test that keeps a device or a model open for others. Then the files that
    take longest, or one of two processes would end with them alone."""
    first = ("tests/native/", "tests/swiftshader/", "tests/gpu_drivers/", "tests/selftest/")
    items.sort(key=lambda item: [not item.nodeid.startswith(folder) for folder in first])


def pytest_collection_finish() -> None:
    """Many tests collect garbage to find what is left over. They need not look at thousands of
    tests and all modules each time."""
    gc.collect()
    gc.freeze()


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


@pytest.fixture(autouse=True, scope="session")
def no_canary() -> Iterator[None]:
    """Kernels have tests of their own; comparing them before each engine takes long in all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vkmoe.engine.passing", lambda device, model, tuning, decide: decide(tuning))
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder `shared` beside the checkout; it must be there in CI."""
    for parent in Path(__file__).resolve().parents:
        if (parent / "shared" / "vocab").is_dir():
            return parent / "shared"
    missing("no folder shared/ beside the checkout")


@pytest.fixture(scope="session")
def cpu_native() -> None:
    """Kernels for the CPU."""
    need_cpu()


Lend = Callable[..., AbstractContextManager[Device]]


@pytest.fixture(scope="session")
def lend_device() -> Iterator[Lend]:
    """Open each kind of device once for the process, and keep its pipelines, which take longer to
    make than all else that a tiny model needs."""
    devices: dict[tuple[Any, ...], Device] = {}
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:

        def lend(
            wanted: str | None = None, validation: bool = False, n_threads: int | None = None
        ) -> AbstractContextManager[Device]:
            name = wanted or os.environ["VKMOE_DEVICE"]
            key = (name, validation, n_threads if name == "cpu" else None)
            if key not in devices:
                opening = open_device(name, validation, n_threads)
                devices[key] = device = stack.enter_context(opening)
                patch.setattr(device, "finish", device.native.wait_idle)
            return nullcontext(devices[key])

        yield lend


@pytest.fixture(scope="module")
def one_device(lend_device: Lend) -> Iterator[None]:
    """All engines of the file have a lent device: not for tests of how devices are closed."""
    with pytest.MonkeyPatch.context() as patch:
        lend_device()  # here, so that a test does not find it left
        patch.setattr("vkmoe.engine.open_device", lend_device)
        yield


@pytest.fixture
def own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines of this test open devices of their own in a file that has `one_device`."""
    monkeypatch.setattr("vkmoe.engine.open_device", open_device)
