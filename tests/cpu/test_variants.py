"""Which variant of the kernels runs: the most particular one that this processor can run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.needs import missing
from vkmoe.cpu import variants
from vkmoe.cpu.device import cpu_info
from vkmoe.cpu.variants import VARIABLE, choose, runnable, variant
from vkmoe.errors import NoDeviceError, UsageError

HASWELL = ["AVX2", "FMA", "F16C", "BMI2"]
SKYLAKE_X = [*HASWELL, "AVX512F", "AVX512BW", "AVX512VL"]
ZEN_4 = [*SKYLAKE_X, "AVX512_VNNI", "AVX512_BF16", "GFNI"]
OF_A_WHEEL = {"x64": [], "avx2": HASWELL, "avx512_vnni": [*SKYLAKE_X, "AVX512_VNNI"]}


@pytest.mark.parametrize(
    ("has", "expected"),
    [
        ([], "x64"),
        (["SSE3", "SSE4_2", "AVX"], "x64"),
        ([name for name in HASWELL if name != "F16C"], "x64"),
        (HASWELL, "avx2"),
        ([*HASWELL, "AVX_VNNI", "GFNI"], "avx2"),
        (SKYLAKE_X, "avx2"),
        (ZEN_4, "avx512_vnni"),
        ([name for name in ZEN_4 if name != "AVX512VL"], "avx2"),
        ([name for name in ZEN_4 if name != "AVX2"], "x64"),
        ([*ZEN_4, "SOMETHING_NEW"], "avx512_vnni"),
    ],
)
def test_the_most_particular_that_has_all_it_needs(has: list[str], expected: str) -> None:
    assert choose(OF_A_WHEEL, has) == expected


def test_the_variable_names_one_that_runs() -> None:
    assert choose(OF_A_WHEEL, ZEN_4, "avx2") == "avx2"
    with pytest.raises(UsageError, match=f"{VARIABLE} names 'zen5', which is not among") as caught:
        choose(OF_A_WHEEL, ZEN_4, "zen5")
    assert caught.value.hint == "there is x64, avx2, avx512_vnni"
    with pytest.raises(UsageError, match=r"this processor lacks AVX512_VNNI$") as caught:
        choose(OF_A_WHEEL, SKYLAKE_X, "avx512_vnni")
    assert caught.value.hint == "it can run x64, avx2"


def test_kernels_of_another_processor_are_as_none() -> None:
    """A source install was compiled for the machine it was built on."""
    with pytest.raises(NoDeviceError, match="for another processor: this one lacks AVX2, BMI2"):
        choose({"native": HASWELL}, ["FMA", "F16C"])
    with pytest.raises(NoDeviceError, match="built without kernels for the CPU"):
        choose({}, [])


@pytest.mark.usefixtures("native")
def test_what_this_build_needs_is_what_its_kernels_say() -> None:
    """ggml knows what it was compiled for; and the least of a wheel needs nothing."""
    needs = variants.built()
    able = runnable(needs, variants.features())
    assert variant() in able and f"({variant()}: " in cpu_info().driver_info
    for name in able:
        compiled = variants.native(name).features().split()
        for feature in ("AVX2", "AVX512_VNNI", "AVX512_BF16", "DOTPROD"):
            assert (feature in compiled) == (feature in needs[name]), (name, feature)
    if "native" not in needs:
        assert not next(iter(needs.values()))


def test_the_variable_reaches_the_command_line(native: object) -> None:
    """In a process of its own: a choice holds as long as the process."""

    def run(name: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "vkmoe", *words, "--device", "cpu"]
        environment = os.environ | {VARIABLE: name}
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    done = run("zen99", "devices")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: VKMOE_CPU_VARIANT names 'zen99'"), done.stderr
    for name in runnable(variants.built(), variants.features()):
        assert f"({name}: " in run(name, "devices").stdout
        assert run(name, "selftest", "--only", "append_rows").returncode == 0, "f16 needs a table"


# Debian's emulator as tools/test unpacks it; Nehalem has no AVX.
QEMU = Path(sys.prefix) / "qemu" / "usr" / "bin" / "qemu-x86_64-static"
SPEAK = """
from vkmoe.cpu.variants import native, variant
from vkmoe.errors import NoDeviceError
try:
    print(native().features(), variant())
except NoDeviceError as error:
    print(error)
"""


def test_an_older_processor_meets_no_instruction_that_it_lacks(native: object) -> None:
    """In an emulator, where one would end the process."""
    if not QEMU.exists():
        missing("there is no emulator of older processors, which tools/test fetches")
    command = [str(QEMU), "-cpu", "Nehalem", sys.executable, "-c", SPEAK]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if "native" in variants.built():
        assert "for another processor: this one lacks AVX2" in done.stdout
    else:
        assert done.stdout.split() == ["x64"]
