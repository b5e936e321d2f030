"""tools/test: what makes it fail, in a checkout whose programs are stand-ins."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.selftest.test_suite import variants

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Everything succeeds here, but neither SwiftShader nor drivers of GPUs can be had."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "test", tmp_path / "tools")
    stand_in(tmp_path / "tools" / "setup", "exit 0")
    stand_in(tmp_path / "tools" / "fetch_gpu_drivers", "exit 77")
    for name in ("ruff", "mypy"):
        stand_in(tmp_path / ".venv" / "bin" / name, "exit 0")
    stand_in(tmp_path / ".venv" / "bin" / "python", 'test "$2" != tools.fetch_swiftshader')
    return tmp_path


def stand_in(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def run(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [checkout / "tools" / "test", *arguments],
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("value", ["true", "1"])
def test_ci_fails_without_the_other_drivers(checkout: Path, value: str) -> None:
    done = run(checkout, CI=value)
    assert done.returncode == 1
    assert done.stderr == "tools/test: FAILED: swiftshader gpu_drivers\n"


def test_elsewhere_they_may_be_missing(checkout: Path) -> None:
    assert run(checkout).returncode == 0
    assert run(checkout, CI="").returncode == 0


def test_a_browser_that_does_not_start_fails_everywhere(checkout: Path) -> None:
    """It may only be missing where its packages cannot be had (code 77), and not in CI."""
    python = checkout / ".venv" / "bin" / "python"
    stand_in(python, 'test "$2" != tools.fetch_chromium')
    done = run(checkout)
    assert done.returncode == 1
    assert done.stderr == "tools/test: FAILED: chromium\n"
    stand_in(python, '[ "$2" != tools.fetch_chromium ] || exit 77')
    assert run(checkout).returncode == 0
    assert run(checkout, CI="1").stderr == "tools/test: FAILED: gpu_drivers chromium\n"


def test_the_browser_is_fetched_where_tests_need_it(checkout: Path) -> None:
    """A browser of the machine's own takes no part: what CI runs is what a newcomer gets."""
    stand_in(checkout / "bin" / "chromium", "exit 0")
    stand_in(checkout / ".venv" / "bin" / "python", 'echo "$@" >&2')
    for arguments, fetched in (([], True), (["tests/server"], True), (["tests/gpu"], False)):
        done = run(checkout, *arguments, PATH=f"{checkout / 'bin'}:/usr/bin:/bin")
        assert ("-m tools.fetch_chromium" in done.stderr) is fetched


def test_arguments_go_to_pytest(checkout: Path) -> None:
    stand_in(checkout / ".venv" / "bin" / "python", 'echo "$@"')
    done = run(checkout, "tests/quants", "-x")
    assert done.stdout.splitlines()[-1].startswith("-m pytest -n 3 --dist loadfile ")
    assert done.stdout.endswith(" tests/quants -x\n")


def test_tests_that_are_named_run_alone(checkout: Path) -> None:
    """Neither the checks of all files, nor what other tests need: a bare system has it from CI."""
    noted = checkout / "noted"
    stand_in(checkout / ".venv" / "bin" / "python", f'echo "$2" >> {noted}')
    for name in ("ruff", "mypy"):
        stand_in(checkout / ".venv" / "bin" / name, "exit 1")
    for named, needs in (
        (["tests/native", "tests/gpu/test_device.py"], []),
        (["tests/swiftshader"], ["tools.fetch_swiftshader"]),
        (["tests/cpu"], ["tools.debian"]),
    ):
        assert run(checkout, *named, CI="1").returncode == 0
        assert noted.read_text().split() == [*needs, "pytest"]
        noted.unlink()
    assert run(checkout, "-x").stderr == "tools/test: FAILED: ruff mypy\n"
    assert run(checkout, "tests/gpu_drivers", CI="1").stderr == "tools/test: FAILED: gpu_drivers\n"


@pytest.mark.parametrize("name", ["ruff", "mypy"])
def test_a_failing_check_is_named(checkout: Path, name: str) -> None:
    stand_in(checkout / ".venv" / "bin" / name, "exit 1")
    done = run(checkout)
    assert done.returncode == 1
    assert done.stderr == f"tools/test: FAILED: {name}\n"


def test_the_quick_choice_names_what_is_there(checkout: Path) -> None:
    """And fetches nothing. None of its cases is marked as one that CI alone runs."""
    python, noted = checkout / ".venv" / "bin" / "python", checkout / "noted"
    stand_in(python, f'echo "$@" >> {noted}')
    assert run(checkout, "--quick", "-x").returncode == 0
    (line,) = noted.read_text().splitlines()
    names = {word.split("::")[0] for word in line.split() if word.startswith("tests/")}
    assert len(names) > 20 and line.endswith(" -x")
    assert [name for name in names if not (ROOT / name).exists()] == []
    cases = {word.partition("twin[")[2][:-1] for word in line.split() if "twin[" in word}
    assert len(cases) > 15 and cases <= {case.id for case in variants() if not case.marks}
