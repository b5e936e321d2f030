"""Run programs on the lavapipe of Debian testing, which multiplies matrices as GPUs do.

It executes VK_KHR_cooperative_matrix on the CPU, which the lavapipe of this machine may be too old
for. `fetch` takes it and all that it needs from Debian's archive, down to the C library, into a
folder of the user's cache, about 320 MB: nothing is installed, and it needs no root. `run` starts a
program of this machine on that C library. Processes that the program starts run without it.

    python -m tools.lavapipe fetch
    python -m tools.lavapipe run .venv/bin/vkmoe devices
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.debian import ArchiveError, fetch
from tools.gpu_drivers import CANNOT, LIBRARIES, started, whole, words_of

SUITE = "testing"
PACKAGES = ("mesa-vulkan-drivers", "libvulkan1")
LIBRARY, ICD = "libvulkan_lvp.so", "lavapipe.json"


def folder() -> Path:
    """Return where the driver is kept: a folder of the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "vkmoe" / f"lavapipe-{SUITE}"


def is_complete(into: Path) -> bool:
    """Say whether `fetch_driver` filled this folder, and it has not been moved since."""
    if not (into / ICD).is_file():
        return False
    icd = json.loads((into / ICD).read_text(encoding="utf-8"))
    return Path(icd["ICD"]["library_path"]) == into / LIBRARIES / LIBRARY


def fetch_driver(into: Path) -> None:
    """Fill `into` anew. Raises ArchiveError, OSError, CalledProcessError."""
    with whole(into) as partial:
        fetch(SUITE, PACKAGES, partial)
        found = next(partial.glob("usr/share/vulkan/icd.d/lvp_icd*.json"))
        icd = json.loads(found.read_text(encoding="utf-8"))
        icd["ICD"]["library_path"] = str(into / LIBRARIES / LIBRARY)
        (partial / ICD).write_text(json.dumps(icd) + "\n", encoding="utf-8")


def command(root: Path, program: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the environment that run `program` on the driver alone.

    Raises FileNotFoundError where there is no such program.
    """
    icd = str(root / ICD)
    environment = os.environ | {"VK_DRIVER_FILES": icd, "VK_ICD_FILENAMES": icd}
    environment.setdefault("VK_LOADER_LAYERS_DISABLE", "~implicit~")
    first, *rest = words_of(program)
    return [*started(root, first), *rest], environment


def main(arguments: Sequence[str]) -> int:
    """Run `fetch`, or `run COMMAND...`; returns the exit code."""
    into = folder()
    if arguments[:1] == ["fetch"]:
        try:
            if not is_complete(into):
                fetch_driver(into)
        except (ArchiveError, OSError, subprocess.CalledProcessError) as reason:
            print(f"no lavapipe: {reason}", file=sys.stderr)
            return CANNOT
        print(into)
        return 0
    if arguments[:1] != ["run"] or len(arguments) < 2:
        print("usage: python -m tools.lavapipe fetch, or run COMMAND...", file=sys.stderr)
        return 2
    if not is_complete(into):
        print("no lavapipe here: python -m tools.lavapipe fetch gets it", file=sys.stderr)
        return CANNOT
    try:
        words, environment = command(into, arguments[1:])
    except FileNotFoundError as missing:
        print(f"no program {missing}", file=sys.stderr)
        return 127
    return subprocess.run(words, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
