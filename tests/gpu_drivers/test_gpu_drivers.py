"""vkmoe on the drivers of GPUs that are not here: what it chooses there, and that it believes
nothing of a device that computes nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.gpu_drivers import command

from .choices import STORED, on_gpu
from .conftest import EVERY_GPU, OF_EACH_MAKER

ROOT = Path(__file__).resolve().parent.parent.parent
MODES = {
    "slots": ("--expert-slots", "12"),
    "gather": ("--expert-slots", "12", "--miss", "gather"),
    "stepped": ("--executor", "stepped"),
    "pool": ("--host-pool", "12MiB"),
}


@pytest.mark.parametrize("gpu", EVERY_GPU)
def test_every_gpu_is_given_the_memory_queues_and_mapping_stored_for_it(
    drivers: Path, gpu: str
) -> None:
    """Where the new ones are right: python -m tests.gpu_drivers.choices --all."""
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    assert on_gpu(gpu) == stored[gpu]


@pytest.mark.parametrize("gpu", EVERY_GPU)
@pytest.mark.sample(1)
def test_a_device_that_computes_nothing_gives_one_error_and_no_text(
    drivers: Path, gpu: str
) -> None:
    _one_error(drivers, gpu)


@pytest.mark.parametrize(
    ("gpu", "mode"),
    [
        ("navi31", "slots"),
        *(
            pytest.param(gpu, mode, marks=pytest.mark.full)
            for gpu in OF_EACH_MAKER
            for mode in MODES
        ),
    ],
)
def test_so_does_every_way_of_running(drivers: Path, gpu: str, mode: str) -> None:
    _one_error(drivers, gpu, *MODES[mode])


def _generate(drivers: Path, gpu: str, *options: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "vkmoe", "generate", "-p", "def", "-n", "2", *options]
    words, environment = command(drivers, gpu, program)
    return subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    "gpu", ["navi31", *(pytest.param(gpu, marks=pytest.mark.full) for gpu in OF_EACH_MAKER[1:])]
)
def test_a_device_that_computes_nothing_is_refused(drivers: Path, gpu: str) -> None:
    """Its real compiler makes all kernels that are compared; none leaves anything."""
    done = _generate(drivers, gpu)
    assert done.returncode == 1 and not done.stdout.strip()
    assert "computes wrongly with the driver" in done.stderr and "embed.q8_0" in done.stderr
    assert "--no-canary" in done.stderr and "Traceback" not in done.stderr


def _one_error(drivers: Path, gpu: str, *options: str) -> None:
    done = _generate(drivers, gpu, "--no-canary", *options)
    assert done.returncode == 1 and not done.stdout.strip()
    assert "error: the GPU reported a finished token whose log was not written" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "gpu", ["navi31", *(pytest.param(gpu, marks=pytest.mark.full) for gpu in OF_EACH_MAKER[1:])]
)
def test_the_self_test_of_a_device_that_computes_nothing_ends_in_its_finding(
    drivers: Path, gpu: str
) -> None:
    """No case of it is timed: the device writes no timestamps either."""
    program = [sys.executable, "-m", "vkmoe", "selftest", "--only", "rms_norm", "--json"]
    words, environment = command(drivers, gpu, program)
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    cases = json.loads(done.stdout)["cases"]
    assert cases and not any(case["ok"] for case in cases)
    assert f"error: {len(cases)} of {len(cases)} cases compute wrongly" in done.stderr
    assert "Traceback" not in done.stderr and "internal error" not in done.stderr


def test_nothing_is_timed_on_a_device_that_computes_nothing(drivers: Path, tmp_path: Path) -> None:
    program = [sys.executable, "-m", "vkmoe", "tune", "--device", "0"]
    words, environment = command(drivers, "navi31", program)
    environment["XDG_CACHE_HOME"] = str(tmp_path)
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout, done.stderr
    assert "compute wrongly" in done.stderr and not (tmp_path / "vkmoe").exists()
