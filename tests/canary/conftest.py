"""A folder of SPIR-V modules that may have faults, and engines that compare their kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.canary.faults import Fault
from vkmoe.canary.check import passing
from vkmoe.gpu import device as gpu
from vkmoe.gpu.device import spirv_words
from vkmoe.placement import remembered


class Modules:
    """A folder of SPIR-V modules, in which some may have a fault for a while."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._sound = folder, gpu.spirv_folder()
        for path in self._sound.glob("*.spv"):
            (folder / path.name).symlink_to(path)

    @contextmanager
    def planted(self, variant: str, fault: Fault) -> Iterator[None]:
        path, sound = self._folder / f"{variant}.spv", self._sound / f"{variant}.spv"
        path.unlink()
        path.write_bytes(fault.planted(sound.read_bytes()))
        spirv_words.cache_clear()
        try:
            yield
        finally:
            path.unlink()
            path.symlink_to(sound)
            spirv_words.cache_clear()


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Modules]:
    folder = tmp_path / "spirv"
    folder.mkdir()
    found = Modules(folder)
    monkeypatch.setattr(gpu, "spirv_folder", lambda: folder)
    yield found
    spirv_words.cache_clear()


@pytest.fixture
def canary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines compare kernels, as they do outside of tests."""
    monkeypatch.setattr("vkmoe.engine.passing", passing)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of what has passed, which is not there at first."""
    monkeypatch.setattr(
        remembered, "remembered_path", lambda device, what="tuning": tmp_path / f"{what}.json"
    )
    return tmp_path / "canary.json"
