"""Learns what each expert is worth to a cache, and which ones to fetch before they are needed.

Owns the table of tokens or another predictor, the chances that are learned from use and from its
guesses, and the count of how often these were right. Decides nothing: residency.py does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts import _residency
from vkmoe.experts.decide.keys import NO_KEYS, DecayedCounts, Keys, KeySpace, Mask, Values
from vkmoe.experts.decide.predict import create_predictor
from vkmoe.experts.decide.settings import CacheSettings, PoolSpec
from vkmoe.experts.decide.token_table import TokenTable, Upcoming

__all__ = [
    "COPY",
    "EVERY",
    "GUESS",
    "LEARNED",
    "LEAST",
    "Chances",
    "Foresight",
    "LearnedForesight",
    "PredictionCounts",
    "Table",
    "TokenForesight",
    "create_foresight",
]

# A newcomer that is copied must be worth so many times what its victim is, as its bytes cross the
# link, those of a guess whether it is used or not. From traces of the demo model (bench/results).
COPY = 1.5
COPY_FOR_NEXT = 3.0  # where worth goes by the next tokens most: those are soon over
GUESS = 2.0
LIKELY = 0.7  # chance of an expert from which it is fetched before it is used
NEARER = 0.5  # what a use is worth, beside one in the run before
AHEAD = 8  # runs that are looked at
LOOKED_AT = 64  # tokens of each: more would keep the host longer than they tell
LEARNED = 64  # tokens of a prompt's chunk: all of a long one would keep the host longer than a GPU
SHORT = (1.0, 8.0)  # half-lives in tokens, beside that of the counts
EVERY = 4  # tokens; a fit looks at one in so many
KEPT = 0.95  # of what was learned, from one look to the next
LEAST = 8  # looks before there is an answer
NOTHING = 1e-20  # beside any use; products of far smaller numbers take ten times as long
RIDGE = 1e-4  # of the mean square, so that counts that hardly differ do not fight


class Table(Protocol):
    """Says which experts tokens use, by their ids: a `TokenTable`, or in studies more than that."""

    def learn(self, token: int, ids: NDArray[np.uint32]) -> None:
        """Learn that the token of an id used `ids` [n_layers, n_used]."""

    def expect(self, tokens: Iterable[int], usual: Values) -> Values:
        """Return how many tokens of these ids use each expert, on average: [n_keys]."""


@dataclass
class PredictionCounts:
    """Counts how the guesses went for which an expert was fetched."""

    n_hinted: int = 0  # experts fetched on a guess
    hinted_bytes: int = 0  # of their slots
    n_right: int = 0  # of them used by the very token, or layer, that the guess was about


def create_foresight(
    space: KeySpace,
    pools: Sequence[PoolSpec],
    counts: DecayedCounts,
    settings: CacheSettings,
    table: Table | None = None,
) -> Foresight | None:
    """Make what weighs and guesses, if that can change anything: only when slots are scarce.

    Without any slots guesses may still serve a host pool. `table` stands in for one that learns.
    """
    pressed = any(pool.capacity < len(pool.layers) * space.n_experts for pool in pools)
    guesses = settings.predictor != "none" and (pressed or not pools)
    if not guesses and not (settings.admission and pressed):
        return None
    if settings.predictor == "token":
        return TokenForesight(space, counts, settings, table)
    return LearnedForesight(space, counts, settings)


class Foresight(ABC):
    """Says what experts are worth to the tokens to come, and which ones to fetch on a guess.

    `ranks`: of those in slots, the one that is worth least leaves first, whatever the policy says.
    `toll`: what is copied after it was missed must be worth so many times what leaves for it.
    """

    ranks, toll = False, COPY

    def __init__(self, space: KeySpace, settings: CacheSettings) -> None:
        self._space, self._stepped = space, settings.executor == "stepped"
        # The run that a copy is there for, counted from the one that was noted last.
        self._lag = 1 if self._stepped else settings.lag
        self._scores: Values | None = None  # [n_keys], of what guesses are about
        self._due: dict[int, list[int]] = {}  # what guesses fetched, by the run they were about
        self._n_used = self._n_runs = 0
        # What newcomers are worth [n_keys]; None while too little is known.
        self.worth: Values | None = None
        # What experts in slots are worth. They do not leave for what one token lets expect.
        self.held_worth: Values | None = None
        self.counts = PredictionCounts()

    def after_run(
        self, routing: NDArray[np.uint32], keys: Keys, tokens: Sequence[int | None]
    ) -> None:
        """Note that a run used `routing` [n_tokens, n_layers, n_used], these `keys`.

        `tokens` are the ids of its tokens, None where they are not known.
        """
        self._n_used = routing.shape[2]
        self._n_runs += 1
        if due := self._due.pop(self._n_runs, None):
            self.counts.n_right += len(set(due).intersection(keys.reshape(-1).tolist()))

    @abstractmethod
    def after_token(self, ids: NDArray[np.uint32], keys: Keys) -> None:
        """Note that a token used `ids` [n_layers, n_used], these `keys`; counts know of it.

        Called for the last `LEARNED` tokens of a run, after `after_run`.
        """

    @abstractmethod
    def learn(self) -> None:
        """Learn from what was noted what the next decision can do without."""

    @abstractmethod
    def expect(self, upcoming: Upcoming) -> None:
        """Learn what comes, before something is decided."""

    @property
    def guesses(self) -> bool:
        """Return whether `wanted` has scores of a run to come to go by.

        Where a token waits for copies, one made ahead of a miss costs as much as the miss.
        """
        hides = not self._stepped and self._lag > 1
        return hides and self._scores is not None and self.worth is not None

    @abstractmethod
    def wanted(self, absent: Mask) -> Keys:
        """Return which `absent` [n_keys] to fetch now that a token is over, likeliest first."""

    @abstractmethod
    def of_next_layer(self, layer: int, ids: NDArray[np.uint32], absent: Mask) -> Keys:
        """Return which `absent` [n_experts] to fetch for the layer after this, likeliest first.

        The token at hand uses `ids` [n_used] of this layer. Afterwards `worth` knows of it. Must
        hold: there is a layer after it.
        """

    def fetched(self, keys: list[int], n_bytes: int) -> None:
        """Note that these are fetched on a guess, into slots of so many bytes."""
        self._due.setdefault(self._n_runs + self._lag, []).extend(keys)
        self.counts.n_hinted += len(keys)
        self.counts.hinted_bytes += n_bytes

    def reset(self) -> None:
        """Forget the guesses, as a new text begins."""
        self._scores = None
        self._due.clear()


class TokenForesight(Foresight):
    """Goes by the ids that are known to come: a table says which experts each of them uses.

    An expert is worth the uses that are expected of it, each run ahead counting half as much as the
    one before. Of the n runs that are known, the table says the chance; of all others, what late
    tokens used lets expect the same:

        worth = sum over known runs i: NEARER^(i - 1) * chance_i  +  NEARER^n / (1 - NEARER) * usual

    Of a run, chances are summed up over its tokens, to 1 at most. The constants were
    found by replays: bench/results/2026-11-23-residency-llvmpipe.json.
    """

    ranks, toll = True, COPY_FOR_NEXT

    def __init__(
        self,
        space: KeySpace,
        counts: DecayedCounts,
        settings: CacheSettings,
        table: Table | None = None,
    ) -> None:
        super().__init__(space, settings)
        self._counts, self._share = counts, 1 - 0.5 ** (1 / settings.half_life)
        self._chances = Chances(counts, settings.half_life, self._lag)
        self.table = table  # None: nothing was noted
        self._noted: list[tuple[NDArray[np.uint32], Sequence[int | None]]] = []  # runs

    def after_run(
        self, routing: NDArray[np.uint32], keys: Keys, tokens: Sequence[int | None]
    ) -> None:
        super().after_run(routing, keys, tokens)
        if self.table is None:
            self.table = TokenTable(self._space, self._n_used)
        self._noted.append((routing, tokens))

    def after_token(self, ids: NDArray[np.uint32], keys: Keys) -> None:
        self._chances.update(keys.reshape(-1))

    def learn(self) -> None:
        self._chances.learn()
        noted, self._noted = self._noted, []
        for routing, tokens in noted:
            assert self.table is not None
            for token, ids in zip(tokens, routing, strict=True):
                if token is not None:
                    self.table.learn(token, ids)

    def expect(self, upcoming: Upcoming) -> None:
        usual = self._chances.steady()
        if usual is None:  # too little is known for a fit: the share of late tokens that used each
            usual = self._counts.values() * self._share
        assert self.table is not None, "nothing was noted"
        runs = _runs(upcoming)
        worth, self._scores = NEARER ** len(runs) / (1 - NEARER) * usual, None
        for ahead, tokens in enumerate(runs, 1):
            chances = np.minimum(self.table.expect(tokens, usual), 1.0)
            if ahead == self._lag:
                self._scores = chances
            worth += NEARER ** (ahead - 1) * chances
        self.worth = self.held_worth = worth

    def wanted(self, absent: Mask) -> Keys:
        assert self._scores is not None, "there is nothing to guess by"
        (found,) = (absent & (self._scores > LIKELY)).nonzero()
        order = (-self._scores[found]).argsort(kind="stable")
        return found[order[: self._space.n_layers * self._n_used]]

    def of_next_layer(self, layer: int, ids: NDArray[np.uint32], absent: Mask) -> Keys:
        return self._of_layer(layer + 1, absent)

    def of_first_layer(self, absent: Mask) -> Keys:
        """Return which `absent` [n_experts] of the first layer to fetch for the next run."""
        return self._of_layer(0, absent)

    def _of_layer(self, layer: int, absent: Mask) -> Keys:
        if self._scores is None:
            return NO_KEYS
        keys = self._space.keys(layer)
        scores = self._scores[keys]
        found = np.flatnonzero(absent & (scores > self._n_used / self._space.n_experts))
        order = np.argsort(-scores[found], kind="stable")
        return keys[found[order[: self._n_used]]]


def _runs(upcoming: Upcoming) -> list[Sequence[int]]:
    """Split ids that are known to come into runs, as long as the next one is, and looked at."""
    ids, later = upcoming
    if not ids:
        return []
    end, n_looked_at = min(len(later), (AHEAD - 1) * len(ids)), min(len(ids), LOOKED_AT)
    firsts = range(0, end, len(ids))
    return [ids[:LOOKED_AT], *(later[first : first + n_looked_at] for first in firsts)]


class LearnedForesight(Foresight):
    """Learns from every token what experts are worth, from their uses and a predictor's scores."""

    def __init__(self, space: KeySpace, counts: DecayedCounts, settings: CacheSettings) -> None:
        super().__init__(space, settings)
        self.predictor = create_predictor(settings, space, counts, self._lag)
        self._informs = self.predictor is not None and self.predictor.informs
        self._chances = Chances(counts, settings.half_life, self._lag)
        self._before_guess: Values | None = None  # chances less what a guess may add, [n_keys]

    def after_run(
        self, routing: NDArray[np.uint32], keys: Keys, tokens: Sequence[int | None]
    ) -> None:
        if len(keys) > LEARNED:
            self.reset()  # what it guessed is about the first of them, which is left out
        super().after_run(routing, keys, tokens)

    def after_token(self, ids: NDArray[np.uint32], keys: Keys) -> None:
        guessed = None
        if self.predictor is not None:
            self._scores = self.predictor.after_token(ids)
            if self._informs:
                guessed = self.predictor.guessed
        self._chances.update(keys.reshape(-1), guessed)

    def learn(self) -> None:
        self._chances.learn()

    def expect(self, upcoming: Upcoming) -> None:
        """Go by what was: no id tells anything."""
        self.worth = self.held_worth = steady = self._chances.steady()
        if steady is None or not self._informs:
            return
        if self._stepped:  # the layers' turn comes
            self.worth, self._before_guess = steady.copy(), self._chances.informed(None)
        elif self._scores is not None:
            self.worth = self._chances.informed(self._scores)
            self.held_worth = np.maximum(self.worth, steady)

    def wanted(self, absent: Mask) -> Keys:
        assert self._scores is not None and self.worth is not None, "there is nothing to guess by"
        (found,) = (absent & (self.worth > self._average)).nonzero()
        found = found[self._scores[found] > 0]
        order = (-self.worth[found]).argsort(kind="stable")
        return found[order[: self._space.n_layers * self._n_used]]

    def of_next_layer(self, layer: int, ids: NDArray[np.uint32], absent: Mask) -> Keys:
        if self.predictor is None or self.worth is None:
            return NO_KEYS
        scores = self.predictor.after_layer(layer, ids)
        if scores is None:
            return NO_KEYS
        keys = self._space.keys(layer + 1)
        if self._before_guess is not None and self.held_worth is not None:
            chances = self._before_guess[keys] + self._chances.weight_of_scores * scores
            self.worth[keys] = chances
            self.held_worth[keys] = np.maximum(self.held_worth[keys], chances)
        worth = self.worth[keys]
        found = np.flatnonzero(absent & (scores > 0) & (worth > self._average))
        order = np.argsort(-worth[found], kind="stable")
        return keys[found[order[: self._n_used]]]

    def reset(self) -> None:
        super().reset()
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
        # The counts [n - 1][n_keys] of `lag` tokens before the next one to look at.
        self._kept: list[Values] | None = None
        # What is to be looked at: such counts, what the token used, what was guessed of it.
        self._seen: tuple[list[Values], Keys, Values | None] | None = None
        n = len(self._scale)
        self._products, self._sums, self._eye = np.zeros((n, n)), np.zeros(n), np.eye(n)
        self._fits: dict[bool, list[float]] = {}  # since the last look
        self._n_tokens = self._n_looks = 0

    def update(self, keys: Keys, guessed: Values | None = None) -> None:
        """Note that a token used `keys` [n_used], which `counts` has counted.

        `guessed` [n_keys] are the predictor's scores of this token; None: it has none.
        """
        self.learn()
        for short in self._short:
            if self._n_tokens:
                short.advance()
            short.use(keys)
        self._n_tokens += 1
        if self._kept is not None and self._n_tokens % EVERY == 0:
            self._seen = self._kept, keys, guessed
        if (self._n_tokens + self._lag) % EVERY == 0:
            self._kept = [each.values() + NOTHING for each in self._counts]

    def learn(self) -> None:
        """Learn from what was noted, if that is still to be done."""
        seen, self._seen = self._seen, None
        if seen is not None:
            self._look(*seen)

    def steady(self) -> Values | None:
        """Return the chances [n_keys] by the counts alone; None while too little is known."""
        if self._n_looks < LEAST:
            return None
        return self._sum(self._fit(informed=False), None)

    def informed(self, scores: Values | None) -> Values:
        """Return the chances [n_keys] by counts and scores; None: but for what scores may add.

        Must hold: `steady` is known.
        """
        return self._sum(self._fit(informed=True), scores)

    @property
    def weight_of_scores(self) -> float:
        """Return what a score of 1 adds to `informed`."""
        return self._fit(informed=True)[-1]

    # ----- inside -----

    def _look(self, known: list[Values], keys: Keys, guessed: Values | None) -> None:
        """Fit the uses of a token to what was known before it."""
        known.append(np.zeros(len(known[0])) if guessed is None else guessed)
        products = _residency.products(known) * (self._scale[:, None] * self._scale)
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
        return _residency.blend(rows, factors)
