"""This module has NumPy twins of expert_gate_up.comp and expert_down.comp.

They compute in float64 on decoded weights. What gate and up are multiplied by is a matvec.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vkmoe.kernels.matvec.twins import Floats, HiddenState


def silu(value: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute v / (1 + exp(-v)) (Elfwing et al. 2017)."""
    with np.errstate(over="ignore"):
        return value / (1.0 + np.exp(-value))


def gelu(value: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute v / 2 * (1 + tanh(sqrt(2 / pi) (v + 0.044715 v^3))) (Hendrycks & Gimpel 2016)."""
    inner = np.sqrt(2.0 / np.pi) * (value + 0.044715 * value**3)
    result: NDArray[np.float64] = 0.5 * value * (1.0 + np.tanh(inner))
    return result


def activated(
    gate: NDArray[np.float64], up: NDArray[np.float64], activation: str = "silu"
) -> NDArray[np.float64]:
    """Compute silu(gate) * up, gelu(gate) * up for "geglu", or the clamped SwiGLU of gpt-oss.

    That last one, "swiglu_oai", is g * sigmoid(1.702 * g) * (u + 1) of g = min(gate, 7) and
    u = up within [-7, 7].
    """
    if activation == "silu":
        return silu(gate) * up
    if activation == "geglu":
        return gelu(gate) * up
    low, limited = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
    return silu(1.702 * low) / 1.702 * (limited + 1.0)


def expert_down(
    down: Floats, act: Floats, weights: Floats, hidden: Floats, gain: Floats, biases: Floats
) -> HiddenState:
    """Compute hidden + sum of weights[s] * (down[s] @ act[s] + biases[s]).

    down [n_slots, n_rows, n_columns], biases [n_slots, n_rows].
    """
    result = hidden.astype(np.float64).copy()
    for slot_down, slot_act, weight in zip(down, act, weights, strict=True):
        result += float(weight) * (slot_down.astype(np.float64) @ slot_act.astype(np.float64))
    result += weights.astype(np.float64) @ biases.astype(np.float64)
    return HiddenState(result, result * gain.astype(np.float64))
