"""Which experts follow which: the predictor that learns from pairs.

Fused: from one token to the next, or to the one after it, in the same layer. Stepped: from layer to
layer of the same token, and to the first layer from the last one of the token before. Takes
4 * n_layers * n_experts^2 bytes.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from vkmoe.experts import _sums
from vkmoe.experts.decide.keys import KeySpace
from vkmoe.experts.decide.settings import Executor
from vkmoe.experts.predictor import Ids, Predictor, Scores

__all__ = ["Correlation"]

WARM_UP = 32  # tokens told of before the first guess
LATEST = 1e15  # of a pair; the counts are float32
LEAST = 1e-15  # of a pair beside one of now: far smaller numbers are slow to add up


class Correlation(Predictor):
    """The score of an expert: of the times that each expert before it was used, the share that it
    followed, averaged over those used now. A pair counts half after `half_life` tokens.
    """

    informs = True

    def __init__(
        self, space: KeySpace, half_life: float, executor: Executor = "fused", lag: int = 1
    ) -> None:
        super().__init__(space)
        self._stepped = executor == "stepped"
        shape = (space.n_layers, space.n_experts)
        self._pairs = np.zeros((*shape, space.n_experts), np.float32)  # [layer, before, after]
        self._seen = np.zeros(shape, np.float32)  # [layer, before]
        self._growth, self._weight = 2.0 ** (1.0 / half_life), 1.0
        # Ids [n_layers, n_used] of the last tokens, the oldest first, and what was said then.
        self._last: deque[tuple[Ids, Scores | None]] = deque(maxlen=lag)
        self._above_first: Ids | None = None  # stepped: of the last layer before this token, [1, n]
        self._n_tokens = 0

    def after_token(self, ids: Ids) -> Scores | None:
        self._n_tokens += 1
        if self._stepped:
            self._after_steps(ids)
            return None
        self.said = None
        if len(self._last) == self._last.maxlen:
            before, self.said = self._last[0]
            self._learn(before, ids, 0)
        ready = self._n_tokens > WARM_UP
        says = self._follow(ids, 0).ravel() if ready else None
        self._last.append((ids.copy(), says))
        return says

    def after_layer(self, layer: int, ids: Ids) -> Scores | None:
        if not self._stepped:
            says = self._last[0][1] if self._last else None
            return says[self.space.numbers(layer + 1)] if says is not None else None
        if self._n_tokens <= WARM_UP:
            return None
        following: Scores = self._follow(ids[None], layer + 1)[0]
        return following

    def reset(self) -> None:
        self._last.clear()
        self._above_first = self.said = None

    # ----- inside -----

    def _after_steps(self, ids: Ids) -> None:
        first, above = 1, ids[:-1]
        if self._above_first is not None:
            first, above = 0, np.concatenate([self._above_first, above])
        self.said = None
        if self._n_tokens > WARM_UP:
            self.said = np.zeros(self.space.n_keys)
            self.said[first * self.space.n_experts :] = self._follow(above, first).ravel()
        self._learn(above, ids[first:], first)
        self._above_first = ids[-1:].copy()

    def _learn(self, before: Ids, after: Ids, first: int) -> None:
        """These [n_layers - first, n_used] were followed by those, from layer `first` on."""
        self._weight *= self._growth
        if self._weight > LATEST:
            for counts in (self._pairs, self._seen):
                counts /= self._weight
                counts[counts < LEAST] = 0
            self._weight = 1.0
        _sums.learn(self._pairs, self._seen, before, after, first, self._weight)

    def _follow(self, ids: Ids, first: int) -> Scores:
        """[n, n_experts]: who follows these [n, n_used] in the n layers from `first` on."""
        return _sums.follow(self._pairs, self._seen, ids, first, self._weight)
