"""This module has the NumPy twins of layers with a recurrent state, in float64.

The recurrence is that of Yang et al. 2024 (arXiv:2412.06464, eq. 10), token by token.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Wide = NDArray[np.float64]
EPS = 1e-6


def sigmoid(x: Floats) -> Wide:
    """Compute 1 / (1 + exp(-x))."""
    found: Wide = 1.0 / (1.0 + np.exp(-x.astype(np.float64)))
    return found


def silu(x: Floats) -> Wide:
    return x * sigmoid(x)


def convolve(x: Floats, before: Floats, taps: Floats) -> Wide:
    """Compute the convolution of each channel, causal: x [n_rows, n_channels], `before` the rows
    before these, taps [n_channels, n_taps], the oldest first."""
    n_taps = taps.shape[1]
    rows = np.concatenate([before[len(before) - n_taps + 1 :], x]).astype(np.float64)
    windows = np.lib.stride_tricks.sliding_window_view(rows, n_taps, axis=0)
    found: Wide = silu((windows * taps).sum(axis=-1))
    return found


def unit(x: Floats) -> Wide:
    """Divide each vector by its length: the last axis of x."""
    wide = x.astype(np.float64)
    found: Wide = wide / np.sqrt((wide**2).sum(axis=-1, keepdims=True) + EPS)
    return found


def decay(alpha: Floats, scales: Floats, biases: Floats) -> Wide:
    """Compute exp(scale * softplus(alpha + bias)) of each head."""
    found: Wide = np.exp(scales * np.logaddexp(0.0, alpha.astype(np.float64) + biases))
    return found


def delta_step(
    q: Floats, k: Floats, v: Floats, decays: Floats, beta: Floats, state: Wide
) -> tuple[Wide, Wide]:
    """Compute a token: q, k [n_heads, dim] and v alike, decays [n_heads, 1 or dim], beta [n_heads],
    state [n_heads, dim, dim]. Returns what comes out [n_heads, dim], and the state after it."""
    state = state * decays[:, :, None]
    delta = beta[:, None] * (v - np.einsum("hd,hde->he", k, state))
    state = state + k[:, :, None] * delta[:, None, :]
    return np.einsum("hd,hde->he", q, state), state


def gate_heads(
    heads: Floats, gates: Floats, is_silu: bool, gain: Floats | None, eps: float
) -> Wide:
    """Compute norm(heads) * gate(gates), both [n_heads, dim]; without a gain there is no norm."""
    wide = heads.astype(np.float64)
    if gain is not None:
        wide = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + eps) * gain
    found: Wide = wide * (silu(gates) if is_silu else sigmoid(gates))
    return found
