"""Device layouts: where every byte goes, checked by plain loops."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from vkmoe.quants import HAS_KERNEL, TYPES, device_row_bytes, to_device

Bytes = npt.NDArray[np.uint8]
CUTS = {  # of a block, one for each plane
    "Q2_K": [(16, 80), (0, 16), (80, 84)],
    "Q3_K": [(32, 96), (0, 32), (96, 108), (108, 110)],
    "Q6_K": [(0, 128), (128, 192), (192, 208), (208, 210)],
    "IQ4_XS": [(8, 136), (0, 8)],
    "Q8_0": [(2, 34), (0, 2)],
    "Q4_0": [(2, 18), (0, 2)],
    "IQ4_NL": [(2, 18), (0, 2)],
    "MXFP4": [(1, 17), (0, 1)],
    "Q4_1": [(4, 20), (0, 4)],
    "Q5_0": [(6, 22), (2, 6), (0, 2)],
    "Q5_1": [(8, 24), (4, 8), (0, 4)],
    "IQ2_XXS": [(2, 66), (0, 2)],
    "IQ2_XS": [(2, 66), (66, 74), (0, 2)],
    "IQ2_S": [(2, 34), (34, 66), (66, 74), (74, 82), (0, 2)],
    "IQ3_XXS": [(2, 66), (66, 98), (0, 2)],
    "IQ3_S": [(2, 66), (74, 106), (66, 74), (106, 110), (0, 2)],
    "IQ1_S": [(2, 34), (34, 50), (0, 2)],
    "IQ1_M": [(0, 32), (32, 48), (48, 56)],
    "TQ1_0": [(0, 16), (16, 48), (48, 52), (52, 54)],
    "TQ2_0": [(0, 64), (64, 66)],
    "Q1_0": [(2, 18), (0, 2)],
    "Q2_0": [(2, 18), (0, 2)],
    "NVFP4": [(4, 36), (0, 4)],
}
SHAPES = [(1, 1), (3, 1), (5, 3), (2, 8), (7, 9)]  # (rows, blocks of a row)


def random_rows(name: str, n_rows: int, n_blocks: int) -> tuple[Bytes, int]:
    columns = n_blocks * TYPES[name].block_weights
    rng = np.random.default_rng(n_rows * 100 + n_blocks)
    raw = rng.integers(1, 256, (n_rows, TYPES[name].row_bytes(columns)), dtype=np.uint8)
    return raw, columns


def expected_row(name: str, raw: Bytes) -> bytes:
    """The documented layout of one row, one block after the other."""
    size = TYPES[name].block_bytes
    blocks = [raw[at : at + size].tobytes() for at in range(0, len(raw), size)]
    cuts = CUTS.get(name, [])
    row = b"".join(block[a:b] for a, b in cuts for block in blocks) if cuts else raw.tobytes()
    if name == "NVFP4":
        row += np.float32(1).tobytes()
    return row + bytes(-len(row) % 16)


@pytest.mark.parametrize("name", sorted(HAS_KERNEL))
@pytest.mark.parametrize(("n_rows", "n_blocks"), SHAPES)
def test_every_byte_is_where_it_belongs(name: str, n_rows: int, n_blocks: int) -> None:
    raw, columns = random_rows(name, n_rows, n_blocks)
    laid = to_device(name, raw, columns)
    assert laid.shape == (n_rows, device_row_bytes(name, columns))
    assert laid.shape[1] % 16 == 0
    assert [row.tobytes() for row in laid] == [expected_row(name, row) for row in raw]


@pytest.mark.parametrize("name", sorted(HAS_KERNEL))
def test_out_is_filled_and_its_neighbours_are_not_touched(name: str) -> None:
    raw, columns = random_rows(name, 6, 5)
    size = device_row_bytes(name, columns)
    arena = np.full((6, size + 48), 0xAA, np.uint8)
    window = arena[:, 16 : 16 + size]
    assert to_device(name, raw, columns, window) is window
    np.testing.assert_array_equal(window, to_device(name, raw, columns))
    assert (arena[:, :16] == 0xAA).all() and (arena[:, 16 + size :] == 0xAA).all()


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "F32"])
def test_types_that_need_no_change_are_not_copied(name: str) -> None:
    raw, columns = random_rows(name, 3, 4)
    raw.flags.writeable = False
    assert to_device(name, raw, columns) is raw


def test_rows_cut_out_of_a_larger_array() -> None:
    raw, columns = random_rows("Q6_K", 8, 4)
    np.testing.assert_array_equal(
        to_device("Q6_K", raw[::2], columns), to_device("Q6_K", raw, columns)[::2]
    )


def test_no_rows_at_all() -> None:
    assert to_device("Q8_0", np.empty((0, 34), np.uint8), 32).shape == (0, 48)


@pytest.mark.parametrize(("name", "columns", "expected"), [
    ("Q4_K", 2048, 1152), ("Q5_K", 2048, 1408), ("Q6_K", 2048, 1680), ("Q6_K", 256, 224),
    ("MXFP4", 2880, 1536), ("MXFP4", 32, 32), ("Q4_0", 2048, 1152), ("IQ4_NL", 96, 64),
    ("IQ4_XS", 256, 144), ("Q2_K", 2048, 672), ("Q3_K", 2048, 880), ("Q3_K", 256, 112),
    ("Q8_0", 2048, 2176), ("Q8_0", 32, 48), ("F16", 3, 16), ("F32", 5, 32), ("BF16", 8, 16),
])  # fmt: skip
def test_row_sizes(name: str, columns: int, expected: int) -> None:
    assert device_row_bytes(name, columns) == expected


def test_rows_of_nvfp4_end_with_their_scale() -> None:
    raw, columns = random_rows("NVFP4", 3, 5)
    scales = np.array([0.5, 3, 7], np.float32)
    laid = to_device("NVFP4", raw, columns, scale=scales)
    np.testing.assert_array_equal(laid[:, 180:184].copy().view("<f4")[:, 0], scales)
    np.testing.assert_array_equal(
        to_device("NVFP4", raw, columns, scale=2.0)[:, :180], laid[:, :180]
    )


def test_wrong_shapes_are_our_own_bug() -> None:
    raw, columns = random_rows("Q6_K", 2, 2)
    with pytest.raises(AssertionError):
        to_device("Q6_K", raw, columns + 256)
    with pytest.raises(AssertionError):
        to_device("Q6_K", raw, columns, np.empty((2, 16), np.uint8))
    with pytest.raises(AssertionError):
        device_row_bytes("Q8_1", 32)
