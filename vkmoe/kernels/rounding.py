"""Twin of how ggml brings a vector into the form that a row of weights is multiplied by.

On CPUs products are of small whole numbers: a vector has 8 bits for each value and a scale for each
block. So what a CPU computes differs from float64 by one or two percent; from this, by the rounding
of sums alone. The forms are those of ggml's blocks q8_0, q8_1 and q8_K.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vkmoe.quants import decode
from vkmoe.quants.types import BY_ID, TYPES, Bytes

Doubles = NDArray[np.float64]
_LARGEST = 127  # of 8 bits
# Where a block has the minimum that its weights are counted from, as float16.
_MINIMA = {"Q4_1": 2, "Q5_1": 2}


def rounded(vector: NDArray[np.float32], form: str) -> Doubles:
    """Return a vector [n] as it is after being brought into a form, a type of ggml's."""
    if form == "F32":
        return vector.astype(np.float64)
    if form == "F16":
        return vector.astype(np.float16).astype(np.float64)
    if form == "BF16":
        words = vector.view(np.uint32)
        words = (words + 0x7FFF + (words >> 16 & 1)) & np.uint32(0xFFFF0000)
        return words.view(np.float32).astype(np.float64)
    whole, scales = _whole_numbers(vector, form)
    values: Doubles = (whole * scales).reshape(-1)
    return values


def multiply(type_name: str, rows: Bytes, vector: NDArray[np.float32], form: int) -> Doubles:
    """Multiply rows of weights [n_rows, row_bytes], as in a file, by a vector: [n_rows].

    `form` is the number of the type that the vector is brought into.
    """
    kind, name = TYPES[type_name], BY_ID[form].name
    weights = decode(type_name, rows, len(rows) * len(vector)).reshape(len(rows), -1)
    products: Doubles = weights.astype(np.float64) @ rounded(vector, name)
    if type_name in _MINIMA and name == "Q8_1":
        # Minima are multiplied by the sum of a block of the vector, which is kept as float16.
        at = _MINIMA[type_name]
        blocks = rows.reshape(len(rows), -1, kind.block_bytes)[:, :, at : at + 2]
        minima = np.ascontiguousarray(blocks).view("<f2")[:, :, 0].astype(np.float64)
        whole, scales = _whole_numbers(vector, name)
        exact = (whole * scales).sum(axis=1)
        products += minima @ (_sums_of(vector, whole) - exact)
    return products


def _whole_numbers(vector: NDArray[np.float32], form: str) -> tuple[Doubles, Doubles]:
    """Return the whole numbers [n_blocks, block] and scales [n_blocks, 1] of a vector."""
    blocks = vector.reshape(-1, TYPES[form].block_weights)
    if form == "Q8_K":
        largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
        per_value = _inverse(-_LARGEST, largest)
        whole = np.minimum(_LARGEST, np.rint(blocks * per_value))
        return whole.astype(np.float64), _inverse(1, per_value).astype(np.float64)
    assert form in ("Q8_0", "Q8_1"), form
    most = np.abs(blocks).max(axis=1, keepdims=True)
    whole = np.rint(blocks * _inverse(_LARGEST, most))
    scales = (most / np.float32(_LARGEST)).astype(np.float16)
    return whole.astype(np.float64), scales.astype(np.float64)


def _sums_of(vector: NDArray[np.float32], whole: Doubles) -> Doubles:
    """Return the sums of blocks, as q8_1 keeps them: [n_blocks]."""
    most = np.abs(vector.reshape(len(whole), -1)).max(axis=1)
    scales = (most / np.float32(_LARGEST)).astype(np.float32)
    sums: Doubles = (scales * whole.sum(axis=1)).astype(np.float16).astype(np.float64)
    return sums


def _inverse(number: int, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return number / value for each, 0 for 0."""
    found = np.zeros_like(values)
    np.divide(np.float32(number), values, out=found, where=values != 0)
    return found
