"""Predictors guess which experts will be used, of the next token or of the next layer.

A predictor sees only which experts tokens used. There are two kinds of guesses (`Executor`):
"fused", where the host acts between tokens and guesses all layers of the next one; "stepped", where
it acts between layers too and guesses the next MoE layer of the same token. Scores order experts
and have no unit; 0 is no guess. What a guess is worth to a cache, worth.py learns. All predictors
pass tests/experts/decide/test_predictor_contract.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque

import numpy as np
from numpy.typing import NDArray

from vkmoe.choices import Executor, PredictorName
from vkmoe.experts import _residency
from vkmoe.experts.decide.keys import DecayedCounts, KeySpace
from vkmoe.experts.decide.settings import CacheSettings
from vkmoe.experts.decide.token_table import n_rows_of, row_bytes

__all__ = [
    "WARM_UP",
    "Correlation",
    "Frequency",
    "Predictor",
    "Previous",
    "Scores",
    "create_predictor",
]

Scores = NDArray[np.float64]
Ids = NDArray[np.uint32]

N_TOKENS = 4  # the tokens that `Previous` looks back on
WARM_UP = 32  # tokens seen before the first guess
LATEST = 1e15  # weight of a pair; the counts are float32
LEAST = 1e-15  # weight of a pair beside one of now: far smaller numbers are slow to add up
PAIRS_LIVE = 4  # times as long as counts, as there are so many more pairs to learn


class Predictor(ABC):
    """Guesses from `after_token`, called for every token, and when stepped from `after_layer` too.

    `informs` is whether scores know more than the counts that every cache has; then `guessed`
    [n_keys] are the scores of the last token as they were before it was known.
    """

    informs = False

    def __init__(self, space: KeySpace) -> None:
        self.space = space
        self.guessed: Scores | None = None
        self._next: Scores | None = None  # what `after_token` returned

    @abstractmethod
    def after_token(self, ids: Ids) -> Scores | None:
        """Learn that a token used `ids` [n_layers, n_used]; return scores for the next, [n_keys].

        None while nothing is known, and in stepped mode where only a layer hints at the next.
        """

    def after_layer(self, layer: int, ids: Ids) -> Scores | None:
        """Return scores [n_experts] of the next MoE layer; the token uses `ids` [n_used] in this.

        None while nothing is known; as before the token where this layer tells nothing more. Must
        hold: there is a layer after it.
        """
        return None if self._next is None else self._next[self.space.keys(layer + 1)]

    def reset(self) -> None:
        """Forget the last tokens, as a new text begins, but not what was learned of the model."""
        self._next = self.guessed = None


def create_predictor(
    settings: CacheSettings, space: KeySpace, counts: DecayedCounts, lag: int = 1
) -> Predictor | None:
    """Make the predictor that the settings name, of the token `lag` on; None for "none"."""
    name = settings.predictor
    if name == "previous":
        return Previous(space)
    if name == "frequency":
        return Frequency(space, counts)
    if name == "correlation":
        life = PAIRS_LIVE * settings.half_life
        return Correlation(space, life, settings.executor, lag)
    return None


class Previous(Predictor):
    """Expects the experts of the last four tokens, half as likely with every token since."""

    def __init__(self, space: KeySpace) -> None:
        super().__init__(space)
        self._last: deque[NDArray[np.int64]] = deque(maxlen=N_TOKENS)

    def after_token(self, ids: Ids) -> Scores | None:
        self._last.append(self.space.keys_of(ids))
        scores = np.zeros(self.space.n_keys)
        for age in range(len(self._last), 0, -1):  # the latest last
            scores[self._last[-age]] = 0.5 ** (age - 1)
        self._next = scores
        return scores

    def reset(self) -> None:
        super().reset()
        self._last.clear()


class Frequency(Predictor):
    """Expects experts by their decayed counts, which the owner keeps."""

    def __init__(self, space: KeySpace, counts: DecayedCounts) -> None:
        super().__init__(space)
        self._counts = counts

    def after_token(self, ids: Ids) -> Scores | None:
        self._next = self._counts.values()
        return self._next

    def reset(self) -> None:
        """Do nothing: counts do not belong to one text."""


class Correlation(Predictor):
    """Learns from pairs which experts follow which.

    The score of an expert: of the times that each expert before it was used, the share that it
    followed, averaged over those used now. A pair counts half after `half_life` tokens. Pairs lead,
    fused, from one token to the next, or to the one after it, in the same layer; stepped, from
    layer to layer of the same token, and to the first layer from the last one of the token before.
    """

    informs = True

    @staticmethod
    def n_bytes(space: KeySpace) -> int:
        """Count the bytes of what is remembered of pairs."""
        return 4 * space.n_keys * (space.n_experts + 1)

    def __init__(
        self, space: KeySpace, half_life: float, executor: Executor = "fused", lag: int = 1
    ) -> None:
        super().__init__(space)
        self._stepped = executor == "stepped"
        shape = (space.n_layers, space.n_experts)
        self._pairs = np.zeros((*shape, space.n_experts), np.float32)  # [layer, before, after]
        self._seen = np.zeros(shape, np.float32)  # [layer, before]
        self._growth, self._weight = 2.0 ** (1.0 / half_life), 1.0
        # Ids [n_layers, n_used] of the last tokens, the oldest first, and the scores given then.
        self._last: deque[tuple[Ids, Scores | None]] = deque(maxlen=lag)
        self._above_first: Ids | None = None  # stepped: of the last layer before this token, [1, n]
        self._n_tokens = 0

    def after_token(self, ids: Ids) -> Scores | None:
        self._n_tokens += 1
        if self._stepped:
            self._after_steps(ids)
            return None
        self.guessed = None
        if len(self._last) == self._last.maxlen:
            before, self.guessed = self._last[0]
            self._learn(before, ids, 0)
        ready = self._n_tokens > WARM_UP
        self._next = self._follow(ids, 0).ravel() if ready else None
        self._last.append((ids.copy(), self._next))
        return self._next

    def after_layer(self, layer: int, ids: Ids) -> Scores | None:
        if not self._stepped:
            return super().after_layer(layer, ids)
        if self._n_tokens <= WARM_UP:
            return None
        following: Scores = self._follow(ids[None], layer + 1)[0]
        return following

    def reset(self) -> None:
        super().reset()
        self._last.clear()
        self._above_first = None

    # ----- inside -----

    def _after_steps(self, ids: Ids) -> None:
        first, above = 1, ids[:-1]
        if self._above_first is not None:
            first, above = 0, np.concatenate([self._above_first, above])
        self.guessed = None
        if self._n_tokens > WARM_UP:
            self.guessed = np.zeros(self.space.n_keys)
            self.guessed[first * self.space.n_experts :] = self._follow(above, first).ravel()
        self._learn(above, ids[first:], first)
        self._above_first = ids[-1:].copy()

    def _learn(self, before: Ids, after: Ids, first: int) -> None:
        """Learn that `after` followed `before` [n_layers - first, n_used] from layer `first` on."""
        self._weight *= self._growth
        if self._weight > LATEST:
            for counts in (self._pairs, self._seen):
                counts /= self._weight
                counts[counts < LEAST] = 0
            self._weight = 1.0
        _residency.learn(self._pairs, self._seen, before, after, first, self._weight)

    def _follow(self, ids: Ids, first: int) -> Scores:
        """Score what follows `ids` [n, n_used] in the n layers from `first` on: [n, n_experts]."""
        return _residency.follow(self._pairs, self._seen, ids, first, self._weight)


def remembered_by(
    predictor: PredictorName, space: KeySpace, n_used: int, n_vocab: int
) -> tuple[int, str]:
    """Count the bytes of what a predictor remembers, where these are many, and say what that is."""
    if predictor == "correlation":
        return Correlation.n_bytes(space), "how often each expert follows each other one"
    if predictor == "token":
        n_rows = min(n_vocab, n_rows_of(space.n_layers, n_used))
        what = f"which experts each token uses, of {n_rows} tokens at most"
        return n_rows * row_bytes(space.n_layers, n_used), what
    return 0, ""
