"""vkmoe on SwiftShader: subgroups of 4, no 16-bit storage, another compiler, the same answers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PROMPT = "class Stack:\n    def __init__(self):"


def vkmoe(environment: dict[str, str], *arguments: str) -> Any:
    """Run a vkmoe command in a process of its own and read the JSON it prints."""
    command = [sys.executable, "-m", "vkmoe", *arguments, "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_device_is_swiftshader(swiftshader: dict[str, str]) -> None:
    """The other tests here would mean nothing on another device."""
    (name,) = (item["name"] for item in vkmoe(swiftshader, "devices") if item["layout"] == "planes")
    assert "SwiftShader" in name


@pytest.mark.full
def test_kernel_tests_pass(swiftshader: dict[str, str]) -> None:
    """The tests of every kernel family pass, none skipped.

    In one process, where they share pipelines: this driver takes a second or two for each.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels"]
    done = subprocess.run(command, cwd=ROOT, env=swiftshader, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^\d+ passed(, \d+ deselected)? in ", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.parametrize(
    ("only", "least"),
    [
        *(("matvec_residual.mxfp4", 2), ("rms_norm", 1), ("find_experts", 1)),
        # One weight type in every kernel and mapping: mappings, families, embed.
        pytest.param("mxfp4", 2 * 6 + 1, marks=pytest.mark.full),
    ],
)
@pytest.mark.sample(1)
def test_selftest_passes(swiftshader: dict[str, str], only: str, least: int) -> None:
    """Mappings that add over subgroups need 64-bit integers, which this driver lacks."""
    report = vkmoe(swiftshader, "selftest", "--only", only)
    assert len(report["cases"]) >= least
    assert all(case["ok"] for case in report["cases"])


@pytest.mark.full
def test_same_text_as_lavapipe(swiftshader: dict[str, str], lavapipe: dict[str, str]) -> None:
    """Sixteen most likely tokens of the demo model depend on neither driver nor placement."""
    arguments = ("generate", "-p", PROMPT, "-n", "16", "--temp", "0")
    ours = vkmoe(swiftshader, *arguments, "--expert-slots", "4")
    theirs = vkmoe(lavapipe, *arguments)
    assert ours["expert_cache"]["n_uploads"] > 0 and theirs["expert_cache"] is None
    assert ours["text"] == theirs["text"] and ours["text"].strip()
