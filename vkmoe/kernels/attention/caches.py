"""This module has the twin of KV caches: how rows are rounded, and where they lie, by type.

The layout of a region is described in vkmoe/kv_types.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.choices import KvType
from vkmoe.kv_types import BLOCK_DIMS, region_bytes, row_parts

Floats = NDArray[np.floating]
Bytes = NDArray[np.uint8]
# Of rows, in [n_regions, n_kv_heads, context].
Place = tuple[int | slice, int | slice, int | slice | NDArray[np.integer]]
HALF_MAX, LARGEST_QUANT = 65504.0, 127
SCALE = np.float32(1 / LARGEST_QUANT)  # kernels multiply by it, in float32
FLOATS: dict[KvType, type[np.floating]] = {"f16": np.float16, "f32": np.float32}


def cache_row(rows: Floats, kv_type: KvType) -> Floats:
    """Round rows [..., row_dim] as a cache holds them."""
    return _decode(_encode(rows, kv_type), kv_type, rows.shape[-1])


def rounding_step(rows: Floats, kv_type: KvType) -> Floats:
    """Bound how far apart two roundings of nearly equal rows [..., row_dim] may be.

    They are neighbours; of q8_0, the scales of a block may be neighbours too.
    """
    size = np.abs(rows.astype(np.float64))
    if kv_type == "f32":
        return np.zeros_like(size)
    if kv_type == "f16":
        return (0.2 + size) * 2.0**-10
    largest = _blocks(size).max(axis=-1, keepdims=True)
    steps = largest * (1 / LARGEST_QUANT + 2.0**-10) * np.ones(BLOCK_DIMS)
    return _rows(steps, rows.shape[-1])


class CacheShape(NamedTuple):
    """Counts what a cache holds; `row_dim` numbers are a row."""

    n_regions: int
    n_kv_heads: int
    context: int
    row_dim: int


class KvRows:
    """Holds a cache as devices do: `data`, its bytes, and views of them by row."""

    def __init__(self, kv_type: KvType, shape: CacheShape, data: Bytes | int = 0) -> None:
        """Take the bytes of a cache, or make one of which each byte is that number."""
        self.kv_type, self.shape = kv_type, shape
        n_rows = shape.n_kv_heads * shape.context
        n_bytes = region_bytes(kv_type, n_rows, shape.row_dim)
        filled = np.full(shape.n_regions * n_bytes, data, np.uint8)
        self.data: Bytes = filled if isinstance(data, int) else data
        assert self.data.shape == filled.shape, (shape, self.data.shape)
        # [n_regions, n_kv_heads, context, bytes of a row]: numbers, and scales if there are any.
        self._parts, first, regions = [], 0, self.data.reshape(shape.n_regions, n_bytes)
        for row_bytes in row_parts(kv_type, shape.row_dim):
            part = regions[:, first : first + n_rows * row_bytes]
            self._parts.append(part.reshape(*shape[:-1], row_bytes))
            first += n_rows * row_bytes

    def values(self) -> Floats:
        """Decode all rows: [n_regions, n_kv_heads, context, row_dim]."""
        return _decode(self._parts, self.kv_type, self.shape.row_dim)

    def write(self, place: Place, rows: Floats) -> None:
        """Round rows [..., row_dim] and put them in their place."""
        for mine, part in zip(self._parts, _encode(rows, self.kv_type), strict=True):
            mine[place] = part

    def take(self, other: KvRows, place: Place) -> None:
        """Make some rows the same as in another cache, byte by byte."""
        for mine, part in zip(self._parts, other._parts, strict=True):
            mine[place] = part[place]


def _encode(rows: Floats, kv_type: KvType) -> list[Bytes]:
    """Make the bytes of each part [..., bytes] of rows [..., row_dim].

    Halves round to nearest even and saturate. A scale is a 127th of a block's largest magnitude; a
    quant is the number nearest to value / scale, at a tie the one farther from zero.
    """
    singles = rows.astype(np.float32)
    if kv_type != "q8_0":
        bound = HALF_MAX if kv_type == "f16" else np.inf
        return [_bytes(np.clip(singles, -bound, bound).astype(FLOATS[kv_type]))]
    blocks = _blocks(singles)
    largest = np.abs(blocks).max(axis=-1)
    highest = np.finfo(np.float32).max
    scales = np.minimum(np.minimum(largest, highest) * SCALE, np.float32(HALF_MAX))
    scales = scales.astype(np.float16)
    wide = scales.astype(np.float64)[..., None]
    with np.errstate(all="ignore"):
        size = np.minimum(np.abs(blocks.astype(np.float64)), LARGEST_QUANT * wide)
        quants = np.copysign(np.floor(size / wide + 0.5), blocks)
    quants = np.where(wide > 0, quants, 0).astype(np.int8)
    padding = [(0, 0)] * (scales.ndim - 1) + [(0, scales.shape[-1] % 2)]
    return [_bytes(_rows(quants, rows.shape[-1])), _bytes(np.pad(scales, padding))]


def _decode(parts: list[Bytes], kv_type: KvType, row_dim: int) -> Floats:
    """Make rows [..., row_dim] of the bytes of their parts."""
    if kv_type != "q8_0":
        return np.ascontiguousarray(parts[0]).view(FLOATS[kv_type])
    quants, scales = (np.ascontiguousarray(part) for part in parts)
    blocks = _blocks(quants.view(np.int8).astype(np.float32))
    scale = scales.view(np.float16)[..., : blocks.shape[-2], None]
    return _rows(blocks * scale.astype(np.float32), row_dim)


def _blocks(rows: NDArray[Any]) -> NDArray[Any]:
    """Split rows [..., row_dim] into blocks [..., n_blocks, 32], the last filled up with zeros."""
    missing = -rows.shape[-1] % BLOCK_DIMS
    padded = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, missing)])
    return padded.reshape(*rows.shape[:-1], padded.shape[-1] // BLOCK_DIMS, BLOCK_DIMS)


def _rows(blocks: NDArray[Any], row_dim: int) -> NDArray[Any]:
    """Join blocks to rows again."""
    n_numbers = blocks.shape[-2] * BLOCK_DIMS
    return blocks.reshape(*blocks.shape[:-2], n_numbers)[..., :row_dim]


def _bytes(array: NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(array).view(np.uint8)
