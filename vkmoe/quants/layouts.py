"""This module lays the rows of a weight matrix out as kernels read them.

CPUs read them as a file has them (layout "file"). GPUs read "planes": a row starts at a multiple of
16 bytes and is read in 16-byte words (uvec4). There rows of Q4_K and Q5_K are as the file has them,
and so are plain numbers. The other types are taken apart into planes, because their blocks are not
aligned. Zeros follow up to 16 bytes. Values are never changed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vkmoe.choices import Layout
from vkmoe.quants.decoding import decode
from vkmoe.quants.types import HAS_KERNEL, TYPES, Bytes, Floats

ROW_ALIGNMENT = 16


class _Plane(NamedTuple):
    """Gathers `size` bytes at byte `at` of every block into one run per row."""

    at: int
    size: int


_PLANES: dict[str, tuple[_Plane, ...]] = {  # in the order of their runs in a row
    # bit pairs; scales and minima; d and dmin
    "Q2_K": (_Plane(16, 64), _Plane(0, 16), _Plane(80, 4)),
    # bit pairs; third bits; scales; d
    "Q3_K": (_Plane(32, 64), _Plane(0, 32), _Plane(96, 12), _Plane(108, 2)),
    # low nibbles; upper bits; scales; d
    "Q6_K": (_Plane(0, 128), _Plane(128, 64), _Plane(192, 16), _Plane(208, 2)),
    # nibbles; d and scales
    "IQ4_XS": (_Plane(8, 128), _Plane(0, 8)),
    # bit pairs; d
    "TQ2_0": (_Plane(0, 64), _Plane(64, 2)),
    # trits of the first bytes; those of the next; the last ones; d
    "TQ1_0": (_Plane(0, 16), _Plane(16, 32), _Plane(48, 4), _Plane(52, 2)),
    # indices; signs and scales; d
    "IQ3_XXS": (_Plane(2, 64), _Plane(66, 32), _Plane(0, 2)),
    # indices; signs; upper bits; scales; d
    "IQ3_S": (_Plane(2, 64), _Plane(74, 32), _Plane(66, 8), _Plane(106, 4), _Plane(0, 2)),
    # indices, signs and scales; d
    "IQ2_XXS": (_Plane(2, 64), _Plane(0, 2)),
    # indices and signs; scales; d
    "IQ2_XS": (_Plane(2, 64), _Plane(66, 8), _Plane(0, 2)),
    # indices; signs; upper bits; scales; d
    "IQ2_S": (_Plane(2, 32), _Plane(34, 32), _Plane(66, 8), _Plane(74, 8), _Plane(0, 2)),
    # indices; upper bits; d, or scales with it
    "IQ1_S": (_Plane(2, 32), _Plane(34, 16), _Plane(0, 2)),
    "IQ1_M": (_Plane(0, 32), _Plane(32, 16), _Plane(48, 8)),
    # nibbles; fifth bits; d, or d and m
    "Q5_0": (_Plane(6, 16), _Plane(2, 4), _Plane(0, 2)),
    "Q5_1": (_Plane(8, 16), _Plane(4, 4), _Plane(0, 4)),
    # quants, nibbles, pairs or bits; d, d and m, scales, or the exponent
    "Q8_0": (_Plane(2, 32), _Plane(0, 2)),
    "Q4_0": (_Plane(2, 16), _Plane(0, 2)),
    "IQ4_NL": (_Plane(2, 16), _Plane(0, 2)),
    "Q4_1": (_Plane(4, 16), _Plane(0, 4)),
    "Q2_0": (_Plane(2, 16), _Plane(0, 2)),
    "Q1_0": (_Plane(2, 16), _Plane(0, 2)),
    "NVFP4": (_Plane(4, 32), _Plane(0, 4)),  # and, behind all, the scale of the row as float32
    "MXFP4": (_Plane(1, 16), _Plane(0, 1)),
}


# Types whose matrices have a scale in a tensor of its own: it becomes that of each row.
HAS_ROW_SCALE = frozenset({"NVFP4"})


def device_row_bytes(type_name: str, columns: int, layout: Layout = "planes") -> int:
    """Count the bytes one row of `columns` weights takes on the device: in planes whole 16s."""
    if layout == "file":
        return TYPES[type_name].row_bytes(columns)
    assert type_name in HAS_KERNEL, type_name
    return -(-used_row_bytes(type_name, columns) // ROW_ALIGNMENT) * ROW_ALIGNMENT


def used_row_bytes(type_name: str, columns: int) -> int:
    """Count the bytes of a row in planes that kernels read: all but what fills up the last 16."""
    return TYPES[type_name].row_bytes(columns) + 4 * (type_name in HAS_ROW_SCALE)


def to_device(
    type_name: str,
    data: Bytes,
    columns: int,
    out: Bytes | None = None,
    layout: Layout = "planes",
    scale: float | Floats = 1.0,
) -> Bytes:
    """Lay out file rows for the device: uint8 [rows, row_bytes] -> [rows, device_row_bytes].

    `scale` is what all weights, or those of each row, are multiplied by, in planes of types that
    have one for a row.
    Without `out`, types that need no change come back as the very same memory (no copy).
    `out` is written in full, padding included, and never read, so it may be mapped GPU memory.
    """
    _check(data, len(data), TYPES[type_name].row_bytes(columns))
    device_bytes = device_row_bytes(type_name, columns, layout)
    planes = _PLANES.get(type_name) if layout == "planes" else None
    if out is None:
        if planes is None and device_bytes == data.shape[1]:
            return data
        out = np.empty((len(data), device_bytes), np.uint8)
    _check(out, len(data), device_bytes)
    end = data.shape[1]
    if planes is None:
        out[:, :end] = data
    else:
        start = _fill_planes(out, data, TYPES[type_name].block_bytes, planes)
        if type_name in HAS_ROW_SCALE:
            out[:, start : start + 4] = np.full(len(data), scale, "<f4")[:, None].view(np.uint8)
            end = start + 4
    out[:, end:] = 0
    return out


def _fill_planes(out: Bytes, data: Bytes, block_bytes: int, planes: tuple[_Plane, ...]) -> int:
    """Gather the planes of rows, one behind the other; return where they end in a row of `out`."""
    blocks = data.reshape(len(data), data.shape[1] // block_bytes, block_bytes)
    start = 0
    for plane in planes:
        # Pieces are opaque items, so that NumPy moves each as a whole.
        piece = np.dtype((np.void, plane.size))
        run = out[:, start : start + blocks.shape[1] * plane.size]
        run.view(piece)[...] = blocks[:, :, plane.at : plane.at + plane.size].view(piece)[..., 0]
        start += run.shape[1]
    return start


def lay_out(
    file_type: str,
    kind: str,
    rows: Bytes,
    columns: int,
    out: Bytes | None = None,
    scale: float = 1.0,
) -> Bytes:
    """Lay out file rows, uint8 [n, row_bytes], as the device has them: in their type, or as F32."""
    if kind != file_type:
        assert kind == "F32", (file_type, kind)
        rows = decode(file_type, rows, len(rows) * columns).view(np.uint8).reshape(len(rows), -1)
    return to_device(kind, rows, columns, out=out, scale=scale)


def _check(rows: Bytes, n_rows: int, row_bytes: int) -> None:
    """Assert what must hold: uint8 [n_rows, row_bytes], each row contiguous."""
    assert rows.dtype == np.uint8 and rows.shape == (n_rows, row_bytes), (rows.dtype, rows.shape)
    assert rows.size == 0 or row_bytes == 1 or rows.strides[1] == 1, rows.strides
