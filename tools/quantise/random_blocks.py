"""This module makes random weights directly as blocks, at the speed of memory.

It owns plausible scales: decoded weights have mean 0 and the standard deviation asked for.
Synthetic models and kernel tests use it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt
from gguf.quants import IQ4_NL, MXFP4

from tools.quantise.k_quants import pack_subscales
from vkmoe.quants import TYPES, decode
from vkmoe.quants.types import Bytes

_N_SAMPLE = 1 << 12  # blocks by which the size of weights is measured


def _rms(values: npt.NDArray[np.generic]) -> float:
    """The root mean square of values that are all as likely."""
    return float(np.sqrt(np.mean(values.astype(np.float64) ** 2)))


# Six-bit subscales are drawn from [32, 64), or from all there are where they have a sign.
_SUBSCALE_RMS = _rms(np.arange(32, 64))
_SIGNED_SUBSCALE_RMS = _rms(np.arange(-32, 32))


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


def _q2_k(n_blocks: int, rng: np.random.Generator, deviation: float) -> Bytes:
    """Minima equal scales, as in Q4_K; both are drawn from 8 to 15."""
    blocks = _random_bytes((n_blocks, TYPES["Q2_K"].block_bytes), rng)
    subscales = (blocks[:, 0:16] & np.uint8(7)) | np.uint8(8)
    blocks[:, 0:16] = subscales | (subscales << np.uint8(4))
    d = deviation / (_rms(np.arange(8, 16)) * _uniform_rms(4))
    blocks[:, 80:82] = _half_bytes(d)
    blocks[:, 82:84] = _half_bytes(d * 3 / 2)
    return blocks


def _either_sign(
    type_name: str, at: int, rms: float
) -> Callable[[int, np.random.Generator, float], Bytes]:
    """Types without minima: all bits random, so is the sign of d, and so the mean is zero.

    `at` is the place of d, `rms` the root mean square of what it is multiplied by.
    """

    def make(n_blocks: int, rng: np.random.Generator, deviation: float) -> Bytes:
        blocks = _random_bytes((n_blocks, TYPES[type_name].block_bytes), rng)
        sign = blocks[:, at + 1] & np.uint8(0x80)
        blocks[:, at : at + 2] = _half_bytes(deviation / rms)
        blocks[:, at + 1] |= sign
        return blocks

    return make


def _with_scale(
    type_name: str, at: int, minimum: float | None = None
) -> Callable[[int, np.random.Generator, float], Bytes]:
    """Types whose blocks are d times what all their other bits say: these are random.

    `at` is the place of d, behind which a minimum follows that is `minimum` times d.
    """

    def make(n_blocks: int, rng: np.random.Generator, deviation: float) -> Bytes:
        blocks = _random_bytes((n_blocks, TYPES[type_name].block_bytes), rng)
        d = deviation / _rms_of(type_name, at, minimum)
        blocks[:, at : at + 2] = _half_bytes(d)
        if minimum is not None:
            blocks[:, at + 2 : at + 4] = _half_bytes(minimum * d)
        return blocks

    return make


@cache
def _rms_of(type_name: str, at: int, minimum: float | None) -> float:
    """The root mean square of weights of random blocks where d is 1."""
    blocks = _random_bytes((_N_SAMPLE, TYPES[type_name].block_bytes), np.random.default_rng(0))
    blocks[:, at : at + 2] = _half_bytes(1.0)
    if minimum is not None:
        blocks[:, at + 2 : at + 4] = _half_bytes(minimum)
    return _rms(decode(type_name, blocks, _N_SAMPLE * TYPES[type_name].block_weights))


def _iq1_m(n_blocks: int, rng: np.random.Generator, deviation: float) -> Bytes:
    """As IQ1_S, whose weights are as large; each of four half words has four bits of d."""
    blocks = _random_bytes((n_blocks, TYPES["IQ1_M"].block_bytes), rng)
    d = int(_half_bytes(deviation / _rms_of("IQ1_S", 0, None)).view("<u2")[0])
    for i, scales in enumerate(blocks[:, 48:].view("<u2").T):
        scales &= np.uint16(0x0FFF)
        scales |= np.uint16((d >> 4 * i & 15) << 12)
    return blocks


def _nvfp4(n_blocks: int, rng: np.random.Generator, deviation: float) -> Bytes:
    """Scales of two UE4M3 numbers that follow each other, in the shares that make the deviation."""
    blocks = _random_bytes((n_blocks, TYPES["NVFP4"].block_bytes), rng)
    numbers = decode("NVFP4", _steps_of_ue4m3(), 127 * 64).reshape(127, 64)[:, 0].astype(float)
    wanted = deviation / _rms(np.array(MXFP4.kvalues))
    code = int(np.searchsorted(numbers, wanted)) - 1
    below, above = numbers[code] ** 2, numbers[code + 1] ** 2
    share = (wanted**2 - below) / (above - below)  # of the larger
    blocks[:, :4] = code + (blocks[:, :4] < round(256 * share))
    return blocks


def _steps_of_ue4m3() -> Bytes:
    """Blocks of each scale but the one that is no number, whose weights are that scale."""
    blocks = np.full((127, TYPES["NVFP4"].block_bytes), 0x11, np.uint8)
    blocks[:, :4] = np.arange(127)[:, None]
    return blocks


def _mxfp4(n_blocks: int, rng: np.random.Generator, deviation: float) -> Bytes:
    """Two exponents that follow each other, in the shares that make the deviation."""
    blocks = _random_bytes((n_blocks, TYPES["MXFP4"].block_bytes), rng)
    ratio = np.log2(deviation / _rms(np.array(MXFP4.kvalues)))
    share = (4 ** (ratio - np.floor(ratio)) - 1) / 3  # of the larger: its squares are 4 times
    larger = blocks[:, 0] < round(256 * share)
    blocks[:, 0] = int(np.floor(ratio)) + 128 + larger
    return blocks


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
    "Q2_K": _q2_k,
    "Q3_K": _either_sign("Q3_K", 108, _SIGNED_SUBSCALE_RMS * _rms(np.arange(-4, 4))),
    "IQ4_XS": _either_sign("IQ4_XS", 0, _SIGNED_SUBSCALE_RMS * _rms(np.array(IQ4_NL.kvalues))),
    "IQ4_NL": _either_sign("IQ4_NL", 0, _rms(np.array(IQ4_NL.kvalues))),
    "Q4_0": _either_sign("Q4_0", 0, _rms(np.arange(-8, 8))),
    "Q4_1": _with_scale("Q4_1", 0, -7.5),
    "Q5_0": _either_sign("Q5_0", 0, _rms(np.arange(-16, 16))),
    "Q5_1": _with_scale("Q5_1", 0, -15.5),
    **{name: _with_scale(name, 0) for name in ("IQ3_XXS", "IQ3_S", "IQ2_XXS", "IQ2_XS", "IQ2_S")},
    "IQ1_S": _with_scale("IQ1_S", 0),
    "IQ1_M": _iq1_m,
    "TQ1_0": _with_scale("TQ1_0", 52),
    "TQ2_0": _either_sign("TQ2_0", 64, _rms(np.arange(-1, 3))),
    "Q1_0": _with_scale("Q1_0", 0),
    "Q2_0": _either_sign("Q2_0", 0, _rms(np.arange(-1, 3))),
    "NVFP4": _nvfp4,
    "MXFP4": _mxfp4,
    "Q8_0": _q8_0,
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
}
