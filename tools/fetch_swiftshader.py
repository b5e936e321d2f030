#!/usr/bin/env python3
"""Get SwiftShader, a second and quite different Vulkan driver, out of Debian's chromium packages.

Owns the folder `.venv/swiftshader`: the library, an ICD file with its absolute path, and the
package version it came from. Installs nothing on the system and does not choose the driver:
whoever wants SwiftShader sets `VK_DRIVER_FILES` and `VK_ICD_FILENAMES` (older loaders know only
this one) to the path printed here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = "libvk_swiftshader.so"
ICD = "vk_swiftshader_icd.json"
# The driver moved from the first to the second of these as Debian split its package.
PACKAGES = ("chromium-common", "chromium")


class FetchError(Exception):
    """Why there is no SwiftShader, in one line for the user."""


def run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in the C locale and keep what it says."""
    environment = os.environ | {"LC_ALL": "C"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def download(package: str, folder: Path) -> Path | None:
    """Let apt download the package into `folder`; None when apt does not know or cannot get it."""
    command = ["apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", package]
    if run(command, folder).returncode != 0:
        return None
    return next(folder.glob(f"{package}_*.deb"), None)


def extract(archive: Path, folder: Path) -> bool:
    """Take the two files out of a Debian package; False when it does not hold both."""
    unpacked: set[str] = set()
    with (
        subprocess.Popen(
            ["dpkg-deb", "--fsys-tarfile", str(archive)], stdout=subprocess.PIPE
        ) as dpkg,
        tarfile.open(fileobj=dpkg.stdout, mode="r|") as members,
    ):
        for member in members:
            name = Path(member.name).name
            source = members.extractfile(member) if name in (LIBRARY, ICD) else None
            if source is not None:
                (folder / name).write_bytes(source.read())
                unpacked.add(name)
    return unpacked == {LIBRARY, ICD}


def publish(unpacked: Path, version: str, into: Path) -> None:
    """Move the files to their place; the version stamp comes last and says that all is there."""
    into.mkdir(parents=True, exist_ok=True)
    (into / "version").unlink(missing_ok=True)
    icd = json.loads((unpacked / ICD).read_text())
    icd["ICD"]["library_path"] = str(into / LIBRARY)
    os.replace(unpacked / LIBRARY, into / LIBRARY)
    (into / ICD).write_text(json.dumps(icd) + "\n")
    (into / "version").write_text(version + "\n")


def fetch(into: Path) -> None:
    """Fill `into` from the first package that has the driver. Raises `FetchError`."""
    into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into.parent, prefix="swiftshader-") as scratch:
        folder = Path(scratch)
        for package in PACKAGES:
            archive = download(package, folder)
            if archive is not None and extract(archive, folder):
                publish(folder, archive.stem, into)
                return
    raise FetchError(
        "no SwiftShader: apt offers no chromium-common or chromium package that contains it"
        " (Debian's does; Ubuntu's chromium is a snap and does not; is `apt-get update` needed?)"
    )


def refresh_lists() -> None:
    """Update apt's lists where they are empty, as they are in a fresh container."""
    if os.geteuid() == 0 and not list(Path("/var/lib/apt/lists").glob("*_Packages*")):
        run(["apt-get", "update", "-q"], Path("/"))


def is_complete(into: Path) -> bool:
    """Whether an earlier run finished here, and the folder has not been moved since."""
    if not all((into / name).is_file() for name in (LIBRARY, ICD, "version")):
        return False
    icd = json.loads((into / ICD).read_text())
    return bool(icd["ICD"]["library_path"] == str(into / LIBRARY))


def main() -> int:
    """Print the path of the ICD file, after fetching the driver if it is not there yet."""
    parser = argparse.ArgumentParser(description="fetch the SwiftShader Vulkan driver")
    parser.add_argument("--into", type=Path, default=ROOT / ".venv" / "swiftshader")
    parser.add_argument("--refresh", action="store_true", help="fetch again even if it is there")
    arguments = parser.parse_args()
    into = arguments.into.resolve()
    try:
        if arguments.refresh or not is_complete(into):
            refresh_lists()
            fetch(into)
    except FileNotFoundError as missing:
        print(f"no SwiftShader: this needs apt-get and dpkg-deb ({missing})", file=sys.stderr)
        return 1
    except FetchError as problem:
        print(problem, file=sys.stderr)
        return 1
    print(into / ICD)
    return 0


if __name__ == "__main__":
    sys.exit(main())
