"""NumPy decoders: bytes of any weight type to float32.

Owns the table of the types with kernels, whose formulas are in decode_k.py and decode_32.py; every
other type is decoded by the `gguf` package.  These are the twins the kernels are judged by, so
they follow the order of operations of the format: scale first, then weight, then minimum.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from vkmoe.errors import UnsupportedModelError
from vkmoe.quants.blocks import Bytes, Floats
from vkmoe.quants.decode_32 import (
    decode_iq4_nl,
    decode_iq4_xs,
    decode_mxfp4,
    decode_q4_0,
    decode_q8_0,
)
from vkmoe.quants.decode_k import (
    decode_q2_k,
    decode_q3_k,
    decode_q4_k,
    decode_q5_k,
    decode_q6_k,
)
from vkmoe.quants.types import TYPES

__all__ = ["bf16_to_f32", "decode"]

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


_DECODERS: dict[str, Callable[[Bytes], Floats]] = {
    "Q2_K": decode_q2_k,
    "Q3_K": decode_q3_k,
    "Q4_K": decode_q4_k,
    "Q5_K": decode_q5_k,
    "Q6_K": decode_q6_k,
    "IQ4_XS": decode_iq4_xs,
    "Q4_0": decode_q4_0,
    "IQ4_NL": decode_iq4_nl,
    "MXFP4": decode_mxfp4,
    "Q8_0": decode_q8_0,
    "F16": _f16,
    "BF16": _bf16,
    "F32": _f32,
}
