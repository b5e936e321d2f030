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


def test_a_use_of_this_moment_counts_one() -> None:
    counts = DecayedCounts(4, 16.0)
    advance(counts, 1000)
    use(counts, 1, 3)
    np.testing.assert_allclose(counts.values(), [0, 1, 0, 1])


@pytest.mark.parametrize("half_life", [1.0, 16.0, 256.0])
def test_a_count_halves_every_half_life(half_life: float) -> None:
    counts = DecayedCounts(2, half_life)
    use(counts, 0)
    for n_halvings in range(1, 5):
        advance(counts, int(half_life))
        assert counts.values()[0] == pytest.approx(0.5**n_halvings)
    assert counts.now == 4 * half_life


def test_uses_add_up_with_their_ages() -> None:
    counts = DecayedCounts(2, 10.0)
    expected = 0.0
    for used in (1, 0, 0, 1, 1, 0, 1):
        if used:
            use(counts, 0)
        expected = (expected + used) * 2 ** (-1 / 10)
        counts.advance()
    assert counts.values()[0] == pytest.approx(expected)


def test_some_values_are_those_of_all() -> None:
    counts = DecayedCounts(6, 4.0)
    rng = np.random.default_rng(1)
    keys = np.array([[5, 0], [3, 3]])
    for _ in range(200):
        use(counts, *rng.choice(6, 2, replace=False))
        counts.advance()
        np.testing.assert_array_equal(counts.of(keys), counts.values()[keys])


def test_growing_weights_are_brought_back_without_a_trace() -> None:
    """Half-life 1: the weight passes 1e100 every 333 tokens. A plain decay is the oracle."""
    counts, plain = DecayedCounts(3, 1.0), np.zeros(3)
    peak = 0.0
    for token in range(2000):
        use(counts, token % 3)
        plain[token % 3] += 1
        counts.advance()
        plain /= 2
        np.testing.assert_allclose(counts.values(), plain, rtol=1e-9)
        peak = max(peak, *counts.raw)
    assert 1e90 < peak < 1e101, "rescaled, and late"


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
