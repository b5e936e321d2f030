"""What weights are decoded to, beside the `gguf` package and beside plain loops."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from vkmoe.quants import HAS_KERNEL, TYPES, decode, lay_out, to_device


@pytest.mark.parametrize("name", ["Q1_0", "Q2_0"])
def test_types_that_the_package_does_not_decode(name: str) -> None:
    """d, then a bit or two of each weight, in the order of the weights."""
    kind, n_bits = TYPES[name], {"Q1_0": 1, "Q2_0": 2}[name]
    blocks = np.random.default_rng(5).integers(0, 256, (9, kind.block_bytes), np.uint8)
    blocks[:, :2] = np.linspace(-2, 2, 9).astype("<f2")[:, None].view(np.uint8)
    found = decode(name, blocks, 9 * kind.block_weights).reshape(9, -1)
    for block, values in zip(blocks, found, strict=True):
        d = float(block[:2].view("<f2")[0])
        bits = int.from_bytes(block[2:].tobytes(), "little")
        for i, value in enumerate(values):
            quant = bits >> (n_bits * i) & (1 << n_bits) - 1
            assert value == d * (2 * quant - 1 if name == "Q1_0" else quant - 1)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_halves_become_float32_exactly(kind: str) -> None:
    rows = np.random.default_rng(3).integers(0, 256, (3, 1024), np.uint8)
    found = lay_out(kind, "F32", rows, 512)
    np.testing.assert_array_equal(found.view(np.float32).ravel(), decode(kind, rows, 3 * 512))
    np.testing.assert_array_equal(lay_out(kind, kind, rows, 512), to_device(kind, rows, 512))


@pytest.mark.parametrize("name", sorted(HAS_KERNEL - {"Q1_0", "Q2_0"}))
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


def test_a_view_of_a_larger_array_decodes_alike() -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (4, 2 * 144), dtype=np.uint8)
    part = rows[::2, :144]
    with np.errstate(all="ignore"):
        expected = np.concatenate([decode("Q4_K", row.copy(), 256) for row in part])
    np.testing.assert_array_equal(decode("Q4_K", part, 512), expected)
