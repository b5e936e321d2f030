"""tools/with_gpu_driver where its drivers are not there, or what is asked for is not; and how
tools/fetch_gpu_drivers puts them there.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tools import gpu_drivers
from tools.gpu_drivers import GPUS, LIBRARIES, PACKAGES, fetch_drivers, is_complete

SCRIPT = Path(__file__).resolve().parent.parent.parent / "tools" / "with_gpu_driver"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("navi31", "true"), 77, "tools/fetch_gpu_drivers gets them"),
        (("navi99", "true"), 2, ", ".join(GPUS)),
        (("navi31",), 2, "usage: tools/with_gpu_driver GPU COMMAND..."),
    ],
)
def test_what_is_missing_is_said(
    arguments: tuple[str, ...], code: int, words: str, tmp_path: Path
) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([SCRIPT, *arguments], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, "") and words in done.stderr


@pytest.fixture
def archive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's archive has one driver, of which the ICD file names a library."""

    def fetch(suite: str, packages: tuple[str, ...], into: Path) -> None:
        icds = into / "usr/share/vulkan/icd.d"
        for folder in (icds, into / LIBRARIES):
            folder.mkdir(parents=True)
        icd = {"ICD": {"library_path": "/usr/lib/libvulkan_radeon.so"}}
        (icds / "radeon_icd.x86_64.json").write_text(json.dumps(icd))

    monkeypatch.setattr(gpu_drivers, "fetch", fetch)


def broken(suite: str, packages: tuple[str, ...], into: Path) -> None:
    """An archive that ends after the first file."""
    into.mkdir()
    (into / "half").touch()
    raise subprocess.CalledProcessError(2, ["dpkg-deb", "-x"])


@pytest.mark.usefixtures("archive")
def test_drivers_are_named_where_they_come_to_lie(tmp_path: Path) -> None:
    into = tmp_path / "cache" / "drivers"
    fetch_drivers(into)
    assert is_complete(into) and list(into.parent.iterdir()) == [into]
    icd = json.loads((into / "radeon.json").read_text())
    assert icd["ICD"]["library_path"] == str(into / LIBRARIES / "libvulkan_radeon.so")
    assert (into / LIBRARIES / "libintel_noop_drm_shim.so").is_file()


@pytest.mark.usefixtures("archive")
def test_drivers_of_other_packages_or_another_shim_are_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    into, shim = tmp_path / "drivers", tmp_path / "libintel_noop_drm_shim.so"
    shim.write_bytes(b"another")
    fetch_drivers(into)
    for name, other in (("PACKAGES", (*PACKAGES, "more")), ("INTEL_SHIM", shim)):
        monkeypatch.setattr(gpu_drivers, name, other)
        assert not is_complete(into)
        fetch_drivers(into)
        assert is_complete(into)


@pytest.mark.usefixtures("archive")
def test_a_fetch_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    into = gpu_drivers.folder()
    fetch_drivers(into)
    monkeypatch.setattr(gpu_drivers, "PACKAGES", ("other",))
    monkeypatch.setattr(gpu_drivers, "fetch", broken)
    assert gpu_drivers.main(["fetch"]) == 77
    assert capsys.readouterr().err.startswith("no GPU drivers: Command '['dpkg-deb'")
    assert (into / "radeon.json").is_file() and list(into.parent.iterdir()) == [into]


def test_a_compiler_of_which_half_was_fetched_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tools import llama_cpp_shaders

    monkeypatch.setattr(llama_cpp_shaders, "fetch", broken)
    with pytest.raises(subprocess.CalledProcessError):
        llama_cpp_shaders.fetch_glslc(tmp_path / "glslc")
    assert not list(tmp_path.iterdir())
