"""What weights are decoded to, and what types without kernels become: Q8_0, as near as it can be.

Both in any pieces, without warnings.
"""

from __future__ import annotations

import tracemalloc

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from numpy.typing import NDArray

from vkmoe.errors import UnsupportedModelError
from vkmoe.quants import (
    HAS_KERNEL,
    TYPES,
    can_load,
    convert,
    decode,
    device_row_bytes,
    lay_out,
    loaded_type,
    to_device,
)
from vkmoe.quants.convert import round_q8_0

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

CONVERTED = ["F64", "IQ1_M", "IQ1_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_S", "IQ3_XXS", "NVFP4",
             "Q4_1", "Q5_0", "Q5_1", "TQ1_0", "TQ2_0"]  # fmt: skip
NEVER = ["I16", "I32", "I64", "I8", "Q8_1", "Q8_K"]
COLUMNS = 512


def random_rows(kind: str, n_rows: int, seed: int = 3) -> Bytes:
    """Blocks of any bits, NaN and infinite scales among them; F64 of ordinary numbers."""
    rng = np.random.default_rng(seed)
    if kind == "F64":
        return rng.standard_normal((n_rows, COLUMNS)).view(np.uint8)
    return rng.integers(0, 256, (n_rows, TYPES[kind].row_bytes(COLUMNS)), np.uint8)


def unpacked(blocks: Bytes) -> tuple[Floats, Floats]:
    """The steps [n] and values [n, 32] of Q8_0 blocks [n, 34]."""
    step = np.ascontiguousarray(blocks[:, :2]).view("<f2")[:, 0].astype(np.float32)
    return step, decode("Q8_0", blocks, 32 * len(blocks)).reshape(-1, 32)


def test_every_type_is_run_converted_or_refused() -> None:
    """All that the gguf package decodes can be loaded, but whole numbers are no weights."""
    later = {"Q1_0"}  # which newer versions of the package may decode
    assert {kind for kind in TYPES if can_load(kind)} - later == {*HAS_KERNEL, *CONVERTED}
    assert set(TYPES) - later == {*HAS_KERNEL, *CONVERTED, *NEVER}
    for kind in CONVERTED:
        assert loaded_type(kind) == "Q8_0"
    for kind in HAS_KERNEL:
        assert loaded_type(kind) == kind


@pytest.mark.parametrize("kind", CONVERTED)
@pytest.mark.parametrize("chunk", [1, 1000, 1 << 16])
def test_bytes_do_not_depend_on_how_many_rows_are_converted_at_a_time(
    kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = random_rows(kind, 5)
    whole = lay_out(kind, "Q8_0", rows, COLUMNS)
    monkeypatch.setattr(convert, "CHUNK_WEIGHTS", chunk)
    out = np.full((5, device_row_bytes("Q8_0", COLUMNS)), 0xFF, np.uint8)
    assert lay_out(kind, "Q8_0", rows, COLUMNS, out) is out
    assert np.array_equal(out, whole)


@pytest.mark.parametrize("kind", [kind for kind in CONVERTED if kind != "Q5_0"])
def test_weights_are_decoded_rounded_and_laid_out(kind: str) -> None:
    rows = random_rows(kind, 5)
    rounded = round_q8_0(decode(kind, rows, 5 * COLUMNS)).reshape(5, -1)
    assert np.array_equal(lay_out(kind, "Q8_0", rows, COLUMNS), to_device("Q8_0", rounded, COLUMNS))


@pytest.mark.parametrize("kind", sorted(HAS_KERNEL))
def test_a_type_with_kernels_is_laid_out_as_it_is(kind: str) -> None:
    rows = random_rows(kind, 3)
    assert np.array_equal(lay_out(kind, kind, rows, COLUMNS), to_device(kind, rows, COLUMNS))


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_halves_become_float32_exactly(kind: str) -> None:
    rows = random_rows("F16", 3)
    found = lay_out(kind, "F32", rows, COLUMNS)
    np.testing.assert_array_equal(found.view(np.float32).ravel(), decode(kind, rows, 3 * COLUMNS))


def test_q5_0_is_converted_without_any_error() -> None:
    """All quants and steps, the smallest ones too."""
    rows = random_rows("Q5_0", 100)
    rows[0, 0:2] = np.array([1], np.uint16).view(np.uint8)
    found = lay_out("Q5_0", "Q8_0", rows, COLUMNS)
    blocks = np.empty((100 * COLUMNS // 32, 34), np.uint8)
    n_quants = COLUMNS  # the device has the quants of a row first, then the steps
    blocks[:, 2:] = found[:, :n_quants].reshape(-1, 32)
    blocks[:, :2] = found[:, n_quants : n_quants + COLUMNS // 16].reshape(-1, 2)
    wanted = decode("Q5_0", rows, 100 * COLUMNS)
    assert len(np.unique(blocks[:, 2:])) == 32
    np.testing.assert_array_equal(decode("Q8_0", blocks, wanted.size), wanted)


@pytest.mark.parametrize("scale", [1e-12, 3e-8, 1e-6, 1e-4, 0.02, 1.0, 5e6])
def test_no_weight_is_off_by_more_than_half_a_step(scale: float) -> None:
    """Steps that a half only holds roughly are made larger, not too small for the largest."""
    rng = np.random.default_rng(1)
    x = (rng.uniform(-1, 1, (1000, 32)) * scale * rng.uniform(0.5, 1, (1000, 1))).astype(np.float32)
    step, values = unpacked(round_q8_0(x.reshape(-1)))
    assert (np.abs(values - x) <= step[:, None] * np.float32(0.5001)).all()
    largest = np.abs(x).max(axis=1)
    assert (step <= largest / 127 * 1.01 + 2**-24).all(), "no larger than needed"


def test_zeros_stay_zeros() -> None:
    step, values = unpacked(round_q8_0(np.zeros(64, np.float32)))
    assert not step.any() and not values.any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e8, -3e38])
def test_weights_that_cannot_be_held_make_their_block_nan_and_no_other(bad: float) -> None:
    """As an answer of NaN it is found out; a largest possible weight would pass for one."""
    x = np.random.default_rng(2).standard_normal(96).astype(np.float32)
    clean = round_q8_0(x)
    x[40] = bad
    found = round_q8_0(x)
    assert np.isnan(unpacked(found)[1][1]).all()
    assert np.array_equal(found[[0, 2]], clean[[0, 2]])


def test_converting_takes_little_memory() -> None:
    """However large the tensor is: 2 million weights are 8 MiB as float32."""
    rows = np.zeros((2048, TYPES["Q5_1"].row_bytes(1024)), np.uint8)
    out = np.empty((2048, device_row_bytes("Q8_0", 1024)), np.uint8)
    lay_out("Q5_1", "Q8_0", rows[:1], 1024)
    tracemalloc.start()
    lay_out("Q5_1", "Q8_0", rows, 1024, out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


@pytest.mark.parametrize("name", [*sorted(HAS_KERNEL), "Q4_1", "IQ3_S", "TQ2_0"])
@pytest.mark.parametrize("n_blocks", [7, 1100])
def test_equal_to_the_package_on_random_bytes(name: str, n_blocks: int) -> None:
    kind = TYPES[name]
    rng = np.random.default_rng(n_blocks)
    raw = rng.integers(0, 256, (n_blocks, kind.block_bytes), dtype=np.uint8)
    found = decode(name, raw, n_blocks * kind.block_weights)
    with np.errstate(all="ignore"):
        expected = dequantize(raw, gguf.GGMLQuantizationType[name])
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.asarray(expected, np.float32).reshape(-1))


def test_every_exponent_of_mxfp4() -> None:
    """The kernels follow it: the two lowest are subnormal float32, the highest is no NaN."""
    raw = np.zeros((256, 17), np.uint8)
    raw[:, 0] = np.arange(256)
    raw[:, 1:] = np.arange(16) * 17
    found = decode("MXFP4", raw, 256 * 32).reshape(256, 32)
    assert found[0, 1] == 2.0**-128 and found[1, 1] == 2.0**-127
    assert found[127, :8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert found[255, 1] == 2.0**127


@pytest.mark.parametrize(
    ("name", "at"),
    [
        *(("Q2_K", 82), ("Q3_K", 108), ("Q4_K", 0), ("Q5_K", 0), ("Q6_K", 208)),
        *(("Q8_0", 0), ("Q4_0", 0), ("IQ4_NL", 0), ("IQ4_XS", 0)),
    ],
)
@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf])
def test_bad_scales_decode_without_warnings(name: str, at: int, scale: float) -> None:
    kind = TYPES[name]
    raw = np.ones(kind.block_bytes, np.uint8)
    raw[at : at + 2] = np.array([scale], "<f2").view(np.uint8)
    assert not np.isfinite(decode(name, raw, kind.block_weights)).all()


@pytest.mark.parametrize(("name", "dtype"), [("I8", "<i1"), ("I32", "<i4"), ("F64", "<f8")])
def test_plain_numbers_are_cast(name: str, dtype: str) -> None:
    values = np.array([-3, 0, 7, 100], dtype)
    np.testing.assert_array_equal(decode(name, values.view(np.uint8), 4), [-3, 0, 7, 100])


def test_a_type_nobody_decodes_is_refused() -> None:
    raw = np.zeros(TYPES["Q8_K"].block_bytes, np.uint8)
    with pytest.raises(UnsupportedModelError, match="Q8_K"):
        decode("Q8_K", raw, 256)


def test_a_view_of_a_larger_array_decodes_alike() -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (4, 2 * 144), dtype=np.uint8)
    part = rows[::2, :144]
    with np.errstate(all="ignore"):
        expected = np.concatenate([decode("Q4_K", row.copy(), 256) for row in part])
    np.testing.assert_array_equal(decode("Q4_K", part, 512), expected)
