"""This module decodes the bytes of any weight type to float32, in NumPy.

It owns the meaning of the bits of the types with kernels; every other type is decoded by the `gguf`
package. These are the twins the kernels are judged by, so they follow the order of operations of
the format: scale first, then weight, then minimum. A decoder takes blocks [n, block_bytes] and
returns float32 [n, block_weights].
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from vkmoe.errors import UnsupportedModelError
from vkmoe.quants.types import TYPES

__all__ = [
    "E2M1_VALUES",
    "IQ4_VALUES",
    "Bytes",
    "Floats",
    "bf16_to_f32",
    "decode",
    "exponent_scale",
]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# The code book of IQ4_NL and IQ4_XS: close together near zero, where most weights are.
IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
# Twice the values of E2M1 (OCP Microscaling Formats 1.0, section 5.3.3): sign, exponent, mantissa.
E2M1_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)

# Weights decoded at a time: bounds the temporaries and keeps them in the cache.
_CHUNK_WEIGHTS = 1 << 18


def decode(type_name: str, data: Bytes, n_weights: int) -> Floats:
    """Decode `n_weights` weights from `data` (uint8, any shape) to float32 [n_weights].

    Raises UnsupportedModelError for a type that neither vkmoe nor the `gguf` package decodes.
    NaN and infinite scales are decoded as they are, without warnings.
    """
    quant_type = TYPES[type_name]
    flat = np.ascontiguousarray(data).reshape(-1)
    assert flat.dtype == np.uint8, flat.dtype
    assert flat.size == quant_type.row_bytes(n_weights), (type_name, flat.size, n_weights)
    blocks = flat.reshape(-1, quant_type.block_bytes)
    decoder = _DECODERS.get(type_name) or _foreign_decoder(type_name)
    out = np.empty((len(blocks), quant_type.block_weights), np.float32)
    step = max(1, _CHUNK_WEIGHTS // quant_type.block_weights)
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            out[start : start + step] = decoder(blocks[start : start + step])
    return out.reshape(-1)


def bf16_to_f32(words: npt.NDArray[np.uint16]) -> Floats:
    """Widen bfloat16, which is the upper half of a float32."""
    return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _f16(blocks: Bytes) -> Floats:
    return blocks.view(np.float16).astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return bf16_to_f32(blocks.view(np.uint16))


def _f32(blocks: Bytes) -> Floats:
    return blocks.view(np.float32)


def _foreign_decoder(type_name: str) -> Callable[[Bytes], Floats]:
    """Make the decoder of plain numbers by a cast, of everything else by the `gguf` package."""
    number = {"I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8", "F64": "<f8"}.get(type_name)
    if number is not None:
        dtype = np.dtype(number)
        return lambda blocks: blocks.view(dtype).astype(np.float32)

    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    def foreign(blocks: Bytes) -> Floats:
        row = blocks.reshape(1, -1)  # of several rows it would take 16 at a time, however short
        try:
            found = dequantize(row, GGMLQuantizationType(TYPES[type_name].ggml_id))
        except (NotImplementedError, ValueError):  # not in this version of the package
            raise UnsupportedModelError(
                f"weights of type {type_name} cannot be decoded",
                "use a file with " + ", ".join(sorted(_DECODERS)),
            ) from None
        return np.asarray(found, np.float32).reshape(len(blocks), -1)

    return foreign


# ----- 32 weights share a scale -----


def _decode_q8_0(blocks: Bytes) -> Floats:
    """Decode w = d * q; [d, 32 int8]."""
    weights: Floats = _half_at(blocks, 0) * blocks[:, 2:34].view(np.int8).astype(np.float32)
    return weights


def _decode_q4_0(blocks: Bytes) -> Floats:
    """Decode w = d * (q - 8); [d, 16 B low, high nibbles]."""
    quants = _split_nibbles(blocks[:, 2:18]).view(np.int8) - np.int8(8)
    weights: Floats = _half_at(blocks, 0) * quants.astype(np.float32)
    return weights


def _decode_iq4_nl(blocks: Bytes) -> Floats:
    """Decode w = d * IQ4_VALUES[q]; [d, 16 B low, high nibbles]."""
    weights: Floats = _half_at(blocks, 0) * IQ4_VALUES[_split_nibbles(blocks[:, 2:18])]
    return weights


def _decode_mxfp4(blocks: Bytes) -> Floats:
    """Decode w = 2^(e - 127) * E2M1(q); [e, 16 B low, high nibbles]."""
    weights: Floats = exponent_scale(blocks[:, 0:1]) * E2M1_VALUES[_split_nibbles(blocks[:, 1:17])]
    return weights


def _decode_iq4_xs(blocks: Bytes) -> Floats:
    """Decode w = d * (scale - 32) * IQ4_VALUES[q]; eight sub-blocks of 32 weights, 6-bit scales.

    [d, 2 B: the upper two bits of the scales, 4 B: their low nibbles, 8 x 16 B low, high nibbles].
    """
    upper = np.ascontiguousarray(blocks[:, 2:4]).view("<u2")  # [n, 1]
    upper = (upper >> np.arange(0, 16, 2, dtype=np.uint16)).astype(np.uint8) & 3  # [n, 8]
    packed = blocks[:, 4:8]
    low = np.stack([packed & 15, packed >> 4], axis=2).reshape(-1, 8)
    scale = _half_at(blocks, 0) * ((low | (upper << 4)).astype(np.float32) - np.float32(32))
    values = IQ4_VALUES[_split_nibbles(blocks[:, 8:136].reshape(-1, 8, 16))]
    weights: Floats = scale[:, :, None] * values
    return weights.reshape(-1, 256)


# ----- superblocks of 256 weights with two levels of scales -----


def _decode_q2_k(blocks: Bytes) -> Floats:
    """Decode w = d * scale * q - dmin * minimum.

    [16 B scale | minimum << 4, 64 B bit pairs, d, dmin]. Every 16 weights share a scale and a
    minimum.  The bit pairs lie as the upper bits of Q6_K do.
    """
    scale = _half_at(blocks, 80) * (blocks[:, 0:16] & 15).astype(np.float32)  # [n, 16]
    minimum = _half_at(blocks, 82) * (blocks[:, 0:16] >> 4).astype(np.float32)
    quants = _bit_pairs(blocks[:, 16:80]).reshape(-1, 16, 16).astype(np.float32)
    weights: Floats = scale[:, :, None] * quants - minimum[:, :, None]
    return weights.reshape(-1, 256)


def _decode_q3_k(blocks: Bytes) -> Floats:
    """Decode w = d * scale * q, q in -4..3; [32 B third bits, 64 B bit pairs, 12 B scales, d].

    The third bit of weight 32*s + l is bit s of byte l; where it is not set, 4 is taken off.
    """
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    third = (blocks[:, None, 0:32] >> shifts) & 1  # [n, 8, 32]
    pairs = _bit_pairs(blocks[:, 32:96]).reshape(-1, 8, 32)
    quants = (pairs | (third << 2)).view(np.int8) - np.int8(4)
    scale = _half_at(blocks, 108) * _unpack_signed_scales(blocks[:, 96:108])
    weights: Floats = scale[:, :, None] * quants.reshape(-1, 16, 16).astype(np.float32)
    return weights.reshape(-1, 256)


def _unpack_signed_scales(packed: Bytes) -> Floats:
    """Unpack the 6-bit scales of Q3_K less 32: [n, 12] -> [n, 16].

    Bytes 0-7 hold the low nibbles of scales 0-7 (low) and 8-15 (high); byte 8 + i the upper two
    bits of scales i, i + 4, i + 8 and i + 12, from its lowest bits up.
    """
    low, high = packed[:, 0:8], packed[:, 8:12]
    nibbles = np.concatenate([low & 15, low >> 4], axis=1)
    upper = np.concatenate([(high >> shift) & 3 for shift in (0, 2, 4, 6)], axis=1)
    scales: Floats = (nibbles | (upper << 4)).astype(np.float32) - np.float32(32)
    return scales


def _decode_q4_k(blocks: Bytes) -> Floats:
    """Decode w = d * scale * q - dmin * minimum.

    [d, dmin, 12 B scales, 4 x 32 B low, high nibbles].
    """
    quants = blocks[:, 16:144].reshape(-1, 4, 1, 32)
    nibbles = np.concatenate([quants & 15, quants >> 4], axis=2)
    return _scaled(blocks, nibbles.reshape(-1, 8, 32))


def _decode_q5_k(blocks: Bytes) -> Floats:
    """Decode Q4_K with a fifth bit: bit s of high byte l belongs to weight l of sub-block s."""
    quants = blocks[:, 48:176].reshape(-1, 4, 1, 32)
    nibbles = np.concatenate([quants & 15, quants >> 4], axis=2).reshape(-1, 8, 32)
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    fifth = (blocks[:, None, 16:48] >> shifts) & 1
    return _scaled(blocks, nibbles | (fifth << 4))


def _scaled(blocks: Bytes, quants: Bytes) -> Floats:
    scales, minima = _unpack_scales_minima(blocks[:, 4:16])
    scale = _half_at(blocks, 0) * scales.astype(np.float32)  # [n, 8]
    minimum = _half_at(blocks, 2) * minima.astype(np.float32)
    weights = scale[:, :, None] * quants.astype(np.float32) - minimum[:, :, None]
    return weights.reshape(-1, 256)


def _unpack_scales_minima(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Unpack the 6-bit scales and minima of Q4_K and Q5_K: [n, 12] -> two of [n, 8].

    Bytes 0-3 hold scales 0-3, bytes 4-7 minima 0-3, in their low six bits; bytes 8-11 hold the low
    nibbles of scales 4-7 (low) and minima 4-7 (high), whose upper two bits top bytes 0-3 and 4-7.
    """
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=1)
    return scales, minima


def _decode_q6_k(blocks: Bytes) -> Floats:
    """Decode w = d * scale * (q - 32); [128 B low nibbles, 64 B upper bits, 16 int8 scales, d].

    Each half of 128 weights has 64 low bytes (nibbles: weights 0-63, then 64-127) and 32 upper
    bytes, whose bit pairs 0-3 belong to the four runs of 32 weights.
    """
    low = blocks[:, 0:128].reshape(-1, 2, 1, 64)
    nibbles = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    upper = _bit_pairs(blocks[:, 128:192])
    quants = (nibbles | (upper << 4)).view(np.int8) - np.int8(32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    scale = _half_at(blocks, 208) * scales  # [n, 16]
    weights: Floats = scale[:, :, None] * quants.reshape(-1, 16, 16).astype(np.float32)
    return weights.reshape(-1, 256)


def _bit_pairs(packed: Bytes) -> Bytes:
    """Unpack [n, 64] bytes to [n, 2, 4, 32]: halves of 128 weights, four runs of 32 in each."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8).reshape(1, 1, 4, 1)
    return (packed.reshape(-1, 2, 1, 32) >> shifts) & np.uint8(3)


# ----- halves, nibbles, exponents -----


def _half_at(blocks: Bytes, at: int) -> Floats:
    """Read the f16 at byte `at` of every block, as float32 [n, 1]."""
    halves: npt.NDArray[np.float16] = np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)
    return halves.astype(np.float32)


def _split_nibbles(packed: Bytes) -> Bytes:
    """Split [..., 16] bytes to [..., 32]: the low nibbles, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def exponent_scale(exponents: Bytes) -> Floats:
    """Compute 2^(e - 128) for the exponent bytes e of MXFP4: half of E8M0, for the doubled values.

    0 and 1 are below the normal float32; 255, which E8M0 calls NaN, is 2^127, as in llama.cpp.
    """
    wide = exponents.astype(np.uint32)
    subnormal = np.uint32(0x200000) << (wide & np.uint32(1))
    bits = np.where(wide < 2, subnormal, (np.maximum(wide, 1) - np.uint32(1)) << np.uint32(23))
    return bits.astype(np.uint32).view(np.float32)


_DECODERS: dict[str, Callable[[Bytes], Floats]] = {
    "Q2_K": _decode_q2_k,
    "Q3_K": _decode_q3_k,
    "Q4_K": _decode_q4_k,
    "Q5_K": _decode_q5_k,
    "Q6_K": _decode_q6_k,
    "IQ4_XS": _decode_iq4_xs,
    "Q4_0": _decode_q4_0,
    "IQ4_NL": _decode_iq4_nl,
    "MXFP4": _decode_mxfp4,
    "Q8_0": _decode_q8_0,
    "F16": _f16,
    "BF16": _bf16,
    "F32": _f32,
}
