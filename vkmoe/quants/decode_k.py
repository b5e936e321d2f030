"""Decoders of the types with superblocks of 256 weights and two levels of scales: Q2_K to Q6_K.

Owns the meaning of their bits; decode.py has the table and the loop.  Every function takes blocks
[n, block_bytes] and returns float32 [n, 256].
"""

from __future__ import annotations

import numpy as np

from vkmoe.quants.blocks import Bytes, Floats, half_at

__all__ = ["decode_q2_k", "decode_q3_k", "decode_q4_k", "decode_q5_k", "decode_q6_k"]


def decode_q2_k(blocks: Bytes) -> Floats:
    """w = d * scale * q - dmin * minimum; [16 B scale | minimum << 4, 64 B bit pairs, d, dmin].

    Every 16 weights share a scale and a minimum.  The bit pairs lie as the upper bits of Q6_K do.
    """
    scale = half_at(blocks, 80) * (blocks[:, 0:16] & 15).astype(np.float32)  # [n, 16]
    minimum = half_at(blocks, 82) * (blocks[:, 0:16] >> 4).astype(np.float32)
    quants = _bit_pairs(blocks[:, 16:80]).reshape(-1, 16, 16).astype(np.float32)
    weights: Floats = scale[:, :, None] * quants - minimum[:, :, None]
    return weights.reshape(-1, 256)


def decode_q3_k(blocks: Bytes) -> Floats:
    """w = d * scale * q, q in -4..3; [32 B third bits, 64 B bit pairs, 12 B scales, d].

    The third bit of weight 32*s + l is bit s of byte l; where it is not set, 4 is taken off.
    """
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    third = (blocks[:, None, 0:32] >> shifts) & 1  # [n, 8, 32]
    pairs = _bit_pairs(blocks[:, 32:96]).reshape(-1, 8, 32)
    quants = (pairs | (third << 2)).view(np.int8) - np.int8(4)
    scale = half_at(blocks, 108) * _unpack_signed_scales(blocks[:, 96:108])
    weights: Floats = scale[:, :, None] * quants.reshape(-1, 16, 16).astype(np.float32)
    return weights.reshape(-1, 256)


def _unpack_signed_scales(packed: Bytes) -> Floats:
    """The 6-bit scales of Q3_K less 32: [n, 12] -> [n, 16].

    Bytes 0-7 hold the low nibbles of scales 0-7 (low) and 8-15 (high); byte 8 + i the upper two
    bits of scales i, i + 4, i + 8 and i + 12, from its lowest bits up.
    """
    low, high = packed[:, 0:8], packed[:, 8:12]
    nibbles = np.concatenate([low & 15, low >> 4], axis=1)
    upper = np.concatenate([(high >> shift) & 3 for shift in (0, 2, 4, 6)], axis=1)
    scales: Floats = (nibbles | (upper << 4)).astype(np.float32) - np.float32(32)
    return scales


def decode_q4_k(blocks: Bytes) -> Floats:
    """w = d * scale * q - dmin * minimum; [d, dmin, 12 B scales, 4 x 32 B low, high nibbles]."""
    quants = blocks[:, 16:144].reshape(-1, 4, 1, 32)
    nibbles = np.concatenate([quants & 15, quants >> 4], axis=2)
    return _scaled(blocks, nibbles.reshape(-1, 8, 32))


def decode_q5_k(blocks: Bytes) -> Floats:
    """As Q4_K with a fifth bit: bit s of high byte l belongs to weight l of sub-block s."""
    quants = blocks[:, 48:176].reshape(-1, 4, 1, 32)
    nibbles = np.concatenate([quants & 15, quants >> 4], axis=2).reshape(-1, 8, 32)
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    fifth = (blocks[:, None, 16:48] >> shifts) & 1
    return _scaled(blocks, nibbles | (fifth << 4))


def _scaled(blocks: Bytes, quants: Bytes) -> Floats:
    scales, minima = _unpack_scales_minima(blocks[:, 4:16])
    scale = half_at(blocks, 0) * scales.astype(np.float32)  # [n, 8]
    minimum = half_at(blocks, 2) * minima.astype(np.float32)
    weights = scale[:, :, None] * quants.astype(np.float32) - minimum[:, :, None]
    return weights.reshape(-1, 256)


def _unpack_scales_minima(packed: Bytes) -> tuple[Bytes, Bytes]:
    """The 6-bit scales and minima of Q4_K and Q5_K: [n, 12] -> two of [n, 8].

    Bytes 0-3 hold scales 0-3, bytes 4-7 minima 0-3, in their low six bits; bytes 8-11 hold the low
    nibbles of scales 4-7 (low) and minima 4-7 (high), whose upper two bits top bytes 0-3 and 4-7.
    """
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=1)
    return scales, minima


def decode_q6_k(blocks: Bytes) -> Floats:
    """w = d * scale * (q - 32); [128 B low nibbles, 64 B upper bits, 16 int8 scales, d].

    Each half of 128 weights has 64 low bytes (nibbles: weights 0-63, then 64-127) and 32 upper
    bytes, whose bit pairs 0-3 belong to the four runs of 32 weights.
    """
    low = blocks[:, 0:128].reshape(-1, 2, 1, 64)
    nibbles = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    upper = _bit_pairs(blocks[:, 128:192])
    quants = (nibbles | (upper << 4)).view(np.int8) - np.int8(32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    scale = half_at(blocks, 208) * scales  # [n, 16]
    weights: Floats = scale[:, :, None] * quants.reshape(-1, 16, 16).astype(np.float32)
    return weights.reshape(-1, 256)


def _bit_pairs(packed: Bytes) -> Bytes:
    """[n, 64] bytes to [n, 2, 4, 32]: halves of 128 weights, four runs of 32 in each."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8).reshape(1, 1, 4, 1)
    return (packed.reshape(-1, 2, 1, 32) >> shifts) & np.uint8(3)
