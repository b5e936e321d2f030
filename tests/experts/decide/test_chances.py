"""Chances: learned from how uses follow from counts, whatever kind of routing it is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from vkmoe.experts import _residency
from vkmoe.experts.decide.foresight import EVERY, LEAST, Chances
from vkmoe.experts.decide.keys import DecayedCounts

N = 64


class Learner:
    def __init__(self, lag: int = 1) -> None:
        self.counts = DecayedCounts(N)
        self.chances = Chances(self.counts, lag)

    def token(self, keys: object) -> None:
        if self.chances._n_tokens:
            self.counts.advance()
        used = np.array(keys, np.int64)
        self.counts.use(used)
        self.chances.update(used)
        self.chances.learn()

    @property
    def all(self) -> NDArray[np.float64]:
        steady = self.chances.steady()
        assert steady is not None
        return steady


def test_nothing_is_said_while_too_little_is_known() -> None:
    learner = Learner()
    for n in range(EVERY * LEAST + 4):
        learner.token([n % N])
        assert (learner.chances.steady() is None) == (n + 1 < EVERY * LEAST), n
    assert learner.all.shape == (N,)


def test_where_uses_come_back_at_once_the_last_ones_are_worth_most() -> None:
    """Every expert is used for three tokens in a row, and not again for long."""
    learner = Learner()
    for n in range(300):
        learner.token([(n // 3) % N])
    n = 300
    learner.token([(n // 3) % N])
    last = (n // 3) % N
    assert learner.all.argmax() == last
    assert learner.all[last] > 0.3 > 10 * learner.all[(last - 6) % N]


def test_where_uses_are_steady_a_passing_one_is_worth_little() -> None:
    """The same liking throughout: experts 0 to 7 often, others now and then."""
    random = np.random.default_rng(3)
    learner = Learner()
    for _ in range(300):
        learner.token([random.integers(8) if random.random() < 0.8 else random.integers(8, N)])
    learner.token([40])
    assert learner.all[40] < learner.all[:8].min()


@pytest.mark.parametrize("lag", [1, 2])
def test_what_is_learned_is_about_the_token_asked_for(lag: int) -> None:
    """Every expert is used in every second token, twice over: two tokens on, it is there again."""
    learner = Learner(lag)
    for n in range(300):
        learner.token([n % 2 + 2 * (n // 40 % 16)])
    n = 300 - 1  # the middle of a stretch
    used, other = n % 2 + 2 * (n // 40 % 16), (n + 1) % 2 + 2 * (n // 40 % 16)
    assert (learner.all[used] > learner.all[other]) == (lag == 2)


def test_the_fit_multiplies_no_tiny_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of experts not used for long; products below 1e-308 take ten times as long."""
    looked_at: list[NDArray[np.float64]] = []
    products = _residency.products

    def noting(rows: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
        looked_at.extend(rows)
        return products(rows)

    monkeypatch.setattr(_residency, "products", noting)
    learner = Learner()
    for n in range(700):
        learner.token([n % N if n < 100 else n % 3])
    rows = np.abs(np.array(looked_at))
    assert rows[rows > 0].min() > 1e-100


def test_uses_that_never_vary_do_not_break_the_fit() -> None:
    learner = Learner()
    for _ in range(100):
        learner.token([0, 1, 2])
    assert np.isfinite(learner.all).all() and learner.all[0] > learner.all[3]
