"""NumPy twin of router_topk.comp, in float64."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Routing", "router_topk"]

FLOAT_MAX = float(np.finfo(np.float32).max)


class Routing(NamedTuple):
    """The chosen experts, in order of falling logit."""

    ids: NDArray[np.int64]  # [n_used]
    weights: NDArray[np.float64]  # [n_used]
    shared_weight: float


def router_topk(
    logits: NDArray[np.float32],
    n_used: int,
    gating: str = "softmax",
    renormalise: bool = True,
    scale: float = 1.0,
    gate_logit: float | None = None,
) -> Routing:
    """The n_used largest logits [n_experts] (lower id wins ties) and their weights.

    NaN counts as -inf; infinities count as the largest finite float, so weights are always finite.
    """
    values = _finite(logits)
    ids = np.argsort(-values, kind="stable")[:n_used]
    scores = _sigmoid(values) if gating == "sigmoid" else _softmax(values)
    weights = scores[ids]
    if renormalise:
        total = weights.sum()
        weights = weights / total if total > 0 else np.full(n_used, 1.0 / n_used)
    shared = 1.0
    if gate_logit is not None:
        shared = float(_sigmoid(_finite(np.array([gate_logit], np.float32)))[0])
    return Routing(ids, scale * weights, shared)


def _finite(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    low = np.where(np.isnan(logits), -np.inf, logits)
    return np.clip(low.astype(np.float64), -FLOAT_MAX, FLOAT_MAX)


def _softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    powers = np.exp(values - values.max())
    result: NDArray[np.float64] = powers / powers.sum()
    return result


def _sigmoid(values: NDArray[np.float64]) -> NDArray[np.float64]:
    result: NDArray[np.float64] = 1.0 / (1.0 + np.exp(np.clip(-values, -80.0, 80.0)))
    return result
