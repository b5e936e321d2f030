"""Decayed counts: halving, weights that grow out of range, and counts of an earlier run."""

from __future__ import annotations

import numpy as np
import pytest

from vkmoe.experts.decide.keys import DecayedCounts


def use(counts: DecayedCounts, *keys: int) -> None:
    counts.use(np.array(keys, np.int64))


def advance(counts: DecayedCounts, n_tokens: int) -> None:
    for _ in range(n_tokens):
        counts.advance()


def test_some_values_are_those_of_all() -> None:
    counts = DecayedCounts(6, 4.0)
    rng = np.random.default_rng(1)
    keys = np.array([[5, 0], [3, 3]])
    for _ in range(200):
        use(counts, *rng.choice(6, 2, replace=False))
        counts.advance()
        np.testing.assert_array_equal(counts.of(keys), counts.values()[keys])


@pytest.mark.parametrize("half_life", [1.0, 16.0])
def test_counts_are_those_of_a_plain_decay(half_life: float) -> None:
    """At half-life 1 the weight passes 1e100 every 333 tokens, and is brought back."""
    counts, plain = DecayedCounts(3, half_life), np.zeros(3)
    peak = 0.0
    for token in range(2000):
        use(counts, token % 3)
        plain[token % 3] += 1
        np.testing.assert_allclose(counts.values(), plain, rtol=1e-9)
        counts.advance()
        plain /= 2 ** (1 / half_life)
        peak = max(peak, *counts.raw)
    assert counts.now == 2000
    assert half_life > 1 or 1e90 < peak < 1e101, "rescaled, and late"


def test_counts_of_an_earlier_run_go_on() -> None:
    first = DecayedCounts(4, 8.0)
    for key in (0, 1, 1, 2, 0, 1):
        use(first, key)
        first.advance()
    second = DecayedCounts(4, 8.0)
    advance(second, 5)
    second.restore(first.values())
    np.testing.assert_allclose(second.values(), first.values())
    for counts in (first, second):
        use(counts, 3)
        advance(counts, 20)
    np.testing.assert_allclose(second.values(), first.values())


def test_counts_of_another_model_are_refused() -> None:
    with pytest.raises(AssertionError):
        DecayedCounts(4, 8.0).restore(np.zeros(5))


def test_a_repeated_key_counts_as_often_as_it_occurs() -> None:
    together, in_turn = DecayedCounts(4, 3.0), DecayedCounts(4, 3.0)
    for counts in (together, in_turn):
        counts.advance()
    together.use(np.array([1, 3, 1, 1]))
    for key in (1, 3, 1, 1):
        in_turn.use(np.array([key]))
    assert (together.raw == in_turn.raw).all()
    assert together.values().tolist() == [0, 3, 0, 1]
