"""Decoders of the types in which 32 weights share one scale: Q8_0, Q4_0, IQ4_NL, MXFP4, IQ4_XS.

Owns the meaning of their bits; decode.py has the table and the loop.  Every function takes blocks
[n, block_bytes] and returns float32 [n, block_weights].
"""

from __future__ import annotations

import numpy as np

from vkmoe.quants.blocks import (
    E2M1_VALUES,
    IQ4_VALUES,
    Bytes,
    Floats,
    exponent_scale,
    half_at,
    split_nibbles,
)

__all__ = ["decode_iq4_nl", "decode_iq4_xs", "decode_mxfp4", "decode_q4_0", "decode_q8_0"]


def decode_q8_0(blocks: Bytes) -> Floats:
    """w = d * q; [d, 32 int8]."""
    weights: Floats = half_at(blocks, 0) * blocks[:, 2:34].view(np.int8).astype(np.float32)
    return weights


def decode_q4_0(blocks: Bytes) -> Floats:
    """w = d * (q - 8); [d, 16 B low, high nibbles]."""
    quants = split_nibbles(blocks[:, 2:18]).view(np.int8) - np.int8(8)
    weights: Floats = half_at(blocks, 0) * quants.astype(np.float32)
    return weights


def decode_iq4_nl(blocks: Bytes) -> Floats:
    """w = d * IQ4_VALUES[q]; [d, 16 B low, high nibbles]."""
    weights: Floats = half_at(blocks, 0) * IQ4_VALUES[split_nibbles(blocks[:, 2:18])]
    return weights


def decode_mxfp4(blocks: Bytes) -> Floats:
    """w = 2^(e - 127) * E2M1(q); [e, 16 B low, high nibbles]."""
    weights: Floats = exponent_scale(blocks[:, 0:1]) * E2M1_VALUES[split_nibbles(blocks[:, 1:17])]
    return weights


def decode_iq4_xs(blocks: Bytes) -> Floats:
    """w = d * (scale - 32) * IQ4_VALUES[q]; eight sub-blocks of 32 weights with 6-bit scales.

    [d, 2 B: the upper two bits of the scales, 4 B: their low nibbles, 8 x 16 B low, high nibbles].
    """
    upper = np.ascontiguousarray(blocks[:, 2:4]).view("<u2")  # [n, 1]
    upper = (upper >> np.arange(0, 16, 2, dtype=np.uint16)).astype(np.uint8) & 3  # [n, 8]
    packed = blocks[:, 4:8]
    low = np.stack([packed & 15, packed >> 4], axis=2).reshape(-1, 8)
    scale = half_at(blocks, 0) * ((low | (upper << 4)).astype(np.float32) - np.float32(32))
    values = IQ4_VALUES[split_nibbles(blocks[:, 8:136].reshape(-1, 8, 16))]
    weights: Floats = scale[:, :, None] * values
    return weights.reshape(-1, 256)
