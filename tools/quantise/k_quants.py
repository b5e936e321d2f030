"""This module quantises superblocks of 256 weights: Q4_K, Q5_K and Q6_K.

It owns the two-level scales and the packing of their bits; the `gguf` package has the formats.
Groups are fitted one by one (scale_search.py), their scales rounded to the superblock's own scale,
and that is fitted once more to the weights as rounded. Arrays are
[groups, weights of a group, superblocks].
"""

from __future__ import annotations

import numpy as np

from tools.quantise.scale_search import fit_range, fit_symmetric
from vkmoe.quants.types import Bytes, Floats

_RANGE_SHIFTS = np.arange(-1.0, 1.01, 0.1, dtype=np.float32)
_SYMMETRIC_SHIFTS = np.arange(-0.9, 0.91, 0.1, dtype=np.float32)
_LARGEST_SUBSCALE = 63


def quantise_q4_k(x: Floats, importance: Floats) -> Bytes:
    """[n, 256] weights and importances to [n, 144] bytes."""
    head, quants = _range_blocks(x, importance, largest=15)
    return np.concatenate([head, _pack_nibbles(quants)], axis=1)


def quantise_q5_k(x: Floats, importance: Floats) -> Bytes:
    """[n, 256] weights and importances to [n, 176] bytes."""
    head, quants = _range_blocks(x, importance, largest=31)
    shifts = np.arange(8, dtype=np.uint8)[None, :, None]
    fifth = np.bitwise_or.reduce((quants >> 4) << shifts, axis=1)  # [n, 32]
    return np.concatenate([head, fifth, _pack_nibbles(quants & np.uint8(15))], axis=1)


def _grouped(x: Floats, n_groups: int) -> Floats:
    """[n, 256] to [n_groups, 256 / n_groups, n], contiguous."""
    return np.ascontiguousarray(x.T).reshape(n_groups, -1, len(x))


def _range_blocks(x: Floats, importance: Floats, largest: int) -> tuple[Bytes, Bytes]:
    """The 16 leading bytes [n, 16] and the quants [n, 8, 32] of superblocks with minima."""
    n = len(x)
    x, importance = _grouped(x, 8), _grouped(importance, 8)
    flat = fit_range(_side_by_side(x), _side_by_side(importance), largest, _RANGE_SHIFTS)
    scale, minimum = flat.scale.reshape(8, n), flat.minimum.reshape(8, n)
    top = np.float32(63)
    d, dmin = _half(scale.max(axis=0) / top), _half(minimum.max(axis=0) / top)
    subscale = _levels(scale, d)
    subminimum = _levels(minimum, dmin)
    quants = _round_range(x, d * subscale, dmin * subminimum, largest)
    d, dmin = _refit_range(x, importance, quants * subscale[:, None], subminimum, d, dmin)
    quants = _round_range(x, d * subscale, dmin * subminimum, largest)
    packed = pack_subscales(subscale.T.astype(np.uint8), subminimum.T.astype(np.uint8))
    head = np.concatenate([half_bytes(d), half_bytes(dmin), packed], axis=1)
    return head, np.ascontiguousarray(quants.transpose(2, 0, 1)).astype(np.uint8)


def _side_by_side(x: Floats) -> Floats:
    """[groups, weights, n] to [weights, groups * n]: all groups as equals."""
    return np.ascontiguousarray(x.transpose(1, 0, 2)).reshape(x.shape[1], -1)


def _half(values: Floats) -> Floats:
    """Rounded to what an f16 can hold, still float32."""
    return values.astype(np.float16).astype(np.float32)


def _levels(values: Floats, step: Floats) -> Floats:
    safe = np.where(step > 0, step, np.float32(1))
    levels: Floats = np.clip(np.rint(values / safe), 0, _LARGEST_SUBSCALE)
    return levels


def _round_range(x: Floats, scale: Floats, minimum: Floats, largest: int) -> Floats:
    inverse = np.where(scale > 0, 1 / np.where(scale > 0, scale, np.float32(1)), np.float32(0))
    quants: Floats = np.rint((x + minimum[:, None]) * inverse[:, None])
    return np.clip(quants, 0, largest, out=quants)


def _refit_range(
    x: Floats, importance: Floats, product: Floats, subminimum: Floats, d: Floats, dmin: Floats
) -> tuple[Floats, Floats]:
    """The d and dmin [n] that minimise the weighted error of d * product - dmin * subminimum.

    `product` is quant * subscale.  The old pair is kept where the system has no sound solution.
    """
    minima = subminimum[:, None]
    weighted = importance * product
    aa = (weighted * product).sum(axis=(0, 1))
    ab = (weighted * minima).sum(axis=(0, 1))
    bb = (importance * minima * minima).sum(axis=(0, 1))
    ax = (weighted * x).sum(axis=(0, 1))
    bx = (importance * minima * x).sum(axis=(0, 1))
    determinant = aa * bb - ab * ab
    sound = determinant > 1e-4 * aa * bb
    divisor = np.where(sound, determinant, np.float32(1))
    new_d, new_dmin = (bb * ax - ab * bx) / divisor, (ab * ax - aa * bx) / divisor
    sound &= (new_d > 0) & (new_dmin > 0)
    return _half(np.where(sound, new_d, d)), _half(np.where(sound, new_dmin, dmin))


def pack_subscales(scales: Bytes, minima: Bytes) -> Bytes:
    """Two of [n, 8] six-bit numbers to [n, 12] bytes, as Q4_K and Q5_K store them."""
    four, six, nibble = np.uint8(4), np.uint8(6), np.uint8(15)
    low = scales[:, :4] | ((scales[:, 4:] >> four) << six)
    middle = minima[:, :4] | ((minima[:, 4:] >> four) << six)
    high = (scales[:, 4:] & nibble) | ((minima[:, 4:] & nibble) << four)
    return np.concatenate([low, middle, high], axis=1)


def half_bytes(values: Floats) -> Bytes:
    """Write [n] values as f16: [n, 2] bytes."""
    return values.astype("<f2").view(np.uint8).reshape(-1, 2)


def _pack_nibbles(quants: Bytes) -> Bytes:
    """[n, 8, 32] values below 16 to [n, 128]: even groups low, odd groups high."""
    packed: Bytes = quants[:, 0::2] | (quants[:, 1::2] << np.uint8(4))
    return packed.reshape(len(quants), 128)


def quantise_q6_k(x: Floats, importance: Floats) -> Bytes:
    """[n, 256] weights and importances to [n, 210] bytes."""
    n = len(x)
    x, importance = _grouped(x, 16), _grouped(importance, 16)
    flat = fit_symmetric(_side_by_side(x), _side_by_side(importance), 32, _SYMMETRIC_SHIFTS)
    scale = flat.reshape(16, n)
    at = np.abs(scale).argmax(axis=0)[None, :]
    d = _half(np.take_along_axis(scale, at, axis=0)[0] / -128)
    safe = np.where(d == 0, np.float32(1), d)
    subscale = np.where(d == 0, np.float32(0), np.clip(np.rint(scale / safe), -128, 127))
    quants = _round_symmetric(x, d * subscale)
    product = quants * subscale[:, None]
    weighted = importance * product
    energy = (weighted * product).sum(axis=(0, 1))
    d = np.where(energy > 0, (weighted * x).sum(axis=(0, 1)) / np.where(energy > 0, energy, 1), d)
    d = _half(d.astype(np.float32))
    quants = _round_symmetric(x, d * subscale)
    levels = (np.ascontiguousarray(quants.reshape(256, n).T) + 32).astype(np.uint8)
    scales = np.ascontiguousarray(subscale.T).astype(np.int8).view(np.uint8)
    return np.concatenate([_pack_six_bits(levels), scales, half_bytes(d)], axis=1)


def _round_symmetric(x: Floats, scale: Floats) -> Floats:
    inverse = np.where(scale != 0, 1 / np.where(scale != 0, scale, np.float32(1)), np.float32(0))
    quants: Floats = np.rint(x * inverse[:, None])
    return np.clip(quants, -32, 31, out=quants)


def _pack_six_bits(levels: Bytes) -> Bytes:
    """[n, 256] values below 64 to [n, 192]: 128 bytes of low nibbles, 64 of upper bit pairs."""
    halves = levels.reshape(-1, 2, 4, 32)
    nibbles = halves & 15
    low = np.concatenate(
        [nibbles[:, :, 0] | (nibbles[:, :, 2] << 4), nibbles[:, :, 1] | (nibbles[:, :, 3] << 4)],
        axis=2,
    )  # [n, 2, 64]
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[None, None, :, None]
    upper = np.bitwise_or.reduce((halves >> 4) << shifts, axis=2)  # [n, 2, 32]
    return np.concatenate([low.reshape(-1, 128), upper.reshape(-1, 64)], axis=1)
