"""How likely each expert is to be used next, from how often it was used lately.

What that means differs from model to model: here whoever was used a moment ago comes back, there
only who is used all the time, or who follows those of the last token. So it is learned as the model
runs: a linear fit of uses to decayed counts of several half-lives, and to what a predictor says.
A fixed rule, such as the plain count, costs hits on some routing (bench/results).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts import _sums
from vkmoe.experts.decide.counts import DecayedCounts

__all__ = ["Chances"]

Values = NDArray[np.float64]

SHORT = (1.0, 8.0)  # half-lives in tokens, beside that of the counts
EVERY = 4  # tokens; a fit looks at one in so many
KEPT = 0.95  # of what was learned, from one look to the next
LEAST = 8  # looks before anything is said
NOTHING = 1e-20  # beside any use; products of far smaller numbers take ten times as long
RIDGE = 1e-4  # of the mean square, so that counts that hardly differ do not fight


class Chances:
    """The chance of each expert to be used `lag` tokens on; one `update` per token.

    Chances are estimates: they can lie outside of 0 to 1, and only compare.
    """

    def __init__(self, counts: DecayedCounts, half_life: float, lag: int = 1) -> None:
        """`counts` of all experts, which the owner keeps, and their half-life in tokens."""
        assert 0 < lag <= EVERY, lag  # one look at a time is prepared
        n_keys = len(counts.values())
        self._short = tuple(DecayedCounts(n_keys, each) for each in SHORT)
        self._counts = (*self._short, counts)
        scale = [1 - 0.5 ** (1 / each) for each in (*SHORT, half_life)]
        self._scale = np.array([*scale, 1.0])  # what the predictor says comes last
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
        self._unsaid: Values | None = None  # the same without what the predictor may say yet

    def update(self, keys: NDArray[np.int64], said: Values | None, says: Values | None) -> None:
        """A token used these [n_used], and `counts` has counted it.

        `said` [n_keys] is what the predictor said of this token, `says` of one to come; None:
        nothing.
        """
        self._n_tokens += 1
        if self._kept is not None and self._kept[0] == self._n_tokens:
            self._look(self._kept[1], said, keys)
        for short in self._short:
            short.use(keys)
        if (self._n_tokens + self._lag) % EVERY == 0:
            known = [each.values() + NOTHING for each in self._counts]
            self._kept = self._n_tokens + self._lag, known
        if self._n_looks >= LEAST:
            self.steady = self.all = self._sum(self._fit(told=False), None)
            if says is not None:
                self.all = self._sum(self._fit(told=True), says)
            if says is None and said is not None:
                self._unsaid = self._sum(self._fit(told=True), None)
        for short in self._short:
            short.advance()

    def given(self, first: int, says: Values) -> Values | None:
        """Of the experts from number `first` on, now that the predictor says this of them [n]."""
        if self._unsaid is None:
            return None
        return self._unsaid[first : first + len(says)] + self._fit(told=True)[-1] * says

    # ----- inside -----

    def _look(self, known: list[Values], said: Values | None, keys: NDArray[np.int64]) -> None:
        """Learn from who was used, knowing what was known before."""
        known.append(np.zeros(len(known[0])) if said is None else said)
        products = _sums.products(known) * (self._scale[:, None] * self._scale)
        self._products = KEPT * self._products + products
        used = np.array([row[keys].sum() for row in known])
        self._sums = KEPT * self._sums + used * self._scale
        self._fits.clear()
        self._n_looks += 1

    def _fit(self, told: bool) -> list[float]:
        """The weights of the counts, and last, if we are `told`, of what the predictor says."""
        if told not in self._fits:
            n = len(self._scale) if told else len(self._counts)
            ridge = RIDGE * self._products.trace() / len(self._products) * self._eye
            fit = np.linalg.solve((self._products + ridge)[:n, :n], self._sums[:n])
            self._fits[told] = (fit * self._scale[:n]).tolist()
        return self._fits[told]

    def _sum(self, weights: list[float], says: Values | None) -> Values:
        """Of the counts as they are now, and of what the predictor says."""
        rows = [each.raw for each in self._counts]
        factors = [one / each.weight for one, each in zip(weights, self._counts, strict=False)]
        if says is not None:
            rows.append(says)
            factors.append(weights[-1])
        return _sums.blend(rows, factors)
