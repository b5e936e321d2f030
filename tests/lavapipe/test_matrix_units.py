"""Kernels for matrix units, on a driver that executes them."""

from __future__ import annotations

import json
import re

import pytest

from tests.kernels.tunings import SAMPLE_TYPES
from tests.lavapipe.conftest import RunModule
from vkmoe.facts import MATRIX_FEATURES
from vkmoe.kernels.inputs import WEIGHT_TYPES

FAMILIES = ("matmul", "matmul_residual", "expert_matmul_gate_up", "expert_matmul_down")


def test_the_driver_has_matrix_units(run_module: RunModule) -> None:
    """The other tests here would mean nothing on another device."""
    device = json.loads(run_module("vkmoe", "devices", "--json"))[0]
    assert "llvmpipe" in device["name"]
    assert [8, 8, 8, "f16", "f32"] in device["matrix_shapes"]
    assert set(device["features"]) >= MATRIX_FEATURES


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in SAMPLE_TYPES else pytest.param(kind, marks=pytest.mark.full)
        for kind in WEIGHT_TYPES
    ],
)
@pytest.mark.sample(1)
def test_kernels_agree_with_their_twins(run_module: RunModule, family: str, kind: str) -> None:
    only = f"{family}.{kind.lower()}+matrix"
    words = ("selftest", "--device", "llvmpipe", "--only", only, "--json")
    cases = json.loads(run_module("vkmoe", *words))["cases"]
    assert cases and all(case["ok"] for case in cases), cases


@pytest.mark.full
def test_attention_agrees_with_its_twin(run_module: RunModule) -> None:
    words = ("selftest", "--device", "llvmpipe", "--only", "prompt_attention+matrix", "--json")
    cases = json.loads(run_module("vkmoe", *words))["cases"]
    assert cases and all(case["ok"] for case in cases), cases


ATTENTION = "tests/kernels/test_prompt_attention.py"
KERNELS, ENGINE = "tests/kernels/test_matmul.py", "tests/engine/test_batches.py"
EVERY = ("-m", "")
ALL_OF_KERNELS = (*EVERY, KERNELS, "-k", "+matrix or other_matrices")


@pytest.mark.parametrize(
    "words",
    [
        (KERNELS, "-k", "+matrix and any_batch and Q4_K and False"),
        (KERNELS, "-k", "+matrix and overflows and Q6_K"),
        (KERNELS, "-k", "other_matrices"),
        (ATTENTION, "-k", "units and (gpt-oss or 512) and not q8_0 and not q4_0"),
        ("tests/tools/test_integer_matrices.py",),
        pytest.param((*EVERY, ATTENTION, "-k", "units"), marks=pytest.mark.full),
        pytest.param((*EVERY, ENGINE, "-k", "tiles_of_f16"), marks=pytest.mark.full),
        *(
            pytest.param((*ALL_OF_KERNELS, "--share", f"{i}/8"), marks=pytest.mark.full)
            for i in range(8)  # together minutes
        ),
    ],
    ids=lambda words: words[-1],
)
@pytest.mark.sample(4)
def test_tests_pass_there(run_module: RunModule, words: tuple[str, ...]) -> None:
    """The law among them: bits depend on neither tile, place, neighbours nor cuts."""
    printed = run_module("pytest", "-q", "-p", "no:cacheprovider", *words)
    assert re.search(r"^\d+ passed(, \d+ deselected)? in ", printed, re.MULTILINE), printed
