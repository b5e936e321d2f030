#!/usr/bin/env python3
"""Gets Debian's Chromium for the tests of the page, without root, and prints the program to run.

Owns the folder `.venv/chromium`: the unpacked packages (about 800 MB), a fontconfig of its own, and
`run`, which starts the browser with them. The C library is the machine's own.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tools.debian import ArchiveError, fetch

FOLDER = Path(__file__).resolve().parent.parent / ".venv" / "chromium"
SUITE = "bookworm"
PACKAGES = ("chromium", "fonts-dejavu-core", "fonts-noto-core")
# Those of the machine's loader: another version beside it cannot work.
_C_LIBRARY = ("libc.so.*", "libm.so.*", "libpthread.so.*", "libdl.so.*", "librt.so.*", "ld-linux*")

_RUN = """#!/bin/sh
root=$(dirname "$(readlink -f "$0")")
LD_LIBRARY_PATH=$(echo "$root"/usr/lib/*-linux-gnu):$(echo "$root"/lib/*-linux-gnu)
FONTCONFIG_FILE=$root/fonts.conf
export LD_LIBRARY_PATH FONTCONFIG_FILE
exec "$root/usr/lib/chromium/chromium" "$@"
"""
_FONTS = """<?xml version="1.0"?>
<fontconfig>
  <dir>{root}/usr/share/fonts</dir>
  <include ignore_missing="yes">{root}/etc/fonts/conf.d</include>
  <cachedir>{root}/font-cache</cachedir>
</fontconfig>
"""


def fetch_chromium(folder: Path = FOLDER) -> Path:
    """Return the program that runs the browser, got if it is not there. Raises ArchiveError."""
    program = folder / "run"
    if program.exists():
        return program
    shutil.rmtree(folder, ignore_errors=True)
    fetch(SUITE, PACKAGES, folder)
    for pattern in _C_LIBRARY:
        for file in [*folder.glob(f"lib/*/{pattern}"), *folder.glob(f"usr/lib/*/{pattern}")]:
            file.unlink()
    (folder / "fonts.conf").write_text(_FONTS.format(root=folder))
    program.write_text(_RUN)  # last: it says that all of it is there
    program.chmod(0o755)
    return program


def chromium() -> str | None:
    """Return the program of this machine's browser, or of the one that was unpacked here."""
    unpacked = FOLDER / "run"
    return shutil.which("chromium") or (str(unpacked) if unpacked.exists() else None)


def main() -> int:
    """Run the program; its exit code is 0, or 1 with the reason on stderr."""
    try:
        print(fetch_chromium())
    except ArchiveError as reason:
        print(f"fetch_chromium: {reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
