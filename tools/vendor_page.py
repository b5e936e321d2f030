#!/usr/bin/env python3
"""Takes the scripts that the page of `vkmoe serve` needs out of npm's packages, at fixed versions.

Owns vkmoe/server/page/vendor/; its vendor.toml says which packages, which of their files, and the
SHA-256 of each archive and file. Nothing that they do not match is written. A new version is
taken by writing it to vendor.toml with the hashes that this program then finds.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "vkmoe" / "server" / "page" / "vendor"


class VendorError(Exception):
    """Says in one line what does not match, or could not be had."""


def packages(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """List the packages that vendor.toml names."""
    found = tomllib.loads((folder / "vendor.toml").read_text())["package"]
    assert isinstance(found, list)
    return found


def check(folder: Path = FOLDER) -> None:
    """Compare the files that are there with vendor.toml, offline. Raises VendorError."""
    wanted = {name for package in packages(folder) for name in package["files"]}
    there = {file.name for file in folder.iterdir()} - {"vendor.toml"}
    if wanted != there:
        raise VendorError(f"missing or not listed in vendor.toml: {sorted(wanted ^ there)}")
    for package in packages(folder):
        for name, file in package["files"].items():
            _compare(name, (folder / name).read_bytes(), file["sha256"])


def fetch(folder: Path = FOLDER) -> None:
    """Write the files of all packages anew. Raises VendorError, with nothing written."""
    found: dict[str, bytes] = {}
    for package in packages(folder):
        with tempfile.TemporaryDirectory(prefix="vkmoe-npm-") as scratch:
            archive = _pack(f"{package['name']}@{package['version']}", Path(scratch))
            _compare(archive.name, archive.read_bytes(), package["archive_sha256"])
            with tarfile.open(archive) as members:
                for name, file in package["files"].items():
                    source = members.extractfile(f"package/{file['path']}")
                    assert source is not None
                    found[name] = source.read()
                    _compare(name, found[name], file["sha256"])
    for name, data in found.items():
        (folder / name).write_bytes(data)


def _pack(package: str, folder: Path) -> Path:
    """Let npm download the archive of a package. Raises VendorError."""
    command = ["npm", "pack", "--silent", package]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise VendorError("npm is not installed (Debian: npm)") from error
    archive = next(folder.glob("*.tgz"), None)
    if done.returncode != 0 or archive is None:
        reason = done.stderr.strip().splitlines() or ["no message"]
        raise VendorError(f"npm could not get {package}: {reason[-1]}")
    return archive


def _compare(name: str, data: bytes, sha256: str) -> None:
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise VendorError(f"{name} has the SHA-256 {found}, vendor.toml has {sha256}")


def main() -> int:
    """Run the program; its exit code is 0, or 1 with the reason on stderr."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare the files only, offline")
    try:
        if not parser.parse_args().check:
            fetch()
        check()
    except VendorError as reason:
        print(f"vendor_page: {reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
