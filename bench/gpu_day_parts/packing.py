"""`bench/gpu_day pack`: gathers what `bench/gpu_day run` needs beside the checkout into a folder.

Owns what is packed and the limit on its size. What lies in the folder already is kept. Needs the
network: a package index for pip, and Debian's archive for apt.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from importlib.metadata import requires
from pathlib import Path
from typing import NamedTuple

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bench.gpu_day_parts import KOMPUTE, LLAMA, SDK, WHEELS, WINDOWS
from bench.gpu_day_parts.rival import pack_llama_cpp
from tools.debian import fetch
from tools.llama_cpp_shaders import SDIST, download_sdist

ROOT = Path(__file__).resolve().parent.parent.parent
MB = 10**6
LIMIT_MB = 60
# What tokenizers would download models with, and its own needs: nothing here downloads.
NEVER_USED = {"huggingface-hub"}
OF_TESTS = ("pytest", "pytest-xdist")  # that hold the law
PLATFORMS = [f"manylinux{tag}_x86_64" for tag in ("_2_28", "_2_27", "_2_17", "2014", "1")]
# The programs' suite has the oldest C library that is tried; headers have none.
SDK_PACKAGES = (
    ("bookworm", ("libvulkan1", "vulkan-validationlayers", "libfmt-dev", "libfmt9")),
    ("trixie", ("libvulkan-dev", "spirv-headers")),
)
# NVIDIA's Vulkan driver is linked with them; used only where the machine has none of its own.
WINDOW_LIBRARIES = ("libx11-6", "libxext6", "libxcb1", "libxau6", "libxdmcp6", "libbsd0", "libmd0",
                    "libglvnd0", "libglx0", "libegl1")  # fmt: skip
NOT_NEEDED = ("usr/share/doc", "usr/share/man", "usr/share/lintian", "usr/share/vulkan/registry",
              "usr/share/bug", "usr/include/spirv/1.0", "usr/include/spirv/1.1",
              "usr/include/spirv/1.2")  # fmt: skip


class LimitError(Exception):
    """The folder is too large to travel."""


class Options(NamedTuple):
    """What the user asked of `pack`."""

    folder: Path
    python: str  # such as "3.12"
    leave_out: frozenset[str]  # packages that the machine has
    llama_sdist: Path | None


class Piece(NamedTuple):
    """One thing that is packed: its file or folder in the folder, and what makes it."""

    name: str
    what: str
    make: Callable[[Options, Path], None]  # writes the file or folder of that path
    # Says whether an earlier one, of that path, still serves.
    is_whole: Callable[[Options, Path], bool] = lambda options, path: True


def pack(options: Options) -> None:
    """Make what is missing and print the table. Raises LimitError, ArchiveError and the like."""
    options.folder.mkdir(parents=True, exist_ok=True)
    for piece in PIECES:
        target = options.folder / piece.name
        if target.exists() and piece.is_whole(options, target):
            print(f"{piece.name}: kept as it is", file=sys.stderr)
            continue
        print(f"{piece.name}: {piece.what} ...", file=sys.stderr, flush=True)
        partial = target.with_name(f".{target.name}.partial")
        _remove(partial)
        piece.make(options, partial)
        _remove(target)
        partial.rename(target)
    check_size(options.folder)


def check_size(folder: Path) -> None:
    """Print what was packed and its size. Raises LimitError above the limit."""
    total = 0
    for piece in PIECES:
        path = folder / piece.name
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        size = sum(file.stat().st_size for file in files)
        total += size
        print(f"{size / MB:8.2f} MB  {piece.name:<20} {piece.what}")
        for file in files if path.is_dir() else ():
            print(f"{file.stat().st_size / MB:20.2f} MB  {file.name}")
    tree = _tree_bytes()
    beside = f"; with the checkout {(total + tree) / MB:.2f} MB" if tree else ""
    print(f"{total / MB:8.2f} MB  together{beside}")
    if total > LIMIT_MB * MB:
        raise LimitError(
            f"{folder} holds {total / MB:.1f} MB and may hold {LIMIT_MB}; "
            "--leave-out names packages that the machine has (numpy is the largest)"
        )


def _tree_bytes() -> int:
    """Count the bytes of the checkout; 0 where git cannot tell what belongs to it."""
    if shutil.which("git") is None:
        return 0
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True).stdout
    names = [ROOT / name for name in tracked.decode().split("\0") if name]
    return sum(path.stat().st_size for path in names if path.is_file())


# ----- the pieces -----


def _wanted_wheels(options: Options) -> list[str]:
    return [name for name in wheel_names(options.python) if name not in options.leave_out]


def has_wheels(options: Options, folder: Path) -> bool:
    """Say whether a folder has a wheel of each package: vkmoe may need more than it did."""
    held = {canonicalize_name(path.name.partition("-")[0]) for path in folder.iterdir()}
    return held.issuperset(_wanted_wheels(options))


def _wheels(options: Options, into: Path) -> None:
    into.mkdir()
    names, versions = _wanted_wheels(options), _constraints(options.python)
    wanted = [f"{name}=={versions[name]}" if name in versions else name for name in names]
    _pip_download(
        "--only-binary=:all:", "--python-version", options.python, "--implementation", "cp",
        *(word for tag in PLATFORMS for word in ("--platform", tag)), "-d", into, *wanted,
    )  # fmt: skip


def wheel_names(python: str) -> list[str]:
    """List every package that vkmoe's build, itself and the tests of the law need.

    They are those that this environment knows.
    """
    with (ROOT / "pyproject.toml").open("rb") as file:
        content = tomllib.load(file)
    machine = _machine(python)
    waiting = [*content["build-system"]["requires"], *content["project"]["dependencies"], *OF_TESTS]
    found: dict[str, None] = {}
    while waiting:
        need = Requirement(waiting.pop(0))
        name = canonicalize_name(need.name)
        applies = need.marker is None or need.marker.evaluate(machine)
        if applies and name not in found and name not in NEVER_USED | {"pip", "setuptools"}:
            found[name] = None
            waiting += requires(name) or []
    return list(found)


def _constraints(python: str) -> dict[str, str]:
    """Read the versions that tools/setup would install on a machine with that Python."""
    lines = (ROOT / "tools/constraints.txt").read_text().splitlines()
    needs = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {
        canonicalize_name(need.name): str(need.specifier).removeprefix("==")
        for need in needs
        if need.marker is None or need.marker.evaluate(_machine(python))
    }


def _machine(python: str) -> dict[str, str]:
    """Describe the machine of the GPU day for markers of packages."""
    own = {key: str(value) for key, value in default_environment().items()}
    versions = {"python_version": python, "python_full_version": f"{python}.0"}
    return own | versions | {"sys_platform": "linux", "platform_machine": "x86_64", "extra": ""}


def _kompute(options: Options, target: Path) -> None:
    """Download the very file that the build will check."""
    text = (ROOT / "vkmoe/gpu/native/cmake/kompute.cmake").read_text()
    version, digest = re.findall(r'set\(VKMOE_KP_(?:VERSION|SHA256) "(.+?)"\)', text)
    with tempfile.TemporaryDirectory() as scratch:
        _pip_download("--no-binary=:all:", "--no-build-isolation", "-d", scratch, f"kp=={version}")
        (sdist,) = Path(scratch).iterdir()
        if hashlib.sha256(sdist.read_bytes()).hexdigest() != digest:
            raise LimitError(f"{sdist.name} is not the file that kompute.cmake names")
        shutil.move(sdist, target)


def _sdk(options: Options, target: Path) -> None:
    _archive_packages(SDK_PACKAGES, target)


def _window_libraries(options: Options, target: Path) -> None:
    _archive_packages(((SDK_PACKAGES[0][0], WINDOW_LIBRARIES),), target)


def _archive_packages(suites: Sequence[tuple[str, Sequence[str]]], target: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "root"
        for suite, packages in suites:
            fetch(suite, packages, root, alone=True)
        for name in NOT_NEEDED:
            _remove(root / name)
        with tarfile.open(target, "w:xz", preset=9) as archive:
            archive.add(root, ".")


def _llama_cpp(options: Options, target: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        sdist = options.llama_sdist or download_sdist(Path(scratch) / "download")
        pack_llama_cpp(sdist, Path(scratch), target)


PIECES = (
    Piece(WHEELS, "Python packages, for building and running", _wheels, has_wheels),
    Piece(KOMPUTE, "Kompute's sources", _kompute),
    Piece(SDK, "Vulkan's headers, loader and validation layer, fmt", _sdk),
    Piece(WINDOWS, "libraries that NVIDIA's driver may miss", _window_libraries),
    Piece(LLAMA, f"llama.cpp ({SDIST}) and its compiled shaders", _llama_cpp),
)


def _pip_download(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
    subprocess.run([*command, "--no-deps", *arguments], check=True)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
