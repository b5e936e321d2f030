"""This module says how likely a model held a token: log-probabilities by the softmax of raw logits.

Temperature, penalties and constraints do not count in them, unless those of the draw are wanted.
How tokens are chosen is the subject of sampler.py.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vkmoe.batch import TopLogits
from vkmoe.generate.runner import FetchLogits


class LogProbs(NamedTuple):
    """Holds the log-probability of a chosen token, and those of the likeliest, in order."""

    chosen: float
    likeliest: tuple[tuple[int, float], ...]  # (token, log-probability); may have the chosen one


def log_probs(token: int, n: int, top: TopLogits, fetch_logits: FetchLogits) -> LogProbs:
    """Compute the log-probability of `token` and those of the `n` likeliest ones.

    Calls `fetch_logits` -> float32 [n_vocab] only for what the listed logits do not have.
    """
    ids, logits = top.ids, top.logits
    is_listed = token in ids
    if n > ids.size and ids.size < top.n_vocab:
        every = fetch_logits()
        ids = np.lexsort((np.arange(every.size), -every))[:n].astype(np.int32)
        logits = every[ids]
    own = top.logits[top.ids == token][0] if is_listed else fetch_logits()[token]
    pairs = zip(ids[:n].tolist(), logits[:n].tolist(), strict=True)
    return LogProbs(
        float(own) - top.log_sum_exp,
        tuple((i, logit - top.log_sum_exp) for i, logit in pairs),
    )


def of_shares(token: int, n: int, shares: Callable[[int], list[tuple[int, float]]]) -> LogProbs:
    """Return the log-probabilities with which `token` was drawn, and those of the `n` likeliest.

    `shares(n)` are the likeliest tokens of the draw with their probabilities.
    """
    found = [(each, math.log(share)) for each, share in shares(sys.maxsize)]
    own = dict(found).get(token, math.log(sys.float_info.min))  # a draw may round a share up from 0
    return LogProbs(own, tuple(found[:n]))
