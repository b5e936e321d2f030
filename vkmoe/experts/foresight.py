"""What a cache expects of its experts: what each is worth, and whom to fetch before it is needed.

Owns the predictor, the chances learned from it, and the count of how often it was right. Decides
nothing: residency.py does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.chances import Chances
from vkmoe.experts.decide.counts import DecayedCounts
from vkmoe.experts.decide.keys import KeySpace
from vkmoe.experts.decide.predict import create_predictor
from vkmoe.experts.decide.settings import CacheSettings, PoolSpec

__all__ = ["COPY", "GUESS", "Foresight", "PredictionCounts", "create_foresight"]

Keys = NDArray[np.int64]
Mask = NDArray[np.bool_]
Values = NDArray[np.float64]

# Times what its victim is worth must a newcomer be worth that is copied: its bytes cross the link,
# and those of a guess whether it is used or not. From traces of the demo model (bench/results).
COPY = 1.5
GUESS = 2.0

NOBODY: Keys = np.zeros(0, np.int64)


@dataclass
class PredictionCounts:
    """How the guesses went for which an expert was fetched."""

    n_hinted: int = 0  # experts fetched on a guess
    hinted_bytes: int = 0  # of their slots
    n_right: int = 0  # of them used by the very token, or layer, that the guess was about


class Foresight:
    """Told of every token; says what experts are worth, and whom the predictor would fetch."""

    def __init__(self, space: KeySpace, counts: DecayedCounts, settings: CacheSettings) -> None:
        self._space, self._stepped = space, settings.executor == "stepped"
        self._lag = 1 if self._stepped else settings.lag
        self.predictor = create_predictor(settings, space, counts)
        self._chances = Chances(counts, settings.half_life, self._lag)
        self._scores: Values | None = None  # [n_keys], of the token that guesses are about
        self._due: dict[int, list[int]] = {}  # whom guesses fetched, by the token they were about
        self._n_used = self._n_tokens = 0
        # [n_keys], of newcomers; None while too little is known.
        self.worth: Values | None = None
        # The same of those in slots. They do not leave for what one token lets expect.
        self.held_worth: Values | None = None
        self.counts = PredictionCounts()

    def after_token(self, ids: NDArray[np.uint32], keys: Keys) -> None:
        """A token used `ids` [n_layers, n_used], these `keys`, and the counts know of it."""
        self._n_tokens += 1
        if due := self._due.pop(self._n_tokens, None):
            self.counts.n_right += len(set(due).intersection(keys.reshape(-1).tolist()))
        self._n_used = ids.shape[1]
        said = says = None
        informed = self.predictor is not None and self.predictor.informs
        if self.predictor is not None:
            self._scores = self.predictor.after_token(ids)
            if informed:
                said, says = self.predictor.said, self._scores
        self._chances.update(keys.reshape(-1), said, says)
        self.worth = self.held_worth = self._chances.all
        steady = self._chances.steady
        if informed and self.worth is not None and steady is not None:
            self.held_worth = np.maximum(self.worth, steady)

    def wanted(self, absent: Mask) -> Keys:
        """Whom to fetch of those `absent` [n_keys] now that a token is over, likeliest first."""
        if self._stepped or self._scores is None or self.worth is None:
            return NOBODY
        (found,) = (absent & (self.worth > self._average)).nonzero()
        found = found[self._scores[found] > 0]
        order = (-self.worth[found]).argsort(kind="stable")
        return found[order[: self._space.n_layers * self._n_used]]

    def of_next_layer(self, layer: int, ids: NDArray[np.uint32], absent: Mask) -> Keys:
        """The same of the layer after this one, of which the token at hand uses `ids` [n_used].

        Afterwards `worth` knows of it. Must hold: there is a layer after it.
        """
        if self.predictor is None or self.worth is None:
            return NOBODY
        scores = self.predictor.after_layer(layer, ids)
        if scores is None:
            return NOBODY
        numbers = self._space.numbers(layer + 1)
        if self.predictor.informs:
            chances = self._chances.given(int(numbers[0]), scores)
            if chances is not None and self.held_worth is not None:
                self.worth[numbers] = chances
                self.held_worth[numbers] = np.maximum(self.held_worth[numbers], chances)
        worth = self.worth[numbers]
        found = np.flatnonzero(absent[numbers] & (scores > 0) & (worth > self._average))
        order = np.argsort(-worth[found], kind="stable")
        return numbers[found[order[: self._n_used]]]

    def fetched(self, keys: list[int], n_bytes: int) -> None:
        """These are fetched on a guess, into slots of so many bytes."""
        self._due.setdefault(self._n_tokens + self._lag, []).extend(keys)
        self.counts.n_hinted += len(keys)
        self.counts.hinted_bytes += n_bytes

    def reset(self) -> None:
        """A new text begins."""
        self._scores = None
        self._due.clear()
        if self.predictor is not None:
            self.predictor.reset()

    @property
    def _average(self) -> float:
        """The chance of an expert of which nothing is known."""
        return self._n_used / self._space.n_experts


def create_foresight(
    space: KeySpace, pools: Sequence[PoolSpec], counts: DecayedCounts, settings: CacheSettings
) -> Foresight | None:
    """What weighs and guesses, where that can change anything: not with a slot for everybody.

    Without any slots guesses may still serve a host pool.
    """
    pressed = any(pool.capacity < len(pool.layers) * space.n_experts for pool in pools)
    guesses = settings.predictor != "none" and (pressed or not pools)
    if not guesses and not (settings.admission and pressed):
        return None
    return Foresight(space, counts, settings)
