"""Quantising blocks of 32 weights with one scale: Q8_0, Q4_0, IQ4_NL and MXFP4.

decode_32.py has the formats.  Each tries several scales, rounds with each, and keeps the one with
the least weighted error.  Every function takes weights and importances [n, 32].
"""

from __future__ import annotations

import numpy as np

from vkmoe.quants.blocks import (
    E2M1_VALUES,
    IQ4_VALUES,
    Bytes,
    Floats,
    exponent_scale,
    half_bytes,
    join_nibbles,
)
from vkmoe.quants.scale_search import fit_symmetric, fit_values, nearest_value

__all__ = ["quantise_iq4_nl", "quantise_mxfp4", "quantise_q4_0", "quantise_q8_0"]

_Q8_0_SHIFTS = np.linspace(-0.5, 0.5, 5, dtype=np.float32)
_Q4_0_SHIFTS = np.arange(-0.9, 0.91, 0.1, dtype=np.float32)
_IQ4_SHIFTS = np.arange(-7, 8, dtype=np.float32)
_LARGEST_EXPONENT = 254


def quantise_q8_0(x: Floats, importance: Floats) -> Bytes:
    """To [n, 34] bytes; tries scales a little around largest / 127."""
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


def quantise_q4_0(x: Floats, importance: Floats) -> Bytes:
    """To [n, 18] bytes."""
    columns, matter = np.ascontiguousarray(x.T), np.ascontiguousarray(importance.T)
    head = half_bytes(fit_symmetric(columns, matter, 8, _Q4_0_SHIFTS))
    scaled = x * _inverse(head)
    quants = np.clip(np.rint(scaled), -8, 7) + np.float32(8)
    return np.concatenate([head, join_nibbles(quants.astype(np.uint8))], axis=1)


def quantise_iq4_nl(x: Floats, importance: Floats) -> Bytes:
    """To [n, 18] bytes."""
    columns, matter = np.ascontiguousarray(x.T), np.ascontiguousarray(importance.T)
    head = half_bytes(fit_values(columns, matter, IQ4_VALUES, _IQ4_SHIFTS))
    quants = nearest_value(x * _inverse(head), IQ4_VALUES)
    return np.concatenate([head, join_nibbles(quants)], axis=1)


def _inverse(head: Bytes) -> Floats:
    """One over the f16 scales [n, 2 B] as written: [n, 1]; of zero, zero."""
    step = head.view("<f2").astype(np.float32)
    return np.where(step != 0, 1 / np.where(step != 0, step, np.float32(1)), np.float32(0))


def quantise_mxfp4(x: Floats, importance: Floats) -> Bytes:
    """To [n, 17] bytes; tries the exponent with which the largest weight just fits, and the next.

    With the first the largest may be cut off at 6, with the second all are rounded more coarsely.
    """
    largest = np.abs(x).max(axis=1)
    _, above = np.frexp(largest)  # largest < 2^above
    best = np.zeros((len(x), 17), np.uint8)
    least = np.full(len(x), np.inf, np.float32)
    for shift in (0, 1):
        exponent = np.clip(above + (127 - 3 + shift), 0, _LARGEST_EXPONENT).astype(np.uint8)
        exponent = np.where(largest > 0, exponent, np.uint8(0))[:, None]
        scaled = x / exponent_scale(exponent)
        magnitude = nearest_value(np.abs(scaled), E2M1_VALUES[:8])
        quants = magnitude | ((x < 0).astype(np.uint8) << np.uint8(3))
        error = importance * (E2M1_VALUES[quants] * exponent_scale(exponent) - x) ** 2
        better = ~(error.sum(axis=1) >= least)
        least[better] = error.sum(axis=1)[better]
        best[better] = np.concatenate([exponent, join_nibbles(quants)], axis=1)[better]
    return best
