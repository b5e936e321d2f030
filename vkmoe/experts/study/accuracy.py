"""How often predictors are right on a trace: the share of the experts they name that are used.

They name as many experts of each layer as a token uses. No cache takes part, so a right guess may
be of an expert that has a slot anyway; replay.py finds what guesses are worth to a cache.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vkmoe.choices import Executor, PredictorName
from vkmoe.experts.decide.counts import DecayedCounts
from vkmoe.experts.decide.predict import PREDICTORS, create_predictor
from vkmoe.experts.decide.settings import CacheSettings
from vkmoe.experts.study.trace import Trace

__all__ = ["Accuracies", "accuracies", "guess_accuracy"]

MEANINGS: tuple[Executor, ...] = ("fused", "stepped")

Accuracies = dict[Executor, dict[PredictorName, float | None]]


def accuracies(trace: Trace, half_life: float) -> Accuracies:
    """Return the accuracy of every predictor in both meanings."""
    return {
        meaning: {name: guess_accuracy(trace, name, meaning, half_life) for name in PREDICTORS}
        for meaning in MEANINGS
    }


def guess_accuracy(
    trace: Trace, name: PredictorName, meaning: Executor, half_life: float
) -> float | None:
    """Return the accuracy from 0 to 1; None where it named no expert, or `name` is "none".

    Where it names fewer than a token uses, the rest counts as wrong.
    """
    space = trace.space
    counts = DecayedCounts(space.n_keys, half_life)
    settings = CacheSettings(half_life=half_life, predictor=name, executor=meaning)
    predictor = create_predictor(settings, space, counts)
    if predictor is None:
        return None
    n_right = n_named = 0
    scores: NDArray[np.float64] | None = None
    for token, ids in enumerate(trace.routing):
        if token in trace.starts:
            predictor.reset()
            scores = None
        counts.use(space.keys_of(ids).reshape(-1))
        following = predictor.after_token(ids)
        counts.advance()
        guessed = predictor.guessed if predictor.informs else scores
        scores = following.copy() if following is not None else None
        if guessed is None or token in trace.starts:
            continue
        rows = guessed.reshape(space.n_layers, -1)[int(meaning == "stepped") :]
        used = ids[int(meaning == "stepped") :]
        n_right += _n_named(rows, used)
        n_named += used.size
    return n_right / n_named if n_named else None


def _n_named(scores: NDArray[np.float64], used: NDArray[np.uint32]) -> int:
    """Return how many of `used` [n, n_used] are among the highest scores [n, n_experts] above 0."""
    n_used = used.shape[1]
    best = np.argpartition(-scores, n_used - 1, axis=1)[:, :n_used]
    named = np.zeros(scores.shape, np.bool_)
    np.put_along_axis(named, best, True, axis=1)
    named &= scores > 0
    return int(np.count_nonzero(np.take_along_axis(named, used.astype(np.int64), axis=1)))
