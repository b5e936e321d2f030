"""How local the routing of a trace is: whether a small cache can serve this model at all.

Pure counting, nothing is simulated. Neighbours, windows and segments lie within one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.study.trace import Trace

__all__ = ["SEGMENT", "SHARES", "Locality", "locality"]

SHARES = (0.5, 0.8, 0.95)  # of the uses
SEGMENT = 16  # tokens; what arXiv:2505.16056 compares models at

Values = NDArray[np.float64]  # [n_layers]; NaN where the trace is too short
Used = NDArray[np.bool_]  # of one layer and sequence: [n_tokens, n_experts]


@dataclass(frozen=True, eq=False)
class Locality:
    """Holds figures of each layer; `np.nanmean` of them speaks for the model."""

    overlap: Values  # Jaccard index of adjacent tokens: common experts / experts of both
    overlap_by_chance: float  # of independent tokens that use all experts alike
    covering: dict[float, Values]  # experts that take this share of the uses
    reuse_distance: Values  # median tokens from a use of an expert to its next
    working_set: dict[int, Values]  # different experts in a window of so many tokens, mean
    consistency: Values  # segment routing best performance, see `_consistency`
    consistency_size: Values  # experts that its segment router holds / experts a token uses


def locality(trace: Trace) -> Locality:
    """Compute the locality figures of a trace."""
    space, n_used = trace.space, trace.header.n_used
    longest = max(len(sequence) for sequence in trace.sequences)
    windows = [1 << n for n in range(longest.bit_length())]
    overlap, reuse_distance, consistency, size = np.full((4, space.n_layers), np.nan)
    covering = {share: np.empty(space.n_layers) for share in SHARES}
    working_set = {window: np.empty(space.n_layers) for window in windows}
    for layer in range(space.n_layers):  # the flags of all at once take gigabytes
        parts = [_used(sequence[:, layer], space.n_experts) for sequence in trace.sequences]
        overlap[layer], reuse_distance[layer] = _overlap(parts), _reuse_distance(parts)
        consistency[layer], size[layer] = _consistency(parts, n_used)
        for share, values in covering.items():
            values[layer] = _covering(parts, share)
        for window, values in working_set.items():
            values[layer] = _working_set(parts, window)
    common = n_used**2 / space.n_experts  # experts two independent tokens share, on average
    chance = common / (2 * n_used - common)
    return Locality(overlap, chance, covering, reuse_distance, working_set, consistency, size)


def _used(ids: NDArray[np.uint32], n_experts: int) -> Used:
    """Turn ids [n_tokens, n_used] into flags."""
    used = np.zeros((len(ids), n_experts), np.bool_)
    np.put_along_axis(used, ids.astype(np.int64), True, axis=1)
    return used


def _overlap(parts: list[Used]) -> float:
    pairs = [(used[:-1], used[1:]) for used in parts if len(used) > 1]
    if not pairs:
        return float("nan")
    values = [np.sum(a & b, axis=1) / np.sum(a | b, axis=1) for a, b in pairs]
    return float(np.mean(np.concatenate(values)))


def _covering(parts: list[Used], share: float) -> float:
    uses = np.sort(sum(np.sum(used, axis=0) for used in parts))[::-1]
    # Half a use is slack against rounding of the share.
    return float(np.searchsorted(np.cumsum(uses), share * uses.sum() - 0.5) + 1)


def _reuse_distance(parts: list[Used]) -> float:
    distances = []
    for used in parts:
        experts, tokens = np.nonzero(used.T)  # by expert, then by token
        distances.append(np.diff(tokens)[np.diff(experts) == 0])
    found = np.concatenate(distances)
    return float(np.median(found)) if found.size else float("nan")


def _working_set(parts: list[Used], window: int) -> float:
    """Average over windows side by side; tokens that do not fill one are left out."""
    sizes = []
    for used in parts:
        n_windows = len(used) // window
        cut = used[: n_windows * window].reshape(n_windows, window, used.shape[1])
        sizes.append(cut.any(axis=1).sum(axis=1))
    return float(np.mean(np.concatenate(sizes)))


def _consistency(parts: list[Used], n_used: int) -> tuple[float, float]:
    """Compute a layer's segment routing best performance and size ratio (arXiv:2505.16056, 2.2).

    A router that must choose once for all tokens of a segment predicts the experts that at least
    some number of its tokens use. The best F1 score over that number says how well it can mimic
    the token's own choices; the ratio says how many more experts it holds for that.
    """
    n_uses = np.zeros(SEGMENT + 1)  # segments of all experts by the tokens that use the expert
    n_segments = 0
    for used in parts:
        totals = np.cumsum(np.vstack([np.zeros(used.shape[1], np.int64), used]), axis=0)
        in_segment = totals[SEGMENT:] - totals[:-SEGMENT]  # one segment from each position on
        n_uses += np.bincount(in_segment.reshape(-1), minlength=SEGMENT + 1)
        n_segments += len(in_segment)
    if not n_segments:
        return float("nan"), float("nan")
    actual = n_segments * SEGMENT * n_used
    # Entry n of each: when experts with n and more tokens of a segment are predicted.
    predicted = SEGMENT * np.cumsum(n_uses[::-1])[::-1][1:]
    right = np.cumsum((n_uses * np.arange(SEGMENT + 1))[::-1])[::-1][1:]
    score = 2 * right / (predicted + actual)
    best = int(np.argmax(score))
    return float(score[best]), float(predicted[best] / actual)
