"""Random weights made directly as blocks: what quantising noise would give, at memory speed.

Owns plausible scales: decoded weights have mean 0 and the standard deviation asked for.  For
synthetic models and kernel tests.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from vkmoe.quants.k_quants import pack_subscales
from vkmoe.quants.types import TYPES

__all__ = ["random_weights"]

Bytes = npt.NDArray[np.uint8]

# Six-bit subscales are drawn from [32, 64): their root mean square, and that of uniform quants.
_SUBSCALE_RMS = float(np.sqrt(np.mean(np.arange(32, 64) ** 2)))


def random_weights(
    type_name: str, n_rows: int, columns: int, rng: np.random.Generator, deviation: float
) -> Bytes:
    """uint8 [n_rows, row_bytes] of a type with a kernel; every weight finite.

    `deviation` is the standard deviation of the decoded weights.
    """
    row_bytes = TYPES[type_name].row_bytes(columns)
    n_blocks = n_rows * columns // TYPES[type_name].block_weights
    blocks = _MAKERS[type_name](n_blocks, rng, deviation)
    return blocks.reshape(n_rows, row_bytes)


def _random_bytes(shape: tuple[int, int], rng: np.random.Generator) -> Bytes:
    n_words = -(-shape[0] * shape[1] // 8)
    words = rng.integers(0, 1 << 64, n_words, dtype=np.uint64)
    return words.view(np.uint8)[: shape[0] * shape[1]].reshape(shape)


def _half_bytes(value: float) -> Bytes:
    return np.array([value], "<f2").view(np.uint8)


def _uniform_rms(levels: int) -> float:
    """The standard deviation of a whole number drawn evenly from `levels` of them."""
    return float(np.sqrt((levels * levels - 1) / 12))


def _range_blocks(
    type_name: str, levels: int
) -> Callable[[int, np.random.Generator, float], Bytes]:
    """Q4_K or Q5_K: minima equal to scales and dmin = d * mean quant, so the mean is zero."""

    def make(n_blocks: int, rng: np.random.Generator, deviation: float) -> Bytes:
        blocks = _random_bytes((n_blocks, TYPES[type_name].block_bytes), rng)
        d = deviation / (_SUBSCALE_RMS * _uniform_rms(levels))
        blocks[:, 0:2] = _half_bytes(d)
        blocks[:, 2:4] = _half_bytes(d * (levels - 1) / 2)
        subscales = (blocks[:, 4:12] & np.uint8(31)) | np.uint8(32)
        blocks[:, 4:16] = pack_subscales(subscales, subscales)
        return blocks

    return make


def _q6_k(n_blocks: int, rng: np.random.Generator, deviation: float) -> Bytes:
    blocks = _random_bytes((n_blocks, TYPES["Q6_K"].block_bytes), rng)
    scales = blocks[:, 192:208].view(np.int8)
    scales[...] = np.where(scales < 0, -1, 1) * ((scales & 31) | 32)
    blocks[:, 208:210] = _half_bytes(deviation / (_SUBSCALE_RMS * _uniform_rms(64)))
    return blocks


def _q8_0(n_blocks: int, rng: np.random.Generator, deviation: float) -> Bytes:
    blocks = _random_bytes((n_blocks, TYPES["Q8_0"].block_bytes), rng)
    blocks[:, 0:2] = _half_bytes(deviation / _uniform_rms(256))
    return blocks


def _f32(n_weights: int, rng: np.random.Generator, deviation: float) -> Bytes:
    values = rng.standard_normal(n_weights, np.float32) * np.float32(deviation)
    return values.view(np.uint8)


def _f16(n_weights: int, rng: np.random.Generator, deviation: float) -> Bytes:
    values = _f32(n_weights, rng, deviation).view(np.float32)
    return values.astype("<f2").view(np.uint8)


def _bf16(n_weights: int, rng: np.random.Generator, deviation: float) -> Bytes:
    words = _f32(n_weights, rng, deviation).view("<u2")
    return np.ascontiguousarray(words[1::2]).view(np.uint8)


_MAKERS: dict[str, Callable[[int, np.random.Generator, float], Bytes]] = {
    "Q4_K": _range_blocks("Q4_K", 16),
    "Q5_K": _range_blocks("Q5_K", 32),
    "Q6_K": _q6_k,
    "Q8_0": _q8_0,
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
}
