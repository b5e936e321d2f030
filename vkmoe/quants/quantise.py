"""NumPy quantisers: float32 weights to the bytes of most types that have kernels.

Owns the checks, the cutting into pieces and the plain types; quantise_32.py has those with blocks
of 32, k_quants.py the superblocks.  Q2_K, Q3_K and IQ4_XS have none.
Written for preparing models, not for speed at run time.  The same input gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from vkmoe.errors import UnsupportedModelError
from vkmoe.quants.decode import decode
from vkmoe.quants.k_quants import quantise_q4_k, quantise_q5_k, quantise_q6_k
from vkmoe.quants.quantise_32 import (
    quantise_iq4_nl,
    quantise_mxfp4,
    quantise_q4_0,
    quantise_q8_0,
)
from vkmoe.quants.types import TYPES

__all__ = ["quantise"]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# Weights per piece: small enough that a search's arrays stay in the cache.
_CHUNK_WEIGHTS = 1 << 16
_GROUP = 32
# Beyond what any block can hold, and below where the searches' float32 sums would overflow.
_LARGEST = 1e9


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


_QUANTISERS: dict[str, Callable[[Floats, Floats], Bytes]] = {
    "Q4_K": quantise_q4_k,
    "Q5_K": quantise_q5_k,
    "Q6_K": quantise_q6_k,
    "Q8_0": quantise_q8_0,
    "Q4_0": quantise_q4_0,
    "IQ4_NL": quantise_iq4_nl,
    "MXFP4": quantise_mxfp4,
    "F16": _quantise_f16,
    "BF16": _quantise_bf16,
    "F32": _quantise_f32,
}
