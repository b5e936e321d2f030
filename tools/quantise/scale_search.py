"""This module finds the scale (and minimum) that a group of weights is best rounded with.

It owns two searches, both by the same means: try a range of steps around the obvious one, round,
solve for the best scale by weighted least squares, keep the attempt with the least weighted error.
Arrays are [weights of a group, groups], so that every sum runs over the first axis.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

_TINY = np.float32(1e-30)


class Range(NamedTuple):
    """w = scale * q - minimum, both >= 0, per group: [groups]."""

    scale: Floats
    minimum: Floats


def fit_range(x: Floats, importance: Floats, largest: int, shifts: Floats) -> Range:
    """Fit w = scale * q - minimum with q in 0..largest to `x`, weighted by `importance`.

    `shifts` are the attempts: the step is chosen as if there were `largest + shift` levels.
    Minimises sum(importance * (w - x)^2); the minimum is not allowed below zero.
    """
    low = np.minimum(x.min(axis=0), np.float32(0))
    above = x - low
    span: Floats = np.maximum(above.max(axis=0), _TINY)
    weight_sum = importance.sum(axis=0)
    x_sum = (importance * x).sum(axis=0)
    best = Range(span / np.float32(largest), -low)
    least = np.full_like(span, np.inf)
    for shift in shifts:
        q = np.rint(above * ((np.float32(largest) + shift) / span))
        np.clip(q, 0, largest, out=q)
        weighted = importance * q
        q_sum = weighted.sum(axis=0)
        qx_sum = (weighted * x).sum(axis=0)
        qq_sum = np.maximum((weighted * q).sum(axis=0), _TINY)
        found = _solve(weight_sum, x_sum, q_sum, qx_sum, qq_sum)
        error = (importance * (found.scale * q - found.minimum - x) ** 2).sum(axis=0)
        better = error < least
        least = np.where(better, error, least)
        best = Range(*(np.where(better, new, old) for new, old in zip(found, best, strict=True)))
    return best


def _solve(
    weight_sum: Floats, x_sum: Floats, q_sum: Floats, qx_sum: Floats, qq_sum: Floats
) -> Range:
    """The normal equations of the weighted line through (q, x), with minimum >= 0, scale >= 0."""
    determinant = weight_sum * qq_sum - q_sum * q_sum
    solvable = determinant > 1e-6 * weight_sum * qq_sum
    inverse: Floats = np.reciprocal(np.where(solvable, determinant, 1), dtype=np.float32)
    scale = (weight_sum * qx_sum - x_sum * q_sum) * inverse
    minimum = (q_sum * qx_sum - qq_sum * x_sum) * inverse
    through_zero = ~solvable | (minimum < 0)
    scale = np.where(through_zero, qx_sum / qq_sum, scale)
    return Range(np.maximum(scale, np.float32(0)), np.where(through_zero, np.float32(0), minimum))


def fit_symmetric(x: Floats, importance: Floats, most_negative: int, shifts: Floats) -> Floats:
    """Fit w = scale * q with q in -most_negative..most_negative-1 to `x`; scales [groups], signed.

    The weight of largest magnitude is laid on the longer, negative side: a scale may be negative.
    `shifts` are attempts to lay it a little off the end.
    """
    at = np.abs(x).argmax(axis=0)[None, :]
    extreme = np.take_along_axis(x, at, axis=0)[0]
    safe = np.where(extreme == 0, np.float32(1), extreme)
    best = np.zeros_like(safe)
    most = np.full_like(safe, -1)
    for end in -np.float32(most_negative) - shifts:
        q = np.rint(x * (end / safe))
        np.clip(q, -most_negative, most_negative - 1, out=q)
        weighted = importance * q
        qx_sum = (weighted * x).sum(axis=0)
        qq_sum = np.maximum((weighted * q).sum(axis=0), _TINY)
        gain = qx_sum * qx_sum / qq_sum  # what the fit takes off sum(importance * x^2)
        better = gain > most
        most = np.where(better, gain, most)
        best = np.where(better, qx_sum / qq_sum, best)
    return best
