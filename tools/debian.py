"""Debian's archive as this machine's apt reaches it: its address, and packages of any suite.

Keeps lists and downloads apart from apt's own, so none of it needs root. Installs nothing.
As a program: python -m tools.debian SUITE FOLDER PACKAGE... unpacks packages below FOLDER.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


class ArchiveError(Exception):
    """Why nothing can be had from Debian's archive, in one line for the user."""


def mirror() -> str:
    """Find the address from which apt takes Debian's packages. Raises ArchiveError."""
    columns = ["$(ORIGIN)", "$(LABEL)", "$(SITE)"]
    try:
        listed = subprocess.run(
            ["apt-get", "indextargets", "--format", " ".join(columns), "Created-By: Packages"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        raise ArchiveError(f"this machine has no usable apt-get ({error})") from error
    if not KEYRING.exists():
        raise ArchiveError(f"{KEYRING} is missing (Debian: debian-archive-keyring)")
    for line in listed.splitlines():
        origin, label, site = line.split(" ", 2)
        if origin == label == "Debian":  # Debian's security archive has a label of its own
            return site
    raise ArchiveError("no source of this machine's apt is Debian's archive (is `apt update` due?)")


def fetch(suite: str, packages: Sequence[str], into: Path, alone: bool = False) -> None:
    """Unpack packages of a suite, and all that they depend on, below `into`, which is made.

    Even the C library comes along; nothing does if `alone`. Raises ArchiveError with apt's words.
    """
    into.mkdir(parents=True, exist_ok=True)
    site = mirror()
    with tempfile.TemporaryDirectory(prefix="vkmoe-apt-") as scratch:
        state = Path(scratch)
        for name in ("lists/partial", "cache/archives/partial"):
            (state / name).mkdir(parents=True)
        (state / "status").touch()
        (state / "sources.list").write_text(f"deb [signed-by={KEYRING}] {site} {suite} main\n")
        _apt(state, "update")
        with_all = ("install", "--download-only", "-y")
        _apt(state, *(("download",) if alone else with_all), *packages)
        for archive in state.glob("**/*.deb"):  # `download` leaves them in its working folder
            subprocess.run(["dpkg-deb", "-x", archive, into], check=True)


def _apt(state: Path, *arguments: str) -> None:
    """Run apt-get on a state of its own; an empty status file means that nothing is installed."""
    options = {
        "Dir::Etc::SourceList": state / "sources.list",
        "Dir::Etc::SourceParts": os.devnull,
        "Dir::Etc::Preferences": os.devnull,
        "Dir::Etc::PreferencesParts": os.devnull,
        "Dir::State::Lists": state / "lists",
        "Dir::State::Status": state / "status",
        "Dir::Cache": state / "cache",
        "Debug::NoLocking": "true",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root",
    }
    command = ["apt-get", "-qq"]
    for name, value in options.items():
        command += ["-o", f"{name}={value}"]
    done = subprocess.run([*command, *arguments], cwd=state, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ArchiveError(f"apt-get {arguments[0]} failed: {last}")


def main(suite: str, into: str, *packages: str) -> int:
    """Run the program; its exit code is 0, or 1 with the reason on stderr."""
    try:
        fetch(suite, packages, Path(into))
    except ArchiveError as reason:
        print(f"debian: {reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
