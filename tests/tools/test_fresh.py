"""tools/fresh and Debian's archive, as far as they go without root; .ci/run makes a real root."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement

from tools import debian
from tools.fresh import CANNOT, COMMANDS, Phase, parse

ROOT = Path(__file__).resolve().parent.parent.parent
FRESH = ROOT / "tools" / "fresh"


def stand_in(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that comes first on the PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return tmp_path / "bin"


def test_debians_archive_is_told_from_its_security_archive(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debian, "KEYRING", tmp_path)
    lines = (
        "Debian Debian-Security http://one\nUbuntu Ubuntu http://two\nDebian Debian http://three"
    )
    stand_in(programs, "apt-get", f"echo '{lines}'")
    assert debian.mirror() == "http://three"
    stand_in(programs, "apt-get", "echo 'Ubuntu Ubuntu http://two'")
    with pytest.raises(debian.ArchiveError, match="is Debian's archive"):
        debian.mirror()


def test_apts_last_words_are_the_reason(programs: Path, tmp_path: Path) -> None:
    """A suite that is not there is one line on stderr."""
    stand_in(programs, "apt-get", 'case "$1" in -qq) echo "E: no such suite" >&2; exit 100;; esac;'
             "echo 'Debian Debian http://three'")  # fmt: skip
    command = [sys.executable, "-m", "tools.debian", "nosuch", str(tmp_path / "into"), "libfmt-dev"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "debian: apt-get update failed: E: no such suite\n"


def test_without_root_it_says_so(programs: Path) -> None:
    """The exit code is that of a test which was skipped."""
    drop = "import os, runpy, sys; os.geteuid = lambda: 1000; sys.argv = ['fresh', 'trixie'];"
    command = [sys.executable, "-c", drop + "runpy.run_module('tools.fresh', run_name='__main__')"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == CANNOT
    assert done.stderr == "fresh: this needs root: debootstrap and chroot do (try sudo)\n"


def test_help_teaches() -> None:
    done = subprocess.run([FRESH, "--help"], capture_output=True, text=True, check=True)
    assert "tools/fresh trixie" in done.stdout and "exit codes" in done.stdout


def test_suites_have_numbers_too() -> None:
    assert parse(["13"]).suite == "trixie" and parse(["testing"]).suite == "testing"
    assert parse(["12", "--keep"]).commands == COMMANDS
    assert parse(["12", "--keep", "a b", "--newest", "c"]).commands == ["a b", "c"]


def test_the_report_names_what_failed() -> None:
    assert str(Phase("tools/demo", 58.6, 0)) == "     59 s  tools/demo"
    assert str(Phase("tools/test", 8.2, 3)).endswith("tools/test  FAILED with exit code 3")


def test_every_requirement_has_a_constraint_that_fits() -> None:
    """tools/constraints.txt is renewed by hand, after pyproject.toml has changed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["dev"],
        *project["project"]["optional-dependencies"]["server"],
    ]
    lines = (ROOT / "tools" / "constraints.txt").read_text().splitlines()
    constraints = [Requirement(line) for line in lines if not line.startswith("#")]
    for version in ("3.11", "3.12", "3.13", "3.14"):
        environment = {"python_version": version, "python_full_version": f"{version}.0"}
        pinned = {
            constraint.name.replace("_", "-").lower(): next(iter(constraint.specifier)).version
            for constraint in constraints
            if constraint.marker is None
            or constraint.marker.evaluate({**default_environment(), **environment})  # type: ignore[dict-item]
        }
        for requirement in map(Requirement, wanted):
            assert requirement.specifier.contains(pinned[requirement.name]), (requirement, version)
