"""This module lays the rows of a weight matrix out for GPU memory.

A row starts at a multiple of 16 bytes and is read in 16-byte words (uvec4).
Q4_K (9 words per superblock) and Q5_K (11 words) are kept as the file has them; F32, F16 and BF16
are padded with zeros at the end of the row.  The others are taken apart into planes, because their
blocks are not aligned.  Of a row of n blocks:

    Q2_K          [bit pairs: n x 64 B][scales and minima: n x 16][d, dmin: n x 4]
    Q3_K          [bit pairs: n x 64 B][third bits: n x 32][scales: n x 12][d: n x 2]
    Q6_K          [low nibbles: n x 128 B][upper bits: n x 64][scales: n x 16][d: n x 2]
    IQ4_XS        [nibbles: n x 128 B][d and scales: n x 8]
    Q8_0          [quants: n x 32 B][d: n x 2]
    Q4_0, IQ4_NL  [nibbles: n x 16 B][d: n x 2]
    MXFP4         [nibbles: n x 16 B][exponents: n x 1]

with zeros after the last plane up to 16 bytes.  Values are never changed: `from_device` is the
exact inverse.  Does not decode, and does not know which tensor a row belongs to.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vkmoe.quants.decode import Bytes
from vkmoe.quants.types import HAS_KERNEL, TYPES

__all__ = ["ROW_ALIGNMENT", "device_row_bytes", "from_device", "to_device"]

ROW_ALIGNMENT = 16


class _Plane(NamedTuple):
    """Gathers `size` bytes at byte `at` of every block into one run per row."""

    at: int
    size: int


_PLANES: dict[str, tuple[_Plane, ...]] = {
    "Q2_K": (_Plane(16, 64), _Plane(0, 16), _Plane(80, 4)),
    "Q3_K": (_Plane(32, 64), _Plane(0, 32), _Plane(96, 12), _Plane(108, 2)),
    "Q6_K": (_Plane(0, 128), _Plane(128, 64), _Plane(192, 16), _Plane(208, 2)),
    "IQ4_XS": (_Plane(8, 128), _Plane(0, 8)),
    "Q8_0": (_Plane(2, 32), _Plane(0, 2)),
    "Q4_0": (_Plane(2, 16), _Plane(0, 2)),
    "IQ4_NL": (_Plane(2, 16), _Plane(0, 2)),
    "MXFP4": (_Plane(1, 16), _Plane(0, 1)),
}


def device_row_bytes(type_name: str, columns: int) -> int:
    """Count the bytes one row of `columns` weights takes on the device: a multiple of 16."""
    assert type_name in HAS_KERNEL, type_name
    row_bytes = TYPES[type_name].row_bytes(columns)
    return -(-row_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT


def to_device(type_name: str, data: Bytes, columns: int, out: Bytes | None = None) -> Bytes:
    """Lay out file rows for the device: uint8 [rows, row_bytes] -> [rows, device_row_bytes].

    Without `out`, types that need no change come back as the very same memory (no copy).
    `out` is written in full, padding included, and never read, so it may be mapped GPU memory.
    """
    _check(data, TYPES[type_name].row_bytes(columns))
    device_bytes = device_row_bytes(type_name, columns)
    planes = _PLANES.get(type_name)
    if out is None:
        if planes is None and device_bytes == data.shape[1]:
            return data
        out = np.empty((len(data), device_bytes), np.uint8)
    _check(out, device_bytes, len(data))
    if planes is None:
        end = data.shape[1]
        out[:, :end] = data
    else:
        end = 0
        for plane in planes:
            block, run = _views(type_name, plane, data, out, end)
            run[...] = block
            end += run.shape[1] * plane.size
    if end < device_bytes:
        out[:, end:] = 0
    return out


def from_device(type_name: str, data: Bytes, columns: int, out: Bytes | None = None) -> Bytes:
    """Undo `to_device` exactly: [rows, device_row_bytes] -> uint8 [rows, row_bytes]."""
    _check(data, device_row_bytes(type_name, columns))
    row_bytes = TYPES[type_name].row_bytes(columns)
    if out is None:
        out = np.empty((len(data), row_bytes), np.uint8)
    _check(out, row_bytes, len(data))
    planes = _PLANES.get(type_name)
    if planes is None:
        out[...] = data[:, :row_bytes]
        return out
    start = 0
    for plane in planes:
        block, run = _views(type_name, plane, out, data, start)
        block[...] = run
        start += run.shape[1] * plane.size
    return out


def _views(
    type_name: str, plane: _Plane, file_rows: Bytes, device_rows: Bytes, start: int
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void]]:
    """View one plane in the file's blocks and in the device rows, both [rows, n blocks].

    An element is `plane.size` bytes as one opaque item, so NumPy moves whole pieces of a block.
    """
    block_bytes = TYPES[type_name].block_bytes
    n_rows, n_blocks = len(file_rows), file_rows.shape[1] // block_bytes
    piece = np.dtype((np.void, plane.size))
    block = _strided(file_rows, plane.at, piece, (n_rows, n_blocks), block_bytes)
    run = _strided(device_rows, start, piece, (n_rows, n_blocks), plane.size)
    return block, run


def _strided(
    rows: Bytes, at: int, piece: np.dtype[np.void], shape: tuple[int, int], stride: int
) -> npt.NDArray[np.void]:
    """View `rows` from byte `at` on as [rows, pieces], one piece every `stride` bytes."""
    if 0 in shape:
        return np.empty(shape, piece)
    start = rows[:, at : at + (shape[1] - 1) * stride + piece.itemsize]
    first = np.lib.stride_tricks.as_strided(
        start, (*shape, piece.itemsize), (rows.strides[0], stride, 1)
    )
    return first.view(piece)[..., 0]


def _check(rows: Bytes, row_bytes: int, n_rows: int | None = None) -> None:
    """Assert what must hold: uint8 [n_rows, row_bytes], each row contiguous."""
    assert rows.dtype == np.uint8 and rows.ndim == 2, (rows.dtype, rows.shape)
    assert rows.shape[1] == row_bytes, (rows.shape, row_bytes)
    assert n_rows is None or len(rows) == n_rows, (rows.shape, n_rows)
    assert rows.size == 0 or rows.shape[1] == 1 or rows.strides[1] == 1, rows.strides
