"""This module decodes weights of any type to float32.

What the bits of a block mean is known to the `gguf` package, but for the two types that it does not
decode. The kernels are judged by what comes out here.
"""

from __future__ import annotations

import numpy as np

from vkmoe.quants.types import TYPES, Bytes, Floats

_DECODED_WEIGHTS = 1 << 18  # at a time: what that takes stays in the cache
_WHOLE_NUMBERS = {"I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}  # tables, not weights
_NUMBERS = {**_WHOLE_NUMBERS, "F16": "<f2", "F32": "<f4", "F64": "<f8"}


def decode(type_name: str, data: Bytes, n_weights: int) -> Floats:
    """Decode `n_weights` weights from `data` (uint8, any shape) to float32 [n_weights].

    NaN and infinite scales are decoded as they are, without warnings.
    """
    kind = TYPES[type_name]
    flat = np.ascontiguousarray(data).reshape(-1)
    assert flat.dtype == np.uint8, flat.dtype
    assert flat.size == kind.row_bytes(n_weights), (type_name, flat.size, n_weights)
    with np.errstate(all="ignore"):
        if type_name == "BF16":  # the upper half of a float32
            return (flat.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
        if type_name in _NUMBERS:
            return flat.view(_NUMBERS[type_name]).astype(np.float32)
        out = np.empty(n_weights, np.float32)
        step = max(1, _DECODED_WEIGHTS // kind.block_weights)
        for start in range(0, n_weights // kind.block_weights, step):
            blocks = slice(start * kind.block_bytes, (start + step) * kind.block_bytes)
            weights = slice(start * kind.block_weights, (start + step) * kind.block_weights)
            out[weights] = _decoded_blocks(type_name, flat[blocks])
    return out


def _decoded_blocks(type_name: str, data: Bytes) -> Floats:
    if type_name in ("Q1_0", "Q2_0"):
        return _few_bits(type_name, data)
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    # As one row: of several it would take 16 at a time, however short.
    row = dequantize(data[None], GGMLQuantizationType(TYPES[type_name].ggml_id))
    return np.asarray(row, np.float32).reshape(-1)


def _few_bits(type_name: str, data: Bytes) -> Floats:
    """Decode Q1_0 and Q2_0: d, then the bits of whole numbers, the lowest first.

    A bit stands for -1 or 1, a pair of bits for -1 to 2 (ggml-quants.c of llama.cpp).
    """
    blocks = data.reshape(-1, TYPES[type_name].block_bytes)
    d = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").astype(np.float32)
    quants = 2 * bits - 1 if type_name == "Q1_0" else bits[:, ::2] + 2 * bits[:, 1::2] - 1
    return np.asarray(d * quants, np.float32).reshape(-1)
