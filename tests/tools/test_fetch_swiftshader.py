"""tools/fetch_swiftshader.py with packages and an apt-get made for the test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tools.fetch_swiftshader import ICD, LIBRARY, extract, is_complete

SCRIPT = Path(__file__).resolve().parent.parent.parent / "tools" / "fetch_swiftshader.py"
CONTROL = "Package: chromium-common\nVersion: 7\nArchitecture: all\nMaintainer: m\nDescription: x\n"


def make_package(folder: Path, *names: str) -> Path:
    """A Debian package with these files where chromium has them."""
    content = folder / "content"
    (content / "DEBIAN").mkdir(parents=True)
    (content / "DEBIAN" / "control").write_text(CONTROL)
    chromium = content / "usr" / "lib" / "chromium"
    chromium.mkdir(parents=True)
    (chromium / "other").write_text("not wanted")
    for name in names:
        icd = {"file_format_version": "1.0.0", "ICD": {"library_path": f"./{LIBRARY}"}}
        (chromium / name).write_text(json.dumps(icd) if name == ICD else "library")
    package = folder / "chromium-common_7_all.deb"
    subprocess.run(["dpkg-deb", "-b", content, package], check=True, capture_output=True)
    return package


def fetch(folder: Path, apt_get: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script with a shell script in the place of apt-get."""
    programs = folder / "programs"
    programs.mkdir()
    (programs / "apt-get").write_text(f"#!/bin/sh\n{apt_get}\n")
    (programs / "apt-get").chmod(0o755)
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    command = [sys.executable, str(SCRIPT), "--into", str(folder / "into"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_fetched_once_and_complete(tmp_path: Path) -> None:
    """The ICD file names the library by its absolute path; a second run needs no apt."""
    package = make_package(tmp_path, LIBRARY, ICD)
    done = fetch(tmp_path, f'[ "$1" = download ] && cp {package} .')
    assert done.returncode == 0, done.stderr
    into = tmp_path / "into"
    assert done.stdout == f"{into / ICD}\n"
    icd = json.loads((into / ICD).read_text())
    assert icd["ICD"]["library_path"] == str(into / LIBRARY)
    assert (into / LIBRARY).read_text() == "library"
    assert (into / "version").read_text() == "chromium-common_7_all\n"
    assert not list(tmp_path.glob("swiftshader-*")), "scratch folder left behind"
    again = subprocess.run(
        [sys.executable, SCRIPT, "--into", into], env={"PATH": "/nowhere"}, capture_output=True
    )
    assert again.returncode == 0


def test_a_moved_folder_is_not_complete(tmp_path: Path) -> None:
    """The ICD file of a moved checkout points to where the library was."""
    (tmp_path / "elsewhere").mkdir()
    for name, text in ((LIBRARY, ""), ("version", "7"), (ICD, '{"ICD": {"library_path": "/old"}}')):
        (tmp_path / "elsewhere" / name).write_text(text)
    assert not is_complete(tmp_path / "elsewhere")


def test_a_package_without_the_driver_is_not_enough(tmp_path: Path) -> None:
    """Ubuntu's chromium package, for one, only leads to a snap."""
    assert not extract(make_package(tmp_path, ICD), tmp_path)


def test_no_package_is_one_clear_line(tmp_path: Path) -> None:
    """The message says which packages were looked for, and nothing half made is left."""
    done = fetch(tmp_path, "exit 100")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "chromium-common" in done.stderr and "Ubuntu" in done.stderr
    assert not (tmp_path / "into").exists()


def test_another_system_is_told_what_is_needed(tmp_path: Path) -> None:
    """Without apt there is no traceback."""
    done = subprocess.run(
        [sys.executable, SCRIPT, "--into", tmp_path / "into"],
        env={"PATH": "/nowhere"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "apt-get" in done.stderr and "Traceback" not in done.stderr
