"""tools/setup: nothing to do the second time, and clear words when it cannot install packages."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout that was never set up, with nothing in it but the script."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "setup", tmp_path / "tools")
    return tmp_path


@pytest.fixture
def poor_path(tmp_path: Path) -> Path:
    """A PATH of an ordinary user without sudo, cmake and vulkaninfo."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for program in Path("/usr/bin").iterdir():
        if program.name not in ("sudo", "id", "cmake", "vulkaninfo"):
            (folder / program.name).symlink_to(program)
    (folder / "id").write_text("#!/bin/sh\necho 1000\n")
    (folder / "id").chmod(0o755)
    return folder


def test_second_run_does_nothing() -> None:
    """A checkout that is set up stays silent and costs a fraction of a second."""
    subprocess.run([ROOT / "tools" / "setup"], check=True, capture_output=True)
    start = time.monotonic()
    again = subprocess.run([ROOT / "tools" / "setup"], check=True, capture_output=True, text=True)
    assert time.monotonic() - start < 1
    assert again.stdout + again.stderr == ""


def test_missing_packages_are_named_for_three_package_managers(
    checkout: Path, poor_path: Path
) -> None:
    """One message, exit code 1, and no environment half made."""
    done = subprocess.run(
        [checkout / "tools" / "setup"],
        env={"PATH": str(poor_path), "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "sudo apt-get install cmake vulkan-tools\n" in done.stderr
    assert "sudo dnf install cmake vulkan-tools\n" in done.stderr
    assert "sudo pacman -S cmake vulkan-tools\n" in done.stderr
    assert not (checkout / ".venv" / "bin").exists()


@pytest.mark.full
def test_a_failing_build_shows_the_end_of_its_log(checkout: Path) -> None:
    """The checkout has no pyproject.toml, so the build must fail, say where, and leave no stamp."""
    done = subprocess.run([checkout / "tools" / "setup"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "failed. The end of" in done.stderr
    assert "pyproject.toml" in done.stderr
    assert not (checkout / ".venv" / "stamp.build").exists()
