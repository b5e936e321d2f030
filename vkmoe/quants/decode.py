"""NumPy decoders: bytes of any weight type to float32.

Owns the meaning of the bits of the seven types with kernels (the formulas are in each function);
every other type is decoded by the `gguf` package.  These are the twins the kernels are judged by,
so they follow the order of operations of the format: scale first, then weight, then minimum.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from vkmoe.errors import UnsupportedModelError
from vkmoe.quants.types import TYPES

__all__ = ["bf16_to_f32", "decode", "unpack_scales_minima"]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

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
    """bfloat16 is the upper half of a float32."""
    return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)


def unpack_scales_minima(packed: Bytes) -> tuple[Bytes, Bytes]:
    """The 6-bit scales and minima of Q4_K and Q5_K: [n, 12] -> two of [n, 8].

    Bytes 0-3 hold scales 0-3, bytes 4-7 minima 0-3, in their low six bits; bytes 8-11 hold the low
    nibbles of scales 4-7 (low) and minima 4-7 (high), whose upper two bits top bytes 0-3 and 4-7.
    """
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=1)
    return scales, minima


def _half(blocks: Bytes, at: int) -> Floats:
    """The f16 at byte `at` of every block, as float32 [n, 1]."""
    halves: npt.NDArray[np.float16] = np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)
    return halves.astype(np.float32)


def _q4_k(blocks: Bytes) -> Floats:
    """w = d * scale * q - dmin * minimum; [d, dmin, 12 B scales, 4 x 32 B low, high nibbles]."""
    quants = blocks[:, 16:144].reshape(-1, 4, 1, 32)
    nibbles = np.concatenate([quants & 15, quants >> 4], axis=2)
    return _scaled(blocks, nibbles.reshape(-1, 8, 32))


def _q5_k(blocks: Bytes) -> Floats:
    """As Q4_K with a fifth bit: bit s of high byte l belongs to weight l of sub-block s."""
    quants = blocks[:, 48:176].reshape(-1, 4, 1, 32)
    nibbles = np.concatenate([quants & 15, quants >> 4], axis=2).reshape(-1, 8, 32)
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    fifth = (blocks[:, None, 16:48] >> shifts) & 1
    return _scaled(blocks, nibbles | (fifth << 4))


def _scaled(blocks: Bytes, quants: Bytes) -> Floats:
    scales, minima = unpack_scales_minima(blocks[:, 4:16])
    scale = _half(blocks, 0) * scales.astype(np.float32)  # [n, 8]
    minimum = _half(blocks, 2) * minima.astype(np.float32)
    weights = scale[:, :, None] * quants.astype(np.float32) - minimum[:, :, None]
    return weights.reshape(-1, 256)


def _q6_k(blocks: Bytes) -> Floats:
    """w = d * scale * (q - 32); [128 B low nibbles, 64 B upper bits, 16 int8 scales, d].

    Each half of 128 weights has 64 low bytes (nibbles: weights 0-63, then 64-127) and 32 upper
    bytes, whose bit pairs 0-3 belong to the four runs of 32 weights.
    """
    low = blocks[:, 0:128].reshape(-1, 2, 1, 64)
    nibbles = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8).reshape(1, 1, 4, 1)
    upper = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    quants = (nibbles | (upper << 4)).view(np.int8) - np.int8(32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    scale = _half(blocks, 208) * scales  # [n, 16]
    weights: Floats = scale[:, :, None] * quants.reshape(-1, 16, 16).astype(np.float32)
    return weights.reshape(-1, 256)


def _q8_0(blocks: Bytes) -> Floats:
    """w = d * q; [d, 32 int8]."""
    weights: Floats = _half(blocks, 0) * blocks[:, 2:34].view(np.int8).astype(np.float32)
    return weights


def _f16(blocks: Bytes) -> Floats:
    return blocks.view(np.float16).astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return bf16_to_f32(blocks.view(np.uint16))


def _f32(blocks: Bytes) -> Floats:
    return blocks.view(np.float32)


def _foreign_decoder(type_name: str) -> Callable[[Bytes], Floats]:
    """Plain numbers by a cast, everything else by the `gguf` package."""
    number = {"I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8", "F64": "<f8"}.get(type_name)
    if number is not None:
        dtype = np.dtype(number)
        return lambda blocks: blocks.view(dtype).astype(np.float32)

    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    def foreign(blocks: Bytes) -> Floats:
        try:
            found = dequantize(blocks, GGMLQuantizationType(TYPES[type_name].ggml_id))
        except (NotImplementedError, ValueError):  # not in this version of the package
            raise UnsupportedModelError(
                f"weights of type {type_name} cannot be decoded",
                "use a file with " + ", ".join(sorted(_DECODERS)),
            ) from None
        return np.asarray(found, np.float32)

    return foreign


_DECODERS: dict[str, Callable[[Bytes], Floats]] = {
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q8_0": _q8_0,
    "F16": _f16,
    "BF16": _bf16,
    "F32": _f32,
}
