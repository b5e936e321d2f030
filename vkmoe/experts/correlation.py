"""Which experts follow which: the predictor that learns from pairs.

Fused: from token to token of the same layer. Stepped: from layer to layer of the same token, and to
the first layer from the last one of the token before. Takes 4 * n_layers * n_experts^2 bytes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.keys import KeySpace
from vkmoe.experts.predictor import Ids, Predictor, Scores
from vkmoe.experts.settings import Executor

__all__ = ["Correlation"]

WARM_UP = 32  # tokens told of before the first guess
LATEST = 1e30  # of a pair; the counts are float32


class Correlation(Predictor):
    """The score of an expert: of the times that each expert before it was used, the share that it
    followed, averaged over those used now. A pair counts half after `half_life` tokens.
    """

    informs = True

    def __init__(self, space: KeySpace, half_life: float, executor: Executor = "fused") -> None:
        super().__init__(space)
        self._stepped = executor == "stepped"
        shape = (space.n_layers, space.n_experts)
        self._pairs = np.zeros((*shape, space.n_experts), np.float32)  # [layer, before, after]
        self._seen = np.zeros(shape, np.float32)  # [layer, before]
        self._growth, self._weight = 2.0 ** (1.0 / half_life), 1.0
        self._layers = np.arange(space.n_layers)[:, None]
        self._before: Ids | None = None  # [n_layers, n_used]; stepped: of the last layer, [1, ...]
        self._next: Scores | None = None
        self._n_tokens = 0

    def after_token(self, ids: Ids) -> Scores | None:
        self._n_tokens += 1
        if self._stepped:
            self._after_steps(ids)
            return None
        self.said = self._next
        if self._before is not None:
            self._learn(self._before, ids, 0)
        self._before = ids.copy()
        ready = self._n_tokens > WARM_UP
        self._next = self._follow(ids, self._layers).ravel() if ready else None
        return self._next

    def after_layer(self, layer: int, ids: Ids) -> Scores | None:
        if not self._stepped:
            return self._next[self.space.numbers(layer + 1)] if self._next is not None else None
        if self._n_tokens <= WARM_UP:
            return None
        following: Scores = self._follow(ids[None], np.array([[layer + 1]]))[0]
        return following

    def reset(self) -> None:
        self._before = self._next = self.said = None

    # ----- inside -----

    def _after_steps(self, ids: Ids) -> None:
        first = 0 if self._before is not None else 1
        above = ids[:-1] if self._before is None else np.concatenate([self._before, ids[:-1]])
        self.said = None
        if self._n_tokens > WARM_UP:
            self.said = np.zeros(self.space.n_keys)
            after = self._follow(above, self._layers[first:])
            self.said[first * self.space.n_experts :] = after.reshape(-1)
        self._learn(above, ids[first:], first)
        self._before = ids[-1:].copy()

    def _learn(self, before: Ids, after: Ids, first: int) -> None:
        """These [n_layers - first, n_used] were followed by those, from layer `first` on."""
        layers = self._layers[first:]
        self._weight *= self._growth
        if self._weight > LATEST:
            self._pairs /= self._weight
            self._seen /= self._weight
            self._weight = 1.0
        rows = layers * self.space.n_experts + before
        places = rows[:, :, None] * self.space.n_experts + after[:, None, :]
        self._pairs.reshape(-1)[places] += np.float32(self._weight)
        self._seen[layers, before] += np.float32(self._weight)

    def _follow(self, ids: Ids, layers: NDArray[np.int64]) -> Scores:
        """[n, n_experts]: who follows these [n, n_used] in the layers [n, 1]."""
        seen = self._seen[layers, ids] + np.float32(self._weight)  # as if once without follower
        rows = self._pairs.reshape(-1, self.space.n_experts)
        pairs = rows.take(layers * self.space.n_experts + ids, axis=0)  # [n, n_used, n_experts]
        found: Scores = np.einsum("lke,lk->le", pairs, 1 / (seen * ids.shape[1])).astype(np.float64)
        return found
