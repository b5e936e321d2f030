"""score = decayed uses / (1 + tokens since the last use), at sizes where each half decides."""

from __future__ import annotations

import numpy as np
import pytest

from tests.experts.policy_pool import PolicyPool, random_tokens

CAPACITY = 8


def full(half_life: float = 1e9) -> PolicyPool:
    pool = PolicyPool("lfru", CAPACITY, half_life=half_life)
    pool.fill(range(CAPACITY))
    return pool


def test_used_at_the_same_time_the_rarer_leaves() -> None:
    pool = full()
    for key in range(CAPACITY):
        for _ in range(10 - key):
            pool.counts.use(np.array([key]))
    pool.token([*range(CAPACITY)])
    assert pool.victim() == 6, "7 is the rarest, but the newest"
    assert pool.victim([6, 5]) == 4


def test_used_as_often_the_older_leaves() -> None:
    pool = full()
    pool.tokens([key] for key in (3, 6, 0, 1, 2, 4, 5, 7))
    assert list(pool.policy) == [3, 6, 0, 1, 2, 4, 5, 7]


@pytest.mark.parametrize(("n_after", "victim"), [(3, 1), (5, 0)])
def test_many_uses_outweigh_a_long_time_but_not_for_ever(n_after: int, victim: int) -> None:
    """12 uses of 0, then all others n times: 12 / (2 + n) against n / 2, which meet at n = 4."""
    pool = full()
    pool.tokens([[0]] * 12)
    pool.tokens([[*range(1, CAPACITY)]] * n_after)
    assert pool.victim() == victim


def test_the_formula() -> None:
    """The whole order, recomputed from `values()` and a record of uses."""
    pool = PolicyPool("lfru", 12, half_life=8.0)
    used_at: dict[int, int] = {}
    for now, keys in enumerate(random_tokens(4, 200, n_experts=24)):
        pool.token(keys)
        used_at |= dict.fromkeys(keys, now)
        values = pool.counts.values()
        score = {key: values[key] / (1 + pool.counts.now - used_at[key]) for key in pool.policy}
        first = next(iter(pool.policy))
        newest = [key for key in keys if key in pool.policy][-1:]
        lowest = min(score[key] for key in score if key not in newest)
        assert score[first] == pytest.approx(lowest)
        assert pool.victim() == first


def test_counts_decay() -> None:
    """100 uses long ago: worth keeping if they count for ever, not if they fade."""
    for half_life, leaves in ((1e9, 1), (8.0, 0)):
        pool = full(half_life)
        pool.tokens([[0]] * 400)
        pool.tokens([[*range(1, CAPACITY)]] * 10)
        for _ in range(10):
            pool.counts.advance()
        assert pool.victim() == leaves


def test_a_newcomer_survives_the_next_one() -> None:
    """Its score is lowest: it has never been used. The second after it takes its place."""
    pool = full()
    pool.tokens([[*range(CAPACITY)]] * 20)
    assert [pool.promote(key) for key in (20, 21, 22)] == [0, 1, 20]


def test_slots_that_are_free_are_never_victims() -> None:
    pool = full()
    pool.tokens([[*range(CAPACITY)]] * 3)
    for key in (0, 3, 7):
        pool.policy.remove(key)
    assert pool.victim() in (1, 2, 4, 5, 6)
    assert pool.victim([1, 2, 4, 5, 6]) is None


def test_a_place_taken_again_forgets_who_was_there() -> None:
    pool = full()
    pool.policy.pin(0)
    pool.policy.remove(0)
    pool.policy.insert(20)
    pool.tokens([[*range(1, CAPACITY)]] * 3)
    pool.policy.remove(1)
    pool.policy.insert(21)
    assert pool.victim() == 20, "no pin, no uses"
