"""Learns what each expert is worth to a cache, and which ones to fetch before they are needed.

Owns the predictor, the chances that are learned from use and from its guesses, and the count of how
often it was right. Decides nothing: residency.py does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts import _sums
from vkmoe.experts.decide.keys import NO_KEYS, DecayedCounts, Keys, KeySpace, Mask, Values
from vkmoe.experts.decide.predict import create_predictor
from vkmoe.experts.decide.settings import CacheSettings, PoolSpec

__all__ = [
    "COPY",
    "EVERY",
    "GUESS",
    "LEAST",
    "Chances",
    "Foresight",
    "PredictionCounts",
    "create_foresight",
]

# A newcomer that is copied must be worth so many times what its victim is, as its bytes cross the
# link, those of a guess whether it is used or not. From traces of the demo model (bench/results).
COPY = 1.5
GUESS = 2.0
SHORT = (1.0, 8.0)  # half-lives in tokens, beside that of the counts
EVERY = 4  # tokens; a fit looks at one in so many
KEPT = 0.95  # of what was learned, from one look to the next
LEAST = 8  # looks before there is an answer
NOTHING = 1e-20  # beside any use; products of far smaller numbers take ten times as long
RIDGE = 1e-4  # of the mean square, so that counts that hardly differ do not fight


@dataclass
class PredictionCounts:
    """Counts how the guesses went for which an expert was fetched."""

    n_hinted: int = 0  # experts fetched on a guess
    hinted_bytes: int = 0  # of their slots
    n_right: int = 0  # of them used by the very token, or layer, that the guess was about


def create_foresight(
    space: KeySpace, pools: Sequence[PoolSpec], counts: DecayedCounts, settings: CacheSettings
) -> Foresight | None:
    """Make what weighs and guesses, if that can change anything: only when slots are scarce.

    Without any slots guesses may still serve a host pool.
    """
    pressed = any(pool.capacity < len(pool.layers) * space.n_experts for pool in pools)
    guesses = settings.predictor != "none" and (pressed or not pools)
    if not guesses and not (settings.admission and pressed):
        return None
    return Foresight(space, counts, settings)


class Foresight:
    """Learns from every token what experts are worth, and which ones to fetch on a guess."""

    def __init__(self, space: KeySpace, counts: DecayedCounts, settings: CacheSettings) -> None:
        self._space, self._stepped = space, settings.executor == "stepped"
        self._lag = 1 if self._stepped else settings.lag
        self.predictor = create_predictor(settings, space, counts)
        self._chances = Chances(counts, settings.half_life, self._lag)
        self._scores: Values | None = None  # [n_keys], of the token that guesses are about
        self._due: dict[int, list[int]] = {}  # what guesses fetched, by the token they were about
        self._n_used = self._n_tokens = 0
        # What newcomers are worth [n_keys]; None while too little is known.
        self.worth: Values | None = None
        # What experts in slots are worth. They do not leave for what one token lets expect.
        self.held_worth: Values | None = None
        self.counts = PredictionCounts()

    def after_token(self, ids: NDArray[np.uint32], keys: Keys) -> None:
        """Learn that a token used `ids` [n_layers, n_used], these `keys`; counts know of it."""
        self._n_tokens += 1
        if due := self._due.pop(self._n_tokens, None):
            self.counts.n_right += len(set(due).intersection(keys.reshape(-1).tolist()))
        self._n_used = ids.shape[1]
        guessed = guess = None
        informed = self.predictor is not None and self.predictor.informs
        if self.predictor is not None:
            self._scores = self.predictor.after_token(ids)
            if informed:
                guessed, guess = self.predictor.guessed, self._scores
        self._chances.update(keys.reshape(-1), guessed, guess)
        self.worth = self.held_worth = self._chances.all
        steady = self._chances.steady
        if informed and self.worth is not None and steady is not None:
            self.held_worth = np.maximum(self.worth, steady)

    @property
    def guesses(self) -> bool:
        """Return whether `wanted` has scores of a token to come to go by."""
        return not self._stepped and self._scores is not None and self.worth is not None

    def wanted(self, absent: Mask) -> Keys:
        """Return which `absent` [n_keys] to fetch now that a token is over, likeliest first."""
        assert self._scores is not None and self.worth is not None, "there is nothing to guess by"
        (found,) = (absent & (self.worth > self._average)).nonzero()
        found = found[self._scores[found] > 0]
        order = (-self.worth[found]).argsort(kind="stable")
        return found[order[: self._space.n_layers * self._n_used]]

    def of_next_layer(self, layer: int, ids: NDArray[np.uint32], absent: Mask) -> Keys:
        """Return which `absent` [n_experts] to fetch for the layer after this, likeliest first.

        The token at hand uses `ids` [n_used] of this layer. Afterwards `worth` knows of it. Must
        hold: there is a layer after it.
        """
        if self.predictor is None or self.worth is None:
            return NO_KEYS
        scores = self.predictor.after_layer(layer, ids)
        if scores is None:
            return NO_KEYS
        keys = self._space.keys(layer + 1)
        if self.predictor.informs:
            chances = self._chances.given(int(keys[0]), scores)
            if chances is not None and self.held_worth is not None:
                self.worth[keys] = chances
                self.held_worth[keys] = np.maximum(self.held_worth[keys], chances)
        worth = self.worth[keys]
        found = np.flatnonzero(absent & (scores > 0) & (worth > self._average))
        order = np.argsort(-worth[found], kind="stable")
        return keys[found[order[: self._n_used]]]

    def fetched(self, keys: list[int], n_bytes: int) -> None:
        """Note that these are fetched on a guess, into slots of so many bytes."""
        self._due.setdefault(self._n_tokens + self._lag, []).extend(keys)
        self.counts.n_hinted += len(keys)
        self.counts.hinted_bytes += n_bytes

    def reset(self) -> None:
        """Forget the guesses, as a new text begins."""
        self._scores = None
        self._due.clear()
        if self.predictor is not None:
            self.predictor.reset()

    @property
    def _average(self) -> float:
        """Return the chance of an expert of which nothing is known."""
        return self._n_used / self._space.n_experts


class Chances:
    """Learns how likely each expert is to be used `lag` tokens on; one `update` per token.

    What recent use means differs from model to model, and a fixed rule costs hits on some routing
    (bench/results). So it is learned as the model runs: a linear fit of uses to decayed counts of
    several half-lives, and to the predictor's scores. Chances are estimates: they can lie outside
    of 0 to 1, and only compare.
    """

    def __init__(self, counts: DecayedCounts, half_life: float, lag: int = 1) -> None:
        """Begin to learn from `counts`, kept by their owner; `half_life` is theirs, in tokens."""
        assert 0 < lag <= EVERY, lag  # one look at a time is prepared
        n_keys = len(counts.values())
        self._short = tuple(DecayedCounts(n_keys, each) for each in SHORT)
        self._counts = (*self._short, counts)
        scale = [1 - 0.5 ** (1 / each) for each in (*SHORT, half_life)]
        self._scale = np.array([*scale, 1.0])  # the scores of the predictor come last
        self._lag = lag
        # The token to look at, and the counts [n - 1][n_keys] of `lag` tokens before it. With its
        # number, because Ctrl-C may leave out what was to be kept, or to be looked at.
        self._kept: tuple[int, list[Values]] | None = None
        n = len(self._scale)
        self._products, self._sums, self._eye = np.zeros((n, n)), np.zeros(n), np.eye(n)
        self._fits: dict[bool, list[float]] = {}  # since the last look
        self._n_tokens = self._n_looks = 0
        self.all: Values | None = None  # [n_keys]; None while too little is known
        self.steady: Values | None = None  # the same from the counts alone
        self._before_guess: Values | None = None  # the same, less what a guess may add

    def update(self, keys: NDArray[np.int64], guessed: Values | None, guess: Values | None) -> None:
        """Learn that a token used `keys` [n_used], which `counts` has counted.

        `guessed` [n_keys] are the predictor's scores of this token, `guess` those of one to come;
        None: it has none.
        """
        self._n_tokens += 1
        if self._kept is not None and self._kept[0] == self._n_tokens:
            self._look(self._kept[1], guessed, keys)
        for short in self._short:
            short.use(keys)
        if (self._n_tokens + self._lag) % EVERY == 0:
            known = [each.values() + NOTHING for each in self._counts]
            self._kept = self._n_tokens + self._lag, known
        if self._n_looks >= LEAST:
            self.steady = self.all = self._sum(self._fit(informed=False), None)
            if guess is not None:
                self.all = self._sum(self._fit(informed=True), guess)
            if guess is None and guessed is not None:
                self._before_guess = self._sum(self._fit(informed=True), None)
        for short in self._short:
            short.advance()

    def given(self, first: int, guess: Values) -> Values | None:
        """Return the chances of experts from key `first` on, given their scores `guess` [n]."""
        if self._before_guess is None:
            return None
        return self._before_guess[first : first + len(guess)] + self._fit(informed=True)[-1] * guess

    # ----- inside -----

    def _look(self, known: list[Values], guessed: Values | None, keys: NDArray[np.int64]) -> None:
        """Fit the uses of a token to what was known before it."""
        known.append(np.zeros(len(known[0])) if guessed is None else guessed)
        products = _sums.products(known) * (self._scale[:, None] * self._scale)
        self._products = KEPT * self._products + products
        used = np.array([row[keys].sum() for row in known])
        self._sums = KEPT * self._sums + used * self._scale
        self._fits.clear()
        self._n_looks += 1

    def _fit(self, informed: bool) -> list[float]:
        """Return the weights of the counts, and last, if `informed`, of the predictor's scores."""
        if informed not in self._fits:
            n = len(self._scale) if informed else len(self._counts)
            ridge = RIDGE * self._products.trace() / len(self._products) * self._eye
            fit = np.linalg.solve((self._products + ridge)[:n, :n], self._sums[:n])
            self._fits[informed] = (fit * self._scale[:n]).tolist()
        return self._fits[informed]

    def _sum(self, weights: list[float], guess: Values | None) -> Values:
        """Add up the counts as they are now, and the predictor's scores, by their weights."""
        rows = [each.raw for each in self._counts]
        factors = [one / each.weight for one, each in zip(weights, self._counts, strict=False)]
        if guess is not None:
            rows.append(guess)
            factors.append(weights[-1])
        return _sums.blend(rows, factors)
