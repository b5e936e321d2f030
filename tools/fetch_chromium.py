#!/usr/bin/env python3
"""Gets Debian's Chromium for the tests of the page, without root, and prints the program to run.

Owns the folder `.venv/chromium`: the unpacked packages (about 860 MB), a fontconfig of its own, and
`run`, which starts the browser with them. The C library is the machine's own. Exit codes: 0, 77
where the packages cannot be had, 1 where the browser that they hold does not start.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.debian import ArchiveError, fetch

FOLDER = Path(__file__).resolve().parent.parent / ".venv" / "chromium"
SUITE = "bookworm"
PACKAGES = ("chromium", "fonts-dejavu-core", "fonts-noto-core")
# Those of the machine's loader: another version beside it cannot work.
_C_LIBRARY = ("libc.so.*", "libm.so.*", "libpthread.so.*", "libdl.so.*", "librt.so.*", "ld-linux*")

CANNOT = 77  # exit code: the packages cannot be had here; tools/test knows it as "skipped"

_BROWSER = "usr/lib/chromium/chromium"
_RUN = """#!/bin/sh
root=$(dirname "$(readlink -f "$0")")
LD_LIBRARY_PATH={libraries}
FONTCONFIG_FILE=$root/fonts.conf
export LD_LIBRARY_PATH FONTCONFIG_FILE
exec "$root/{browser}" "$@"
"""
_PAGE = "<p>it starts</p>"
_FONTS = """<?xml version="1.0"?>
<fontconfig>
  <dir>{root}/usr/share/fonts</dir>
  <include ignore_missing="yes">{root}/etc/fonts/conf.d</include>
  <cachedir>{root}/font-cache</cachedir>
</fontconfig>
"""


class BrowserError(Exception):
    """Why the browser of the unpacked packages does not start, in one line for the user."""


def fetch_chromium(folder: Path = FOLDER) -> Path:
    """Return the program that runs the browser, got if it is not there or does not start.

    Raises ArchiveError where the packages cannot be had, BrowserError where they are not enough.
    """
    program = folder / "run"
    if program.exists():
        try:
            start(program)
            return program
        except BrowserError:
            pass  # an older checkout wrote it, or the machine has changed
    shutil.rmtree(folder, ignore_errors=True)
    fetch(SUITE, PACKAGES, folder)
    return make_program(folder)


def make_program(folder: Path) -> Path:
    """Write the program that runs the browser of unpacked packages. Raises BrowserError."""
    for pattern in _C_LIBRARY:
        for file in [*folder.glob(f"lib/*/{pattern}"), *folder.glob(f"usr/lib/*/{pattern}")]:
            file.unlink()
    libraries = library_folders(folder)
    if missing := missing_libraries(folder / _BROWSER, libraries):
        raise BrowserError(f"no package below {folder} has {', '.join(missing)}")
    (folder / "fonts.conf").write_text(_FONTS.format(root=folder))
    below = ":".join(f"$root/{each.relative_to(folder)}" for each in libraries)
    program = folder / "run"
    program.write_text(_RUN.format(libraries=below, browser=_BROWSER))
    program.chmod(0o755)
    try:
        start(program)
    except BrowserError:
        program.unlink()  # its presence says that all of it is there
        raise
    return program


def library_folders(folder: Path) -> list[Path]:
    """List every folder below `lib` and `usr/lib` that holds shared objects, the highest first."""
    found = {
        file.parent
        for top in ("lib", "usr/lib")
        for pattern in ("*.so", "*.so.*")
        for file in (folder / top).rglob(pattern)
    }
    return sorted(found, key=lambda each: (len(each.parts), each))


def missing_libraries(program: Path, libraries: list[Path]) -> list[str]:
    """List what the loader does not find for a program. Raises BrowserError with ldd's words."""
    environment = os.environ | {"LD_LIBRARY_PATH": ":".join(map(str, libraries)), "LC_ALL": "C"}
    done = subprocess.run(["ldd", program], env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise BrowserError(f"ldd cannot read {program}: {_last_line(done.stderr)}")
    return sorted({line.split()[0] for line in done.stdout.splitlines() if "not found" in line})


def start(program: Path) -> None:
    """Have the browser show a page, without a window. Raises BrowserError with its last words."""
    with tempfile.TemporaryDirectory(prefix="vkmoe-chromium-") as profile:
        # Containers have neither the sandbox's namespaces nor a large /dev/shm.
        command = [str(program), "--headless", "--no-sandbox", "--disable-dev-shm-usage",
                   "--disable-gpu", f"--user-data-dir={profile}", "--dump-dom",
                   f"data:text/html,{_PAGE}"]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BrowserError(f"{program} does not start: {error}") from error
    if _PAGE not in done.stdout:
        raise BrowserError(f"{program} does not start: {_last_line(done.stderr)}")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


def chromium() -> str | None:
    """Return the program of the browser that was unpacked here, or else of this machine's own."""
    unpacked = FOLDER / "run"
    return str(unpacked) if unpacked.exists() else shutil.which("chromium")


def main() -> int:
    """Run the program; its exit code is 0, or another with the reason on stderr."""
    try:
        print(fetch_chromium())
    except (ArchiveError, BrowserError) as reason:
        print(f"fetch_chromium: {reason}", file=sys.stderr)
        return CANNOT if isinstance(reason, ArchiveError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
