"""How tests run on a lavapipe that has matrix units, which this machine's own may lack."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.needs import missing
from tools.lavapipe import command, folder, is_complete

ROOT = Path(__file__).resolve().parent.parent.parent
RunModule = Callable[..., str]


@pytest.fixture(scope="session")
def run_module() -> RunModule:
    """Run a Python module on that driver: its name, its arguments -> what it printed."""
    if not is_complete(folder()):
        missing("no lavapipe with matrix units; python -m tools.lavapipe fetch gets it from Debian")

    def run(*words: str) -> str:
        line, environment = command(folder(), [sys.executable, "-m", *words])
        done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
