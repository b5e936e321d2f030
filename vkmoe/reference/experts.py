"""NumPy twins of expert_gate_up.comp and expert_down.comp, in float64 on decoded weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vkmoe.reference.matvec import Floats, HiddenState

__all__ = ["expert_down", "expert_gate_up", "silu"]


def silu(value: NDArray[np.float64]) -> NDArray[np.float64]:
    """v / (1 + exp(-v)) (Elfwing et al. 2017)."""
    with np.errstate(over="ignore"):
        return value / (1.0 + np.exp(-value))


def expert_gate_up(gate: Floats, up: Floats, x: Floats, scale: float) -> NDArray[np.float64]:
    """silu(scale * gate @ x) * (scale * up @ x); gate, up [n_slots, n_rows, n_columns]."""
    wide = x.astype(np.float64)
    return silu(scale * (gate.astype(np.float64) @ wide)) * (scale * (up.astype(np.float64) @ wide))


def expert_down(
    down: Floats,
    act: Floats,
    weights: Floats,
    hidden: Floats,
    gain: Floats,
) -> HiddenState:
    """hidden + sum of weights[s] * down[s] @ act[s]; down [n_slots, n_rows, n_columns]."""
    result = hidden.astype(np.float64).copy()
    for slot_down, slot_act, weight in zip(down, act, weights, strict=True):
        result += float(weight) * (slot_down.astype(np.float64) @ slot_act.astype(np.float64))
    return HiddenState(result, result * gain.astype(np.float64))
