"""This module has the twin of KV caches: how rows are rounded, and where they lie, by type.

The layout of a region is described in vkmoe/kv_types.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.choices import KvType
from vkmoe.kv_types import BLOCK_BYTES, BLOCK_DIMS, region_bytes, row_parts

Floats = NDArray[np.floating]
Wide = NDArray[np.float64]
Bytes = NDArray[np.uint8]
# Of rows, in [n_regions, n_kv_heads, context].
Place = tuple[int | slice, int | slice, int | slice | NDArray[np.integer]]
HALF_MAX = 65504.0
FLOATS: dict[KvType, type[np.floating]] = {"f16": np.float16, "f32": np.float32}


def cache_row(rows: Floats, kv_type: KvType) -> Floats:
    """Round rows [..., row_dim] as a cache holds them."""
    return _decode(_encode(rows, kv_type), kv_type, rows.shape[-1])


def rounding_step(rows: Floats, kv_type: KvType) -> Floats:
    """Bound how far apart two roundings of nearly equal rows [..., row_dim] may be.

    They are neighbours; scales and minima of a block may be neighbours too.
    """
    size = np.abs(rows.astype(np.float64))
    if kv_type == "f32":
        return np.zeros_like(size)
    if kv_type == "f16":
        return (0.2 + size) * 2.0**-10
    largest = _blocks(size).max(axis=-1, keepdims=True)
    # Of q5_1, a 31st of a range, which is at most twice the largest.
    share = {"q8_0": 1 / 127, "q5_1": 2 / 31, "q4_0": 1 / 8}[kv_type]
    return _rows(largest * (share + 2.0**-10) * np.ones(BLOCK_DIMS), rows.shape[-1])


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


def hadamard(rows: Floats, block: int) -> Wide:
    """Transform blocks of rows [..., row_dim] by the Walsh-Hadamard matrix over the root of its
    size, which is its own inverse; blocks of 1 are what they were."""
    matrix: Wide = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    *before, row_dim = rows.shape
    blocks = rows.astype(np.float64).reshape(*before, row_dim // block, block)
    transformed: Wide = blocks @ matrix / np.sqrt(block)
    return transformed.reshape(rows.shape)


def _encode(rows: Floats, kv_type: KvType) -> list[Bytes]:
    """Make the bytes of each part [..., bytes] of rows [..., row_dim]: numbers, what blocks share.

    Halves round to nearest even and saturate.
    """
    singles = rows.astype(np.float32)
    if kv_type not in BLOCK_BYTES:
        bound = HALF_MAX if kv_type == "f16" else np.inf
        return [_bytes(np.clip(singles, -bound, bound).astype(FLOATS[kv_type]))]
    with np.errstate(all="ignore"):
        if kv_type == "q5_1":
            return _encode_q5_1(singles)
        return _encode_scaled(singles, kv_type)


def _encode_scaled(rows: NDArray[np.float32], kv_type: KvType) -> list[Bytes]:
    """Make the parts of q8_0 or q4_0: quants, and one scale a block.

    A scale is a 127th of a block's largest magnitude, or an eighth of the number that has it,
    negated; a quant is the number nearest to value / scale, at a tie the one farther from zero.
    """
    blocks, largest = _blocks(rows), np.finfo(np.float32).max
    damage = np.where(np.isnan(blocks).any(axis=-1), np.float32(np.nan), np.float32(0))
    lowest, highest = _extremes(rows, largest)
    extreme = np.where(-lowest >= highest, lowest, highest)
    share = np.float32(-1 / 8)
    if kv_type == "q8_0":
        extreme, share = np.abs(extreme), np.float32(1 / 127)
    scales = (np.clip(extreme * share, -HALF_MAX, HALF_MAX) + damage).astype(np.float16)
    scale = scales.astype(np.float64)[..., None]
    most = 127 if kv_type == "q8_0" else 8
    size = _nearest(np.abs(blocks.astype(np.float64)), np.abs(scale), most)
    quants = np.where((blocks < 0) != (scale < 0), -size, size)
    padding = [(0, 0)] * (scales.ndim - 1) + [(0, scales.shape[-1] % 2)]
    numbers = _rows(quants, rows.shape[-1])
    packed: Bytes = _bytes(numbers.astype(np.int8))
    if kv_type == "q4_0":
        packed = _pack_nibbles((np.minimum(numbers, 7) + 8).astype(np.uint8))
    return [packed, _bytes(np.pad(scales, padding))]


def _encode_q5_1(rows: NDArray[np.float32]) -> list[Bytes]:
    """Make the parts of q5_1: quants, and of each block a scale, a minimum and fifth bits.

    A scale is a 31st of a block's range; a quant is the number nearest to (value - minimum) /
    scale, at a tie the larger one.
    """
    damage = np.where(np.isnan(_blocks(rows)).any(axis=-1), np.float32(np.nan), np.float32(0))
    lowest, highest = _extremes(rows, np.float32(HALF_MAX))
    scales = ((highest - lowest) * np.float32(1 / 31) + damage).astype(np.float16)
    minima = np.where(np.isnan(damage), np.float32(0), lowest).astype(np.float16)
    blocks = np.clip(_blocks(rows), np.float32(-HALF_MAX), np.float32(HALF_MAX))
    above = np.maximum(blocks - minima.astype(np.float32)[..., None], np.float32(0))
    sizes = _nearest(above.astype(np.float64), scales.astype(np.float64)[..., None], 31)
    quants = _rows(sizes, rows.shape[-1]).astype(np.uint8)
    padded = _blocks(quants).reshape(*scales.shape, 4, 2, 4)  # [blocks, unit, half, byte]
    places = (2 * np.arange(4)[:, None] + np.arange(2)).astype(np.uint8)[..., None]
    fifth_bits = np.bitwise_or.reduce((padded >> 4) << places, axis=(-3, -2))
    numbers = np.stack([scales, minima], axis=-1)
    behind = np.concatenate([_bytes(numbers), fifth_bits], axis=-1)
    n_bytes = scales.shape[-1] * BLOCK_BYTES["q5_1"]
    return [_pack_nibbles(quants), behind.reshape(*rows.shape[:-1], n_bytes)]


def _extremes(rows: NDArray[np.float32], bound: np.float32) -> tuple[Floats, Floats]:
    """Find the lowest and the highest number of each block [..., n_blocks], within a bound."""
    missing = -rows.shape[-1] % BLOCK_DIMS
    # What fills up the last block is a number that it has.
    padded = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, missing)], mode="edge")
    blocks = np.clip(np.nan_to_num(_blocks(padded), posinf=np.inf, neginf=-np.inf), -bound, bound)
    return blocks.min(axis=-1), blocks.max(axis=-1)


def _nearest(sizes: Floats, scale: Floats, most: int) -> Floats:
    """Return the whole number nearest to size / scale, the larger of two; 0 without a scale."""
    return np.where(scale > 0, np.floor(np.minimum(sizes, most * scale) / scale + 0.5), 0)


def _pack_nibbles(quants: Bytes) -> Bytes:
    """Put the lowest 4 bits of quants [..., row_dim] into bytes [..., row_dim / 2].

    Of 8 numbers in a row, byte i has those of number i and, above them, of number 4 + i.
    """
    *before, row_dim = quants.shape
    units = (quants & 15).reshape(*before, row_dim // 8, 2, 4)
    packed = units[..., 0, :] | units[..., 1, :] << 4
    return packed.astype(np.uint8).reshape(*before, row_dim // 2)


def _decode(parts: list[Bytes], kv_type: KvType, row_dim: int) -> Floats:
    """Make rows [..., row_dim] of the bytes of their parts."""
    if kv_type not in BLOCK_BYTES:
        return np.ascontiguousarray(parts[0]).view(FLOATS[kv_type])
    packed, behind = (np.ascontiguousarray(part) for part in parts)
    if kv_type == "q8_0":
        quants = _blocks(packed.view(np.int8).astype(np.float32))
    else:
        quants = _blocks(_unpack_nibbles(packed).astype(np.float32))
    if kv_type == "q5_1":
        shared = behind.reshape(*quants.shape[:-1], BLOCK_BYTES[kv_type])
        numbers = np.ascontiguousarray(shared[..., :4]).view(np.float16).astype(np.float32)
        fifths = _fifth_bits(shared[..., 4:]).reshape(quants.shape)
        return _rows((quants + 16 * fifths) * numbers[..., :1] + numbers[..., 1:], row_dim)
    scale = behind.view(np.float16)[..., : quants.shape[-2], None].astype(np.float32)
    return _rows((quants - 8 * (kv_type == "q4_0")) * scale, row_dim)


def _fifth_bits(behind: Bytes) -> Floats:
    """Take the fifth bits of blocks [..., 4 bytes] apart: [..., unit, half, byte], 0 or 1."""
    places = 2 * np.arange(4)[:, None] + np.arange(2)
    bits = behind[..., None, None, :].astype(np.int64) >> places[..., None] & 1
    return bits.astype(np.float32)


def _unpack_nibbles(packed: Bytes) -> Bytes:
    """Take the numbers out of bytes again, as `_pack_nibbles` packed them."""
    *before, n_bytes = packed.shape
    units = packed.reshape(*before, n_bytes // 4, 1, 4)
    quants: Bytes = np.concatenate([units & 15, units >> 4], axis=-2)
    return quants.reshape(*before, 2 * n_bytes)


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
