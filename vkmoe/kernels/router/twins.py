"""This module has the NumPy twin of router_topk.comp, in float64."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FLOAT_MAX = float(np.finfo(np.float32).max)
AT_HOME = np.uint64(1)  # in an entry of the expert table


class Routing(NamedTuple):
    """Holds the chosen experts, in order of falling logit, or of score + bias."""

    ids: NDArray[np.int64]  # [n_used]
    weights: NDArray[np.float64]  # [n_used]

    def scaled(self, output_scales: NDArray[np.float32]) -> Routing:
        """Multiply each weight by the scale [n_experts] of its expert, at last."""
        return Routing(self.ids, self.weights * output_scales[self.ids].astype(np.float64))


class Found(NamedTuple):
    """Says where chosen experts are read, and where else they are or shall be: uint64 [n_used]."""

    addresses: NDArray[np.uint64]
    partners: NDArray[np.uint64]  # 0: nowhere


def look_up(
    entries: NDArray[np.uint64], landing: NDArray[np.uint64], gather: bool = False
) -> Found:
    """Find chosen experts by table entries [n_used] and the layer's landing places [n_landing].

    The j-th expert that is at home gets the j-th place. It is read at home and stored to its place,
    or with `gather` copied from its home and read at its place.
    """
    at_home = (entries & AT_HOME) != 0
    addresses = entries & ~AT_HOME
    places = np.zeros_like(entries)
    misses = np.flatnonzero(at_home)[: len(landing)]
    places[misses] = landing[: len(misses)]
    if not gather:
        return Found(addresses, places)
    gathered = places != 0
    return Found(np.where(gathered, places, addresses), np.where(gathered, addresses, 0))


def router_topk(
    logits: NDArray[np.float32],
    n_used: int,
    gating: str = "softmax",
    renormalise: bool = True,
    scale: float = 1.0,
    selection_bias: NDArray[np.float32] | None = None,
    groups: tuple[int, int] = (1, 1),
) -> Routing:
    """Choose the n_used largest logits [n_experts] (lower id wins ties) and their weights.

    With `selection_bias` [n_experts] those of largest score + bias, and of the best of `groups`
    only: there are (n, of which n are used) (DeepSeek-V3, arXiv:2412.19437, section 2.1.2). NaN
    counts as -inf; infinities count as the largest finite float, so weights are always finite.
    """
    n_groups, n_groups_used = groups
    values = finite(logits)
    sigmoid = gating == "sigmoid"
    scores = _sigmoid(values) if sigmoid else _softmax(values)
    keys = values
    if selection_bias is not None or (sigmoid and n_groups > 1):
        # In float32: what rounds to the same is a tie.
        bias = np.float32(0.0) if selection_bias is None else selection_bias
        keys = finite(scores.astype(np.float32) + bias)
    if n_groups > 1:
        keys = np.where(_in_groups(keys, n_groups, n_groups_used, 1 + sigmoid), keys, -np.inf)
    ids = np.argsort(-keys, kind="stable")[:n_used]
    weights = scores[ids]
    if renormalise:
        total = weights.sum()
        weights = weights / total if total > 0 else np.full(n_used, 1.0 / n_used)
    return Routing(ids, scale * weights)


def shared_weights(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Compute the weights of shared experts from the logits of their gates, both [n_gates]."""
    return _sigmoid(finite(logits))


def _in_groups(
    keys: NDArray[np.float64], n_groups: int, n_groups_used: int, n_best: int
) -> NDArray[np.bool_]:
    """Mark the experts [n_experts] in the groups with the largest sum of their `n_best` keys."""
    groups = np.sort(keys.astype(np.float32).reshape(n_groups, -1), axis=1)
    with np.errstate(over="ignore"):
        sums = groups[:, -n_best:].sum(axis=1, dtype=np.float32)
    kept = np.zeros(n_groups, np.bool_)
    kept[np.argsort(-sums, kind="stable")[:n_groups_used]] = True
    return np.repeat(kept, groups.shape[1])


def finite(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    low = np.where(np.isnan(logits), -np.inf, logits)
    return np.clip(low.astype(np.float64), -FLOAT_MAX, FLOAT_MAX)


def _softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    powers = np.exp(values - values.max())
    result: NDArray[np.float64] = powers / powers.sum()
    return result


def _sigmoid(values: NDArray[np.float64]) -> NDArray[np.float64]:
    result: NDArray[np.float64] = 1.0 / (1.0 + np.exp(np.clip(-values, -80.0, 80.0)))
    return result
