"""ggml's kernels as they were built: what they take, and their products beside the twin's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vkmoe.quants import decode
from vkmoe.quants.types import BY_ID, TYPES, Bytes
from vkmoe.reference.inputs import multiply
from vkmoe.selftest.inputs import WEIGHT_TYPES, random_rows

# Read as they are in a file, though GPUs have no kernel for them.
OTHERS = ("Q4_1", "Q5_0", "Q5_1")
N_ROWS, N_COLUMNS = 130, 768


def of_type(native: Any, name: str) -> dict[str, Any]:
    (found,) = (format for format in native.formats() if format["type"] == TYPES[name].ggml_id)
    return dict(found)


def rows_of(name: str, rng: np.random.Generator) -> Bytes:
    if name in WEIGHT_TYPES:
        return random_rows(name, N_ROWS, N_COLUMNS, rng)
    kind = TYPES[name]
    n_blocks = N_ROWS * N_COLUMNS // kind.block_weights
    blocks = rng.integers(0, 256, (n_blocks, kind.block_bytes), np.uint8)
    n_halves = 1 if name == "Q5_0" else 2
    halves = rng.uniform(-1, 1, (len(blocks), n_halves)).astype("<f2")
    blocks[:, : 2 * n_halves] = halves.view(np.uint8).reshape(len(blocks), -1)
    return blocks.reshape(N_ROWS, -1)


def test_every_type_that_is_multiplied_has_the_blocks_of_the_table(native: Any) -> None:
    """The structs of ggml are its own: this is what pins those that were compiled."""
    assert native.ggml_version == "0.3.36"
    found = {format["type"]: format for format in native.formats()}
    assert {TYPES[name].ggml_id for name in (*WEIGHT_TYPES, *OTHERS)} <= set(found)
    for number, format in found.items():
        if number in BY_ID:
            kind = BY_ID[number]
            blocks = (format["block_weights"], format["block_bytes"])
            assert blocks == (kind.block_weights, kind.block_bytes), kind
            assert BY_ID[format["input"]].name in ("F32", "F16", "BF16", "Q8_0", "Q8_1", "Q8_K")


@pytest.mark.parametrize("name", [*WEIGHT_TYPES, *OTHERS])
def test_products_are_those_of_the_twin(native: Any, name: str) -> None:
    """Beside float64 they differ by the rounding of the vector to 8 bits."""
    rng = np.random.default_rng(TYPES[name].ggml_id)
    rows, vector = rows_of(name, rng), rng.standard_normal(N_COLUMNS, np.float32)
    vector[256:512] = 0  # a block without a scale
    form: int = of_type(native, name)["input"]
    number = TYPES[name].ggml_id
    found = native.multiply(native.Pool(2), number, rows, vector).astype(np.float64)
    weights = decode(name, rows, N_ROWS * N_COLUMNS).reshape(N_ROWS, -1).astype(np.float64)
    size = np.linalg.norm(weights, axis=1) * np.linalg.norm(vector)
    assert (np.abs(found - multiply(name, rows, vector, form)) <= 1e-5 * size).all()
    exact = weights @ vector.astype(np.float64)
    assert np.linalg.norm(found - exact) <= 0.025 * np.linalg.norm(exact)


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "F32"])
def test_bits_do_not_depend_on_the_number_of_threads(native: Any, name: str) -> None:
    rng = np.random.default_rng(1)
    rows, vector = rows_of(name, rng), rng.standard_normal(N_COLUMNS, np.float32)
    pools = [native.Pool(n) for n in (1, 2, 3, 4, 8)]
    assert [pool.n_threads for pool in pools] == [1, 2, 3, 4, 8]
    number = TYPES[name].ggml_id
    found = [native.multiply(pool, number, rows, vector) for pool in pools * 50]
    assert all((each.view(np.uint32) == found[0].view(np.uint32)).all() for each in found)


def test_what_does_not_fit_is_refused(native: Any) -> None:
    """ggml itself would end the process."""
    pool, rows = native.Pool(1), np.zeros((4, 144), np.uint8)
    q4_k = TYPES["Q4_K"].ggml_id
    vector = np.zeros(256, np.float32)
    assert native.multiply(pool, q4_k, rows, vector).tolist() == [0.0] * 4
    for number, given, values in (
        (q4_k, rows, np.zeros(255, np.float32)),
        (q4_k, rows, np.zeros(0, np.float32)),
        (q4_k, rows[:, :143], vector),
        (q4_k, rows[0], vector),
        (q4_k, rows, vector.reshape(1, -1)),
        (15, rows, vector),  # q8_K: a form of vectors, not of weights
        (999, rows, vector),
        (-1, rows, vector),
    ):
        with pytest.raises(ValueError):
            native.multiply(pool, number, np.ascontiguousarray(given), values)
    with pytest.raises(ValueError):
        native.Pool(0)


def test_the_notice_of_ggml_is_shipped(native: Any) -> None:
    notice = Path(native.__file__).parent / "LICENSE.ggml"
    assert "The ggml authors" in notice.read_text()
