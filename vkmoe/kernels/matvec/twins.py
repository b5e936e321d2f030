"""This module has the NumPy twins of matvec.comp and embed.comp.

They compute in float64 on decoded weights.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]


class HiddenState(NamedTuple):
    """Holds what a producer of hidden leaves behind."""

    hidden: NDArray[np.float64]  # [width]
    gained: NDArray[np.float64]  # [width], hidden * gain of the next norm


def matvec(
    weights: Floats, x: Floats, scale: float = 1.0, bias: Floats | float = 0.0
) -> NDArray[np.float64]:
    """Compute scale * weights @ x + bias.

    weights [n_rows, n_columns], x [n_columns], bias [n_rows].
    """
    result: NDArray[np.float64] = scale * (weights.astype(np.float64) @ x.astype(np.float64)) + bias
    return result


def matvec_heads(weights: Floats, x: Floats) -> NDArray[np.float64]:
    """Multiply each head's weights by its x.

    weights [n_heads, n_rows, n_columns], x [n_heads, n_columns]; returns [n_heads, n_rows].
    """
    product = weights.astype(np.float64) @ x.astype(np.float64)[:, :, None]
    result: NDArray[np.float64] = product[:, :, 0]
    return result


def matvec_residual(
    weights: Floats, x: Floats, hidden: Floats, gain: Floats, bias: Floats | float = 0.0
) -> HiddenState:
    """Compute hidden + weights @ x + bias, with the next norm's gain applied beside it."""
    return _leave(hidden.astype(np.float64) + matvec(weights, x, bias=bias), gain)


def embed(embeddings: Floats, token: int, gain: Floats, scale: float = 1.0) -> HiddenState:
    """Look up the embedding row of a token (clamped to the vocabulary), times a scale."""
    row = embeddings[min(token, len(embeddings) - 1)].astype(np.float64)
    return _leave(float(np.float32(scale)) * row, gain)


def _leave(hidden: NDArray[np.float64], gain: Floats) -> HiddenState:
    return HiddenState(hidden, hidden * gain.astype(np.float64))
