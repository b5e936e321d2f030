"""This module has the NumPy twins of what reads logits, and of what ends a submit, in float64.

These are soft_cap.comp, candidates_partial.comp, candidates_merge.comp and finish.comp.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vkmoe.batch import TopLogits
from vkmoe.kernels.router.twins import finite

N_CANDIDATES = 64


def soft_cap(logits: NDArray[np.float32], cap: float) -> NDArray[np.float64]:
    """Compute cap * tanh(logits / cap) of logits [n_vocab]."""
    capped: NDArray[np.float64] = cap * np.tanh(logits.astype(np.float64) / cap)
    return capped


def candidates(logits: NDArray[np.float32]) -> TopLogits:
    """Compute what both kernels together compute from logits [n_vocab]."""
    low = np.where(np.isnan(logits), np.float32(-np.inf), logits)
    ids = np.argsort(-low, kind="stable")[:N_CANDIDATES].astype(np.int32)
    values = finite(logits)
    top = values.max()
    total = float(top + np.log(np.exp(values - top).sum()))
    return TopLogits(ids, low[ids], len(logits), total, bool(np.isnan(logits).any()))


def candidates_partial(logits: NDArray[np.float32], n_lists: int) -> list[TopLogits]:
    """Make the first kernel's lists, one per non-empty chunk of ceil(n_vocab / n_lists) logits."""
    chunk = -(-len(logits) // n_lists)
    starts = range(0, len(logits), chunk)
    parts = [candidates(logits[start : start + chunk]) for start in starts]
    return [
        part._replace(ids=part.ids + np.int32(start))
        for part, start in zip(parts, starts, strict=True)
    ]


def pick_rows(x: NDArray[np.float32], wants_logits: Sequence[bool]) -> NDArray[np.float32]:
    """Return the rows of x [n_rows, width] that want logits, in order."""
    picked: NDArray[np.float32] = x[np.flatnonzero(wants_logits)]
    return picked


def finish(log: NDArray[np.uint32], serial: int) -> NDArray[np.uint32]:
    """Return the log with the serial number in word 0, and in word 1 how many parts left it."""
    n_parts = log[1] + np.uint32(1) if log[0] == serial else np.uint32(1)
    return np.concatenate([[np.uint32(serial), n_parts], log[2:]])
