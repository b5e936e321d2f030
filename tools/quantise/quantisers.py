"""This module turns float32 weights into the bytes of any type of weights.

It owns the checks, the cutting into pieces, and Q8_0. k_quants.py has the superblocks of the demo
model, the `gguf` package the plain types; the other types are left to ggml, which the CPU device
has. The same input gives the same bytes. This is to prepare models, and not fast.
"""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np

from tools.quantise.k_quants import quantise_q4_k, quantise_q5_k, quantise_q6_k
from vkmoe.cpu.variants import native
from vkmoe.errors import UnsupportedModelError
from vkmoe.quants import HAS_KERNEL, decode
from vkmoe.quants.types import TYPES, Bytes, Floats

# Weights per piece: small enough that a search's arrays stay in the cache.
_CHUNK_WEIGHTS = 1 << 16
_GROUP = 32
# Beyond what any block can hold, and below where the searches' float32 sums would overflow.
_LARGEST = 1e9
_Q8_0_SHIFTS = np.linspace(-0.5, 0.5, 5, dtype=np.float32)
_PLAIN = ("BF16", "F16", "F32")


def quantise(type_name: str, weights: Floats) -> Bytes:
    """Quantise float32 [..., columns] to uint8 [..., row_bytes].

    Raises UnsupportedModelError for a type that has no quantiser, for rows that are not whole
    blocks, and for weights that are not finite or beyond the type's reach.
    """
    if type_name not in HAS_KERNEL:
        known = ", ".join(sorted(HAS_KERNEL))
        raise UnsupportedModelError(f"cannot quantise to {type_name}", f"use one of {known}")
    quant_type, columns = TYPES[type_name], weights.shape[-1]
    if columns % quant_type.block_weights:
        raise UnsupportedModelError(
            f"rows of {columns} weights cannot be {type_name}",
            f"{type_name} needs a multiple of {quant_type.block_weights}",
        )
    rows = np.ascontiguousarray(weights, np.float32).reshape(-1, quant_type.block_weights)
    out = np.empty((len(rows), quant_type.block_bytes), np.uint8)
    step = _CHUNK_WEIGHTS // quant_type.block_weights
    for start in range(0, len(rows), step):
        out[start : start + step] = _quantise_piece(type_name, rows[start : start + step])
    return out.reshape(*weights.shape[:-1], quant_type.row_bytes(columns))


def _quantise_piece(type_name: str, blocks: Floats) -> Bytes:
    """Turn some blocks [n, block_weights] into bytes [n, block_bytes], checked on both sides."""
    if not np.isfinite(blocks).all():
        raise UnsupportedModelError("the weights to quantise contain NaN or infinity")
    if blocks.shape[1] > 1 and np.abs(blocks).max(initial=0) > _LARGEST:
        raise UnsupportedModelError(f"the weights are too large for {type_name}")
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if type_name in _PLAIN:
            found = gguf.quants.quantize(blocks, gguf.GGMLQuantizationType[type_name])
            found = found.view(np.uint8)
        elif type_name in _QUANTISERS:
            found = _QUANTISERS[type_name](blocks, _importance(blocks))
        else:
            alike = np.ones(blocks.shape[1], np.float32)
            found = native().quantise(TYPES[type_name].ggml_id, blocks, alike)
    if not np.isfinite(decode(type_name, found, blocks.size)).all():
        raise UnsupportedModelError(f"the weights are too large for {type_name}")
    return found.reshape(len(blocks), -1)


def _importance(blocks: Floats) -> Floats:
    """Say what an error in each weight costs.

    A larger weight usually has a larger share in the result, hence its magnitude on top of its
    group's root mean square.
    """
    groups = blocks.reshape(-1, _GROUP)
    root = np.sqrt(np.mean(groups * groups, axis=1, keepdims=True))
    matter: Floats = (root + np.abs(groups)).reshape(blocks.shape)
    return matter


def _quantise_q8_0(x: Floats, importance: Floats) -> Bytes:
    """Quantise to [n, 34] bytes; keeps the best of scales a little around largest / 127."""
    largest = np.abs(x).max(axis=1, keepdims=True)
    best = np.zeros((len(x), 34), np.uint8)
    least = np.full(len(x), np.inf, np.float32)
    for shift in _Q8_0_SHIFTS:
        d = (largest / (127 + shift)).astype("<f2")
        step = d.astype(np.float32)
        q = np.clip(np.rint(x / np.where(step > 0, step, np.float32(1))), -127, 127)
        error = (importance * (q * step - x) ** 2).sum(axis=1)
        better = ~(error >= least)
        least[better] = error[better]
        best[better, :2] = d[better].view(np.uint8)
        best[better, 2:] = q[better].astype(np.int8).view(np.uint8)
    return best


_QUANTISERS: dict[str, Callable[[Floats, Floats], Bytes]] = {
    "Q4_K": quantise_q4_k,
    "Q5_K": quantise_q5_k,
    "Q6_K": quantise_q6_k,
    "Q8_0": _quantise_q8_0,
}
