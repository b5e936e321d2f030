"""tools/fetch_chromium.py on packages made for the test; tests/server/page has the real browser."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tools import fetch_chromium
from tools.fetch_chromium import BrowserError, chromium, library_folders, make_program

# Prints its last argument, the page that it is to show, as a browser with --dump-dom does.
BROWSER = """
#include <cstdio>
extern "C" int sound();
int main(int count, char** arguments) { return std::puts(arguments[count - 1]) < sound(); }
"""


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Unpacked packages whose browser needs a library that lies in a folder of its own."""
    folder = tmp_path / "chromium"
    library = folder / "usr" / "lib" / "x86_64-linux-gnu" / "pulseaudio" / "libsound-1.so"
    browser = folder / "usr" / "lib" / "chromium" / "chromium"
    library.parent.mkdir(parents=True)
    browser.parent.mkdir(parents=True)
    build(library, 'extern "C" int sound() { return 0; }', "-shared", "-fPIC")
    build(browser, BROWSER, str(library.parent / "libsound-1.so"))
    return folder


def build(into: Path, source: str, *options: str) -> None:
    """The name that a program has for a library is the library's, not its path."""
    name = f"-Wl,-soname,{into.name}"
    subprocess.run(
        ["g++", "-x", "c++", "-", "-x", "none", *options, name, "-o", into],
        input=source, text=True, check=True,
    )  # fmt: skip


def test_the_browser_starts_wherever_its_packages_have_libraries(packages: Path) -> None:
    (packages / "usr" / "lib" / "no_libraries").mkdir()
    libraries = packages / "usr" / "lib" / "x86_64-linux-gnu" / "pulseaudio"
    assert library_folders(packages) == [libraries]
    program = make_program(packages)
    started = subprocess.run([program, "works"], capture_output=True, text=True)
    assert (started.returncode, started.stdout, started.stderr) == (0, "works\n", "")


def test_a_library_that_no_package_has_is_named(packages: Path) -> None:
    next(packages.rglob("libsound-1.so")).unlink()
    with pytest.raises(BrowserError, match=r"no package below .*chromium has libsound-1\.so$"):
        make_program(packages)
    assert not (packages / "run").exists()


def test_a_browser_that_ends_is_none(packages: Path) -> None:
    """All libraries are there, and it still shows no page."""
    build(
        packages / "usr" / "lib" / "chromium" / "chromium",
        '#include <cstdio>\nint main() { std::fputs("no display\\n", stderr); return 1; }',
    )
    with pytest.raises(BrowserError, match=r"does not start: no display$"):
        make_program(packages)
    assert not (packages / "run").exists()


def test_the_fetched_browser_comes_before_the_machines_own(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What CI runs is what a newcomer gets."""
    own = tmp_path / "bin" / "chromium"
    own.parent.mkdir()
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setenv("PATH", f"{own.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(fetch_chromium, "FOLDER", packages)
    assert chromium() == str(own)
    assert str(make_program(packages)) == chromium()
