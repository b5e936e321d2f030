"""Run programs on the drivers of GPUs that this machine does not have.

Mesa's drm-shim answers a driver's kernel calls itself. RADV (AMD), NVK (NVIDIA) and ANV (Intel)
then run with their real compilers, memory types, queues and limits; submits are accepted and
compute nothing. `fetch` takes Mesa and all that it needs from Debian's archive, down to the C
library, into a folder of the user's cache: nothing is installed, and it needs no root. `command`
starts a program of this machine on that C library, which is newer than this machine's. Processes
that the program starts run without the driver.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tools.debian import ArchiveError, fetch

SUITE = "trixie"
PACKAGES = ("mesa-vulkan-drivers", "mesa-drm-shim", "libvulkan1", "vulkan-validationlayers")
# Debian's mesa-drm-shim lacks it; drm_shim/build makes it from the same source.
INTEL_SHIM = Path(__file__).with_name("drm_shim") / "libintel_noop_drm_shim.so"
LIBRARIES = Path("usr/lib/x86_64-linux-gnu")
LOADER = "ld-linux-x86-64.so.2"
STAMP = "complete"  # a file that says what was put into the folder
CANNOT = 77  # exit code: the packages cannot be had here; test runners know it as "skipped"


class Gpu(NamedTuple):
    """Names the driver of a GPU, the shim below it, and the variables that choose the GPU."""

    driver: str  # of the ICD file
    shim: str
    variables: Mapping[str, str]


def _amd(name: str) -> Gpu:
    return Gpu("radeon", "amdgpu", {"AMDGPU_GPU_ID": name})


def _nvidia(chipset: str) -> Gpu:
    variables = {"NVK_I_WANT_A_BROKEN_VULKAN_DRIVER": "1", "NOUVEAU_CHIPSET": chipset}
    return Gpu("nouveau", "nouveau", variables)


def _intel(platform: str) -> Gpu:
    return Gpu("intel", "intel", {"INTEL_STUB_GPU_PLATFORM": platform})


GPUS: Mapping[str, Gpu] = {
    **{name: _amd(name) for name in ("navi31", "navi21", "vega10", "polaris10", "gfx1150")},
    "nvk-turing": _nvidia("162"),
    "nvk-ampere": _nvidia("172"),
    **{f"anv-{name}": _intel(name) for name in ("dg2", "tgl", "bmg")},
}


def folder() -> Path:
    """Return where the drivers are kept: a folder of the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "vkmoe" / f"gpu-drivers-{SUITE}"


def is_complete(into: Path) -> bool:
    """Say whether `fetch_drivers` made this folder of what it would take today."""
    stamp = into / STAMP
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == _contents()


def _contents() -> str:
    """Return a text that changes with what belongs into the folder."""
    shim = hashlib.sha256(INTEL_SHIM.read_bytes()).hexdigest()
    return f"{SUITE}: {' '.join(PACKAGES)}\n{INTEL_SHIM.name}: {shim}\n"


def fetch_drivers(into: Path) -> None:
    """Fill `into` anew, about 280 MB. Raises ArchiveError, OSError, CalledProcessError."""
    with whole(into) as partial:
        fetch(SUITE, PACKAGES, partial)
        shutil.copy(INTEL_SHIM, partial / LIBRARIES)
        for icd in (partial / "usr/share/vulkan/icd.d").glob("*_icd*.json"):
            content = json.loads(icd.read_text())
            library = Path(content["ICD"]["library_path"]).name
            content["ICD"]["library_path"] = str(into / LIBRARIES / library)
            name = f"{icd.name.partition('_icd')[0]}.json"
            (partial / name).write_text(json.dumps(content) + "\n")
        (partial / STAMP).write_text(_contents(), encoding="utf-8")


@contextmanager
def whole(into: Path) -> Iterator[Path]:
    """Yield a path to make a folder at, which then takes the place of `into`.

    What fails or is broken off leaves `into` as it was.
    """
    into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{into.name}.", dir=into.parent) as scratch:
        new, old = Path(scratch) / "new", Path(scratch) / "old"
        yield new
        if into.exists():
            into.rename(old)
        new.rename(into)


def started(root: Path, program: str | Path, *options: str | Path) -> list[str]:
    """Return how to start a program on the C library that was fetched with it into `root`."""
    libraries = root / LIBRARIES
    words = (libraries / LOADER, "--library-path", libraries, *options, program)
    return [str(word) for word in words]


def command(drivers: Path, gpu: str, program: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the environment that run `program` on the driver of a GPU.

    Raises FileNotFoundError where there is no such program.
    """
    chosen = GPUS[gpu]
    icd = str(drivers / f"{chosen.driver}.json")
    environment = os.environ | dict(chosen.variables)
    environment |= {"VK_DRIVER_FILES": icd, "VK_ICD_FILENAMES": icd}
    environment.setdefault("VK_LOADER_LAYERS_DISABLE", "~implicit~")
    words = words_of(program)
    shim = drivers / LIBRARIES / f"lib{chosen.shim}_noop_drm_shim.so"
    return [*started(drivers, words[0], "--preload", shim), *words[1:]], environment


def words_of(program: Sequence[str]) -> list[str]:
    """Return a command line whose first word is a path of what the loader can start.

    Raises FileNotFoundError where there is no such program.
    """
    found = shutil.which(program[0])
    if found is None:
        raise FileNotFoundError(program[0])
    return [*_interpreter(Path(found)), found, *program[1:]]


def _interpreter(program: Path) -> list[str]:
    """Return what runs a script, which the loader cannot; nothing for a program."""
    with program.open("rb") as file:
        first = file.readline(256)
    return first[2:].decode().split() if first.startswith(b"#!") else []


def main(arguments: Sequence[str]) -> int:
    """Run `fetch`, or `run GPU COMMAND...`; returns the exit code."""
    into = folder()
    if arguments[:1] == ["fetch"]:
        try:
            if not is_complete(into):
                fetch_drivers(into)
        except (ArchiveError, OSError, subprocess.CalledProcessError) as reason:
            print(f"no GPU drivers: {reason}", file=sys.stderr)
            return CANNOT
        print(into)
        return 0
    if arguments[:1] != ["run"] or len(arguments) < 3 or arguments[1] not in GPUS:
        print(
            f"usage: tools/with_gpu_driver GPU COMMAND...\nGPU: {', '.join(GPUS)}", file=sys.stderr
        )
        return 2
    if not is_complete(into):
        print("no GPU drivers here: tools/fetch_gpu_drivers gets them", file=sys.stderr)
        return CANNOT
    try:
        words, environment = command(into, arguments[1], arguments[2:])
    except FileNotFoundError as missing:
        print(f"no program {missing}", file=sys.stderr)
        return 127
    return subprocess.run(words, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
