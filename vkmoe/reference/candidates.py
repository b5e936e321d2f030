"""This module has the NumPy twins of candidates_partial.comp and candidates_merge.comp."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vkmoe.batch import TopLogits

__all__ = ["candidates", "candidates_partial"]

N_CANDIDATES = 64
FLOAT_MAX = float(np.finfo(np.float32).max)


def candidates(logits: NDArray[np.float32]) -> TopLogits:
    """Compute what both kernels together compute from logits [n_vocab]."""
    low = np.where(np.isnan(logits), np.float32(-np.inf), logits)
    ids = np.argsort(-low, kind="stable")[:N_CANDIDATES].astype(np.int32)
    finite = np.clip(low.astype(np.float64), -FLOAT_MAX, FLOAT_MAX)
    top = finite.max()
    total = float(top + np.log(np.exp(finite - top).sum()))
    return TopLogits(ids, low[ids], len(logits), total, bool(np.isnan(logits).any()))


def candidates_partial(logits: NDArray[np.float32], n_lists: int) -> list[TopLogits]:
    """Make the first kernel's lists, one per non-empty chunk of ceil(n_vocab / n_lists) logits."""
    chunk = -(-len(logits) // n_lists)
    lists = []
    for start in range(0, len(logits), chunk):
        part = candidates(logits[start : start + chunk])
        lists.append(part._replace(ids=part.ids + np.int32(start)))
    return lists
