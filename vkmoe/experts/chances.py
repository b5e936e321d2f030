"""How likely each expert is to be used next, from how often it was used lately.

What that means differs from model to model: here whoever was used a moment ago comes back, there
only who is used all the time, or who follows those of the last token. So it is learned as the model
runs: a linear fit of uses to decayed counts of several half-lives, and to what a predictor says.
A fixed rule, such as the plain count, costs hits on some routing (bench/results).
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.frequency import DecayedCounts

__all__ = ["Chances"]

Values = NDArray[np.float64]

SHORT = (1.0, 8.0)  # half-lives in tokens, beside that of the counts
EVERY = 4  # tokens; a fit looks at one in so many
KEPT = 0.95  # of what was learned, from one look to the next
LEAST = 8  # looks before anything is said
RIDGE = 1e-4  # of the mean square, so that counts that hardly differ do not fight


class Chances:
    """The chance of each expert to be used `lag` tokens on; one `update` per token.

    Chances are estimates: they can lie outside of 0 to 1, and only compare.
    """

    def __init__(self, counts: DecayedCounts, half_life: float, lag: int = 1) -> None:
        """`counts` of all experts, which the owner keeps, and their half-life in tokens."""
        n_keys = len(counts.values())
        self._short = tuple(DecayedCounts(n_keys, each) for each in SHORT)
        self._counts = (*self._short, counts)
        self._scale = np.array([1 - 0.5 ** (1 / each) for each in (*SHORT, half_life)])
        n = len(self._counts) + 1  # what the predictor says comes last
        # [n - 1, n_keys] after each of the last tokens, the oldest first.
        self._rates: deque[Values] = deque(maxlen=lag)
        self._products, self._sums = np.zeros((n, n)), np.zeros(n)
        self._weights: Values | None = None  # [n]
        self._plain: Values | None = None  # [n - 1]: where the predictor says nothing
        self._n_tokens = self._n_looks = 0
        self.all: Values | None = None  # [n_keys]; None while too little is known

    def update(self, keys: NDArray[np.int64], said: Values | None, says: Values | None) -> None:
        """A token used these, and `counts` has counted it.

        `said` [n_keys] is what the predictor said of this token, `says` of one to come; None:
        nothing.
        """
        self._n_tokens += 1
        if len(self._rates) == self._rates.maxlen and self._n_tokens % EVERY == 0:
            self._look(self._rates[0], said, keys)
        for short in self._short:
            short.use(keys)
        rates = np.array([each.values() for each in self._counts])
        self._rates.append(rates)
        for short in self._short:
            short.advance()
        if self._plain is None or self._weights is None:
            return
        if says is None:
            self.all = self._plain @ rates
        else:
            self.all = self._weights[:-1] @ rates + self._weights[-1] * says

    def given(self, first: int, says: Values) -> Values | None:
        """Of the experts from number `first` on, now that the predictor says this of them [n]."""
        if self._weights is None or not self._rates:
            return None
        rates = self._rates[-1][:, first : first + len(says)]
        chances: Values = self._weights[:-1] @ rates + self._weights[-1] * says
        return chances

    # ----- inside -----

    def _look(self, rates: Values, said: Values | None, keys: NDArray[np.int64]) -> None:
        """Learn from who was used, knowing what was known before."""
        known = np.zeros((len(self._sums), rates.shape[1]))
        np.multiply(rates, self._scale[:, None], out=known[:-1])
        if said is not None:
            known[-1] = said
        self._products = KEPT * self._products + known @ known.T
        self._sums = KEPT * self._sums + known[:, keys.reshape(-1)].sum(axis=1)
        self._n_looks += 1
        if self._n_looks >= LEAST:
            n = len(self._sums)
            ridge = RIDGE * np.trace(self._products) / n * np.eye(n)
            fit = np.linalg.solve(self._products + ridge, self._sums)
            plain = np.linalg.solve((self._products + ridge)[:-1, :-1], self._sums[:-1])
            self._weights = np.append(fit[:-1] * self._scale, fit[-1])
            self._plain = plain * self._scale
