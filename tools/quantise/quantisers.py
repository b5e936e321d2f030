"""This module turns float32 weights into the bytes of most types that have kernels.

It owns the checks, the cutting into pieces, the plain types and those with blocks of 32 weights;
k_quants.py has the superblocks. Q2_K, Q3_K and IQ4_XS have no quantiser. It is written for
preparing models, not for speed at run time. The same input gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from gguf.quants import IQ4_NL, MXFP4

from tools.quantise.k_quants import half_bytes, quantise_q4_k, quantise_q5_k, quantise_q6_k
from tools.quantise.scale_search import fit_symmetric, fit_values, nearest_value
from vkmoe.errors import UnsupportedModelError
from vkmoe.quants.convert import decode
from vkmoe.quants.types import TYPES, Bytes, Floats

__all__ = ["quantise"]

# Weights per piece: small enough that a search's arrays stay in the cache.
_CHUNK_WEIGHTS = 1 << 16
_GROUP = 32
# Beyond what any block can hold, and below where the searches' float32 sums would overflow.
_LARGEST = 1e9
_Q8_0_SHIFTS = np.linspace(-0.5, 0.5, 5, dtype=np.float32)
_Q4_0_SHIFTS = np.arange(-0.9, 0.91, 0.1, dtype=np.float32)
_IQ4_SHIFTS = np.arange(-7, 8, dtype=np.float32)
_LARGEST_EXPONENT = 254
_IQ4_VALUES = np.array(IQ4_NL.kvalues, np.float32)
_E2M1_VALUES = np.array(MXFP4.kvalues, np.float32)  # doubled


def quantise(type_name: str, weights: Floats, importance: Floats | None = None) -> Bytes:
    """Quantise float32 [..., columns] to uint8 [..., row_bytes].

    `importance` [columns], >= 0, says how much an error in each column matters (mean square of the
    activations, usually); types without blocks ignore it.  Raises UnsupportedModelError for a type
    that has no quantiser, for rows that are not whole blocks, and for weights that are not finite
    or beyond the type's reach.
    """
    if type_name not in _QUANTISERS:
        known = ", ".join(sorted(_QUANTISERS))
        raise UnsupportedModelError(f"cannot quantise to {type_name}", f"use one of {known}")
    quant_type = TYPES[type_name]
    columns = weights.shape[-1]
    if columns % quant_type.block_weights:
        raise UnsupportedModelError(
            f"rows of {columns} weights cannot be {type_name}",
            f"{type_name} needs a multiple of {quant_type.block_weights}",
        )
    assert importance is None or importance.shape == (columns,), columns
    row_weights = max(quant_type.block_weights, 1) if importance is None else columns
    rows = np.ascontiguousarray(weights, np.float32).reshape(-1, row_weights)
    out = np.empty((len(rows), quant_type.row_bytes(row_weights)), np.uint8)
    step = max(_CHUNK_WEIGHTS // row_weights, 1)
    for start in range(0, len(rows), step):
        out[start : start + step] = _quantise_piece(
            type_name, rows[start : start + step], importance
        )
    return out.reshape(*weights.shape[:-1], quant_type.row_bytes(columns))


def _quantise_piece(type_name: str, rows: Floats, importance: Floats | None) -> Bytes:
    """Some rows [n, row_weights] to bytes [n, row_bytes], checked on both sides."""
    if not np.isfinite(rows).all():
        raise UnsupportedModelError("the weights to quantise contain NaN or infinity")
    blocks = rows.reshape(-1, TYPES[type_name].block_weights)
    if blocks.shape[1] > 1 and np.abs(rows).max(initial=0) > _LARGEST:
        raise UnsupportedModelError(f"the weights are too large for {type_name}")
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        found = _QUANTISERS[type_name](blocks, _importance(rows, importance, blocks.shape))
    if not np.isfinite(decode(type_name, found, rows.size)).all():
        raise UnsupportedModelError(f"the weights are too large for {type_name}")
    return found.reshape(len(rows), -1)


def _importance(rows: Floats, columns: Floats | None, shape: tuple[int, ...]) -> Floats:
    """What an error in each weight costs: `shape`, a reshape of `rows`.

    A larger weight usually has a larger share in the result, hence its magnitude on top of its
    group's root mean square; the importance of its column multiplies that.
    """
    if shape[1] % _GROUP:
        return rows.reshape(shape)  # types without blocks do not ask
    groups = rows.reshape(-1, _GROUP)
    root = np.sqrt(np.mean(groups * groups, axis=1, keepdims=True))
    matter: Floats = (root + np.abs(groups)).reshape(rows.shape)
    if columns is not None:
        matter *= columns
    return matter.reshape(shape)


def _quantise_f16(x: Floats, importance: Floats) -> Bytes:
    return x.astype("<f2").view(np.uint8)


def _quantise_bf16(x: Floats, importance: Floats) -> Bytes:
    """The upper half of each float32, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype("<u2").view(np.uint8)


def _quantise_f32(x: Floats, importance: Floats) -> Bytes:
    return np.ascontiguousarray(x).view(np.uint8)


# ----- blocks of 32 weights: several scales are tried, the one with the least error is kept -----


def _quantise_q8_0(x: Floats, importance: Floats) -> Bytes:
    """Quantise to [n, 34] bytes; tries scales a little around largest / 127."""
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


def _quantise_q4_0(x: Floats, importance: Floats) -> Bytes:
    """Quantise to [n, 18] bytes."""
    columns, matter = np.ascontiguousarray(x.T), np.ascontiguousarray(importance.T)
    head = half_bytes(fit_symmetric(columns, matter, 8, _Q4_0_SHIFTS))
    scaled = x * _inverse(head)
    quants = np.clip(np.rint(scaled), -8, 7) + np.float32(8)
    return np.concatenate([head, _join_nibbles(quants.astype(np.uint8))], axis=1)


def _quantise_iq4_nl(x: Floats, importance: Floats) -> Bytes:
    """Quantise to [n, 18] bytes."""
    columns, matter = np.ascontiguousarray(x.T), np.ascontiguousarray(importance.T)
    head = half_bytes(fit_values(columns, matter, _IQ4_VALUES, _IQ4_SHIFTS))
    quants = nearest_value(x * _inverse(head), _IQ4_VALUES)
    return np.concatenate([head, _join_nibbles(quants)], axis=1)


def _inverse(head: Bytes) -> Floats:
    """One over the f16 scales [n, 2 B] as written: [n, 1]; of zero, zero."""
    step = head.view("<f2").astype(np.float32)
    return np.where(step != 0, 1 / np.where(step != 0, step, np.float32(1)), np.float32(0))


def _quantise_mxfp4(x: Floats, importance: Floats) -> Bytes:
    """Quantise to [n, 17] bytes; of two exponents, the better one is kept.

    With the first the largest weight just fits, but may be cut off at 6; with the next one all
    weights are rounded more coarsely.
    """
    largest = np.abs(x).max(axis=1)
    _, above = np.frexp(largest)  # largest < 2^above
    best = np.zeros((len(x), 17), np.uint8)
    least = np.full(len(x), np.inf, np.float32)
    for shift in (0, 1):
        exponent = np.clip(above + (127 - 3 + shift), 0, _LARGEST_EXPONENT).astype(np.uint8)
        exponent = np.where(largest > 0, exponent, np.uint8(0))[:, None]
        scale = MXFP4.e8m0_to_fp32_half(exponent)
        scaled = x / scale
        magnitude = nearest_value(np.abs(scaled), _E2M1_VALUES[:8])
        quants = magnitude | ((x < 0).astype(np.uint8) << np.uint8(3))
        error = importance * (_E2M1_VALUES[quants] * scale - x) ** 2
        better = ~(error.sum(axis=1) >= least)
        least[better] = error.sum(axis=1)[better]
        best[better] = np.concatenate([exponent, _join_nibbles(quants)], axis=1)[better]
    return best


def _join_nibbles(values: Bytes) -> Bytes:
    """[..., 32] values below 16 to [..., 16] bytes: the first half low, the second high."""
    packed: Bytes = values[..., :16] | (values[..., 16:] << np.uint8(4))
    return packed


_QUANTISERS: dict[str, Callable[[Floats, Floats], Bytes]] = {
    "Q4_K": quantise_q4_k,
    "Q5_K": quantise_q5_k,
    "Q6_K": quantise_q6_k,
    "Q8_0": _quantise_q8_0,
    "Q4_0": _quantise_q4_0,
    "IQ4_NL": _quantise_iq4_nl,
    "MXFP4": _quantise_mxfp4,
    "F16": _quantise_f16,
    "BF16": _quantise_bf16,
    "F32": _quantise_f32,
}
