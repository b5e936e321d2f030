"""Forecasts what each expert is worth to the tokens to come, and what to fetch before it is missed.

Owns the chances that are learned from use, and the count of how often guesses were right. What each
token uses is remembered by token_table.py. Decides nothing: residency.py does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts import _residency
from vkmoe.experts.decide.keys import (
    HALF_LIFE,
    NO_KEYS,
    DecayedCounts,
    Keys,
    KeySpace,
    Mask,
    Values,
)
from vkmoe.experts.decide.settings import CacheSettings
from vkmoe.experts.decide.token_table import TokenTable, Upcoming

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
RIDGE = 2.5e-5  # of the sum of squares, so that counts that hardly differ do not fight


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


class LookedAt(NamedTuple):
    """Holds what worth follows from, as the extension takes it."""

    experts: NDArray[np.uint16]  # what is known of tokens [n_rows, n_layers, width]
    shares: NDArray[np.uint16]  # alike
    factors: list[float]  # of each count, in what all tokens use
    runs: list[tuple[list[int], list[float], float]]  # what the table knows of each
    run_shares: list[float]  # of worth: of each run, and of what all tokens use
    scored: int  # the run whose chances are scores, if it is known


class Foresight:
    """Says what experts are worth to the tokens to come, and which ones to fetch on a guess.

    It goes by the ids that are known to come: a table says which experts each of them uses. An
    expert is worth the uses that are expected of it, each run ahead counting half as much as the
    one before. Of the n runs that are known, the table says the chance; of all others, what late
    tokens used lets expect the same:

        worth = sum over known runs i: NEARER^(i - 1) * chance_i  +  NEARER^n / (1 - NEARER) * usual

    Of a run, chances are summed up over its tokens, to 1 at most. The constants were
    found by replays: bench/results/2026-11-23-residency-llvmpipe.json.
    """

    def __init__(
        self,
        space: KeySpace,
        counts: DecayedCounts,
        settings: CacheSettings,
        table: Table | None = None,
    ) -> None:
        """Begin to learn from `counts`, kept by their owner; `table` is what is known of tokens."""
        self._space, self._stepped = space, settings.executor == "stepped"
        self._prefetches = settings.prefetches
        # The run that a copy is there for, counted from the one that was noted last.
        self._lag = 1 if self._stepped else settings.lag
        self._counts, self._share = counts, 1 - 0.5 ** (1 / HALF_LIFE)
        self.chances = Chances(counts, self._lag)
        self.table = table  # None: nothing was noted
        self._noted: list[tuple[NDArray[np.uint32], Sequence[int | None]]] = []  # runs
        self.scores: Values | None = None  # [n_keys], of what guesses are about
        self._due: dict[int, list[int]] = {}  # what guesses fetched, by the run they were about
        self._n_used = self._n_runs = 0
        # What is copied after it was missed must be worth so many times what leaves for it.
        self.toll = COPY
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
        if self.table is None:
            self.table = TokenTable(self._space, self._n_used)
        self._noted.append((routing, tokens))

    def before_token(self) -> None:
        """Take what is to be learned from counts that are about to change."""
        self.chances.learn()

    def after_token(self, keys: Keys) -> None:
        """Note that a token used `keys` [n_layers, n_used]; counts know of it.

        Called for the last `LEARNED` tokens of a run, after `after_run`.
        """
        self.chances.update(keys.reshape(-1))

    def learn(self) -> None:
        """Learn from what was noted what the next decision can do without."""
        self.chances.learn()
        noted, self._noted = self._noted, []
        for routing, tokens in noted:
            assert self.table is not None
            for token, ids in zip(tokens, routing, strict=True):
                if token is not None:
                    self.table.learn(token, ids)

    def expect(self, upcoming: Upcoming) -> Values | None:
        """Return what experts are worth [n_keys], before something is decided.

        None while too little is known of the tokens to come, and of use: before the first run, too,
        as where another policy was in charge until now.
        """
        usual, runs, self.scores = self.chances.steady(), self._runs(upcoming), None
        if self.table is None:
            return None
        if usual is None:  # too little is known for a fit: the share of late tokens that used each
            if not runs:
                return None
            usual = self._counts.values() * self._share
        worth = NEARER ** len(runs) / (1 - NEARER) * usual
        for ahead, tokens in enumerate(runs, 1):
            chances = np.minimum(self.table.expect(tokens, usual), 1.0)
            if ahead == self._lag:
                self.scores = chances
            worth += NEARER ** (ahead - 1) * chances
        return worth

    def looked_at(self, upcoming: Upcoming) -> LookedAt | None:
        """Return what `expect` goes by, for the extension; None where too little is known.

        Then `expect` may know enough.
        """
        factors = self.chances.factors()
        if factors is None or not isinstance(self.table, TokenTable):
            return None
        runs = self._runs(upcoming)
        known = [self.table.known(tokens) for tokens in runs]
        shares = [NEARER**ahead for ahead in range(len(runs))]
        shares.append(NEARER ** len(runs) / (1 - NEARER))
        return LookedAt(*self.table.arrays, factors, known, shares, self._lag - 1)

    @property
    def guesses(self) -> bool:
        """Return whether `wanted` has scores of a run to come to go by."""
        return self.most_guessed > 0 and self.scores is not None

    @property
    def most_guessed(self) -> int:
        """Return how many experts are fetched at most on a guess, now that a token is over.

        Where a token waits for copies, one made ahead of a miss costs as much as the miss.
        """
        hides = self._prefetches and not self._stepped and self._lag > 1
        return self._space.n_layers * self._n_used if hides else 0

    def wanted(self, absent: Mask) -> Keys:
        """Return which `absent` [n_keys] to fetch now that a token is over, likeliest first."""
        assert self.scores is not None, "there is nothing to guess by"
        (found,) = (absent & (self.scores > LIKELY)).nonzero()
        order = (-self.scores[found]).argsort(kind="stable")
        return found[order[: self.most_guessed]]

    def of_layer(self, layer: int, absent: Mask) -> Keys:
        """Return which `absent` [n_experts] of a layer to fetch for the next run.

        The likeliest come first.
        """
        if self.scores is None or not self._prefetches:
            return NO_KEYS
        keys = self._space.keys(layer)
        scores = self.scores[keys]
        found = np.flatnonzero(absent & (scores > self._n_used / self._space.n_experts))
        order = np.argsort(-scores[found], kind="stable")
        return keys[found[order[: self._n_used]]]

    def fetched(self, keys: list[int], n_bytes: int) -> None:
        """Note that these are fetched on a guess, into slots of so many bytes."""
        self._due.setdefault(self._n_runs + self._lag, []).extend(keys)
        self.counts.n_hinted += len(keys)
        self.counts.hinted_bytes += n_bytes

    def reset(self) -> None:
        """Forget the guesses, as a new text begins."""
        self.scores = None
        self._due.clear()

    def _runs(self, upcoming: Upcoming) -> list[Sequence[int]]:
        """Split ids that are known to come into runs, as long as the next one is, and looked at."""
        ids, later = upcoming
        self.toll = COPY_FOR_NEXT if ids else COPY
        if not ids:
            return []
        end, n_looked_at = min(len(later), (AHEAD - 1) * len(ids)), min(len(ids), LOOKED_AT)
        firsts = range(0, end, len(ids))
        return [ids[:LOOKED_AT], *(later[first : first + n_looked_at] for first in firsts)]


class Chances:
    """Learns how likely each expert is to be used `lag` tokens on; one `update` per token.

    What recent use means differs from model to model, and a fixed rule costs hits on some routing
    (bench/results). So it is learned as the model runs: a linear fit of uses to decayed counts of
    several half-lives. Chances are estimates: they can lie outside of 0 to 1, and only compare.
    """

    def __init__(self, counts: DecayedCounts, lag: int = 1) -> None:
        """Begin to learn from `counts`, kept by their owner, which halve every HALF_LIFE tokens."""
        assert 0 < lag <= EVERY, lag  # one look at a time is prepared
        n_keys = len(counts.values())
        self.short = tuple(DecayedCounts(n_keys, each) for each in SHORT)
        self._counts = (*self.short, counts)
        self._scale = np.array([1 - 0.5 ** (1 / each) for each in (*SHORT, HALF_LIFE)])
        self._lag = lag
        # The counts [n - 1][n_keys] of `lag` tokens before the next one to look at.
        self._kept: list[Values] | None = None
        self._keeps = False  # those of now are to be kept, once there is time
        # What is to be looked at: such counts, and what the token used.
        self._seen: tuple[list[Values], Keys] | None = None
        self._weights: list[float] = []  # of the counts, since the last look
        n = len(self._scale)
        self._products, self._sums, self._eye = np.zeros((n, n)), np.zeros(n), np.eye(n)
        self._n_tokens = self._n_looks = 0

    def update(self, keys: Keys) -> None:
        """Note that a token used `keys` [n_used], which `counts` has counted."""
        self.learn()
        self.advance()
        for short in self.short:
            short.use(keys)
        self.noted(keys)

    def advance(self) -> None:
        """Note that a token has passed, before its uses are counted."""
        for short in self.short if self._n_tokens else ():
            short.advance()

    def noted(self, keys: Keys) -> None:
        """Note that a token used `keys` [n_used], which all counts have counted."""
        self._n_tokens += 1
        if self._kept is not None and self._n_tokens % EVERY == 0:
            self._seen = self._kept, keys
        self._keeps = (self._n_tokens + self._lag) % EVERY == 0

    def learn(self) -> None:
        """Learn from what was noted, if that is still to be done: before any count changes."""
        seen, self._seen = self._seen, None
        if seen is not None:
            self._look(*seen)
        if self._keeps:
            self._keeps = False
            self._kept = [each.values() + NOTHING for each in self._counts]

    def steady(self) -> Values | None:
        """Return the chances [n_keys]; None while too little is known."""
        factors = self.factors()
        if factors is None:
            return None
        return _residency.blend([each.raw for each in self._counts], factors)

    def factors(self) -> list[float] | None:
        """Return what each count, as it is stored, is worth in a chance; None: as for `steady`."""
        if self._n_looks < LEAST:
            return None
        return [one / each.weight for one, each in zip(self._weights, self._counts, strict=True)]

    # ----- inside -----

    def _look(self, known: list[Values], keys: Keys) -> None:
        """Fit the uses of a token to what was known before it."""
        products = _residency.products(known) * (self._scale[:, None] * self._scale)
        self._products = KEPT * self._products + products
        used = np.array([row[keys].sum() for row in known])
        self._sums = KEPT * self._sums + used * self._scale
        ridge = RIDGE * self._products.trace() * self._eye
        fit = np.linalg.solve(self._products + ridge, self._sums)
        self._weights = (fit * self._scale).tolist()
        self._n_looks += 1
