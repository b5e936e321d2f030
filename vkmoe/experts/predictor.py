"""Predictors say which experts will be used before they are: of the next token, or the next layer.

A predictor sees only which experts tokens used. Two meanings (`Executor`): "fused", where the host
acts between tokens, and a guess is about all layers of the next one; "stepped", where it acts
between layers too, and a guess is about the next MoE layer of the same token. Scores order experts
and have no unit; 0 is no guess. All pass tests/experts/test_predictor_contract.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.decide.counts import DecayedCounts
from vkmoe.experts.decide.keys import KeySpace

__all__ = ["Frequency", "Predictor", "Previous", "Scores"]

Scores = NDArray[np.float64]
Ids = NDArray[np.uint32]

N_TOKENS = 4  # that `Previous` looks back on


class Predictor(ABC):
    """Told of every token with `after_token`, in stepped mode asked after every layer too.

    `informs` is whether scores tell more than the counts that every cache has; then `said`
    [n_keys] are those of the token just told of, as they were before it was known.
    """

    informs = False

    def __init__(self, space: KeySpace) -> None:
        self.space = space
        self.said: Scores | None = None

    @abstractmethod
    def after_token(self, ids: Ids) -> Scores | None:
        """A token used these [n_layers, n_used]. Scores for the next one, [n_keys].

        None while nothing can be said, and in stepped mode where only a layer tells of the next.
        """

    @abstractmethod
    def after_layer(self, layer: int, ids: Ids) -> Scores | None:
        """The token at hand uses these [n_used] of a MoE layer: scores [n_experts] for the next.

        None while nothing can be said. Must hold: there is a layer after it.
        """

    @abstractmethod
    def reset(self) -> None:
        """A new text begins: forget the last tokens, but not what was learned of the model."""


class _ByToken(Predictor):
    """Knows as much of a layer before the token as when the layers above it are done."""

    def __init__(self, space: KeySpace) -> None:
        super().__init__(space)
        self._next: Scores | None = None

    def after_layer(self, layer: int, ids: Ids) -> Scores | None:
        if self._next is None:
            return None
        return self._next[self.space.numbers(layer + 1)]


class Previous(_ByToken):
    """Experts of the last four tokens, half as likely with every token since."""

    def __init__(self, space: KeySpace) -> None:
        super().__init__(space)
        self._last: deque[NDArray[np.int64]] = deque(maxlen=N_TOKENS)
        self._first = np.arange(space.n_layers, dtype=np.int64)[:, None] * space.n_experts

    def after_token(self, ids: Ids) -> Scores | None:
        self._last.append(ids + self._first)
        scores = np.zeros(self.space.n_keys)
        for age in range(len(self._last), 0, -1):  # the latest last
            scores[self._last[-age]] = 0.5 ** (age - 1)
        self._next = scores
        return scores

    def reset(self) -> None:
        self._last.clear()
        self._next = None


class Frequency(_ByToken):
    """Experts by their decayed counts, which the owner keeps."""

    def __init__(self, space: KeySpace, counts: DecayedCounts) -> None:
        super().__init__(space)
        self._counts = counts

    def after_token(self, ids: Ids) -> Scores | None:
        self._next = self._counts.values()
        return self._next

    def reset(self) -> None:
        """Nothing here belongs to one text."""
