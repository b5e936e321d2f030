"""What weights are decoded to: every block of every type, in pieces, without warnings."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from vkmoe.errors import UnsupportedModelError
from vkmoe.quants import HAS_KERNEL, TYPES, decode


@pytest.mark.parametrize("name", [*sorted(HAS_KERNEL), "Q4_1", "IQ3_S", "TQ2_0"])
@pytest.mark.parametrize("n_blocks", [7, 1100])
def test_equal_to_the_package_on_random_bytes(name: str, n_blocks: int) -> None:
    quant_type = TYPES[name]
    rng = np.random.default_rng(n_blocks)
    raw = rng.integers(0, 256, (n_blocks, quant_type.block_bytes), dtype=np.uint8)
    found = decode(name, raw, n_blocks * quant_type.block_weights)
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
    quant_type = TYPES[name]
    raw = np.ones(quant_type.block_bytes, np.uint8)
    raw[at : at + 2] = np.array([scale], "<f2").view(np.uint8)
    assert not np.isfinite(decode(name, raw, quant_type.block_weights)).all()


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
