"""ggml's kernels as they were built: what they take, and their products beside the twin's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cpu.programs import Rig
from vkmoe.kernels.inputs import WEIGHT_TYPES, random_rows
from vkmoe.kernels.rounding import multiply
from vkmoe.quants import HAS_KERNEL, decode
from vkmoe.quants.types import BY_ID, TYPES

N_ROWS, N_COLUMNS = 130, 768


def test_every_type_that_is_multiplied_has_the_blocks_of_the_table(each_variant: Any) -> None:
    """The structs of ggml are its own: this is what pins those that were compiled."""
    assert each_variant.ggml_version == "0.3.36"
    found = {format["type"]: format for format in each_variant.formats()}
    assert {TYPES[name].ggml_id for name in HAS_KERNEL} == set(found)
    for number, format in found.items():
        kind = BY_ID[number]
        blocks = (format["block_weights"], format["block_bytes"])
        assert blocks == (kind.block_weights, kind.block_bytes), kind
        assert format["name"] == kind.name
        assert BY_ID[format["input"]].name in ("F32", "F16", "BF16", "Q8_0", "Q8_1", "Q8_K")


@pytest.mark.parametrize("name", WEIGHT_TYPES)
def test_products_are_those_of_the_twin(each_variant: Any, name: str) -> None:
    """Beside float64 they differ by the rounding of the vector to 8 bits."""
    rng = np.random.default_rng(TYPES[name].ggml_id)
    rows = random_rows(name, N_ROWS, N_COLUMNS, rng)
    vector = rng.standard_normal((1, N_COLUMNS), np.float32)
    vector[0, 256:512] = 0  # a block without a scale
    rig, y = Rig(each_variant), np.zeros((1, N_ROWS), np.float32)
    rig.matvec(name, [rows], vector, y)
    rig.run()
    (form,) = (each["input"] for each in each_variant.formats() if each["name"] == name)
    weights = decode(name, rows, N_ROWS * N_COLUMNS).reshape(N_ROWS, -1).astype(np.float64)
    size = np.linalg.norm(weights, axis=1) * np.linalg.norm(vector)
    assert (np.abs(y[0] - multiply(name, rows, vector[0], form)) <= 1e-5 * size).all()
    exact = weights @ vector[0].astype(np.float64)
    assert np.linalg.norm(y[0] - exact) <= 0.025 * np.linalg.norm(exact)


@pytest.mark.parametrize("name", WEIGHT_TYPES)
def test_products_of_many_vectors_are_each_as_if_alone(each_variant: Any, name: str) -> None:
    """To the bit, in tiles of any size; and those of the twin."""
    rng = np.random.default_rng(TYPES[name].ggml_id)
    rows = random_rows(name, N_ROWS, N_COLUMNS, rng)
    vectors = rng.standard_normal((300, N_COLUMNS), np.float32)
    found = {}
    for n in (1, 7, 17, 300):
        rig, y = Rig(each_variant), np.zeros((n, N_ROWS), np.float32)
        rig.matmul(name, rows, vectors[:n].copy(), y)
        rig.run()
        found[n] = y
    for n, y in found.items():
        np.testing.assert_array_equal(y.view(np.uint32), found[300][:n].view(np.uint32))
    (form,) = (each["input"] for each in each_variant.formats() if each["name"] == name)
    weights = decode(name, rows, N_ROWS * N_COLUMNS).reshape(N_ROWS, -1).astype(np.float64)
    for vector, y in zip(vectors[::60], found[300][::60], strict=True):
        size = np.linalg.norm(weights, axis=1) * np.linalg.norm(vector)
        assert (np.abs(y - multiply(name, rows, vector, form)) <= 1e-5 * size).all()


# Where blocks have their scales, as float16; columns: of small blocks an odd number.
SCALES_AT = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,)} | dict.fromkeys(
    ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL"), (0,)
)


@pytest.mark.parametrize("name", SCALES_AT)
def test_products_of_whole_numbers_are_exact(each_variant: Any, name: str) -> None:
    """All scales are 1: what is left is what the kernels do with whole numbers, to the last one."""
    kind, rng = TYPES[name], np.random.default_rng(9)
    n_columns = max(kind.block_weights, 3 * 32)
    blocks = rng.integers(0, 256, (N_ROWS, n_columns // kind.block_weights, kind.block_bytes))
    rows = blocks.astype(np.uint8)
    for at in SCALES_AT[name]:
        rows[:, :, at : at + 2] = np.array([1.0], "<f2").view(np.uint8)
    rows = rows.reshape(N_ROWS, -1)
    vector = rng.integers(-3, 4, (1, n_columns)).astype(np.float32)
    vector[0, ::32] = 127  # by which a block is rounded: the scale is 1 or -1
    weights = decode(name, rows, N_ROWS * n_columns).reshape(N_ROWS, -1).astype(np.float64)
    exact = weights @ vector[0]
    assert np.abs(exact).max() < 2**24
    for multiply_rows in ("matvec", "matmul"):
        rig, y = Rig(each_variant), np.zeros((1, N_ROWS), np.float32)
        if multiply_rows == "matvec":
            rig.matvec(name, [rows], vector, y)
        else:
            rig.matmul(name, rows, vector, y)
        rig.run()
        np.testing.assert_array_equal(y[0], exact)


def test_the_notice_of_ggml_is_shipped(native: Any) -> None:
    """NOTICE has the licence of the very version that was compiled."""
    licence = (Path(native.__file__).parent / "LICENSE.ggml").read_text()
    notice = (Path(__file__).parents[2] / "NOTICE").read_text()
    assert "The ggml authors" in licence
    assert [part for part in licence.strip().split("\n\n")[1:] if part not in notice] == []
