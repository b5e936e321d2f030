"""Least recently used: the oracle, so its own rules are compared with a plain list."""

from __future__ import annotations

from tests.experts.policy_pool import PolicyPool, random_tokens

CAPACITY = 8


def test_it_holds_what_was_used_last() -> None:
    """With single uses: exactly the last eight distinct keys, the oldest in front."""
    pool = PolicyPool("lru", CAPACITY)
    recent: list[int] = []
    for keys in random_tokens(1, 200, n_experts=14):
        for key in keys:
            pool.token([key])
            recent = [*(other for other in recent if other != key), key][-CAPACITY:]
            assert set(pool.policy) == set(recent)
    assert pool.victim() in recent[:2], "the newest is spared"


def test_how_often_a_key_was_used_does_not_count() -> None:
    pool = PolicyPool("lru", CAPACITY)
    pool.tokens([[0]] * 100)
    pool.tokens([key] for key in range(1, CAPACITY))
    assert pool.victim() == 0


def test_a_use_saves_and_a_question_does_not() -> None:
    pool = PolicyPool("lru", CAPACITY)
    pool.fill(range(CAPACITY))
    assert pool.victim() == 0 and 0 in pool.policy
    assert pool.victim() == 0
    pool.token([0])
    assert pool.victim() == 1


def test_a_pinned_key_keeps_its_place_in_the_order() -> None:
    pool = PolicyPool("lru", CAPACITY)
    pool.fill(range(CAPACITY))
    pool.policy.pin(0)
    assert pool.victim() == 1
    pool.policy.unpin(0)
    assert pool.victim() == 0


def test_the_order_outlives_its_clock() -> None:
    """Recency is an int32; when its numbers are used up, it is counted anew."""
    pool, twin = PolicyPool("lru", CAPACITY), PolicyPool("lru", CAPACITY)
    for token, keys in enumerate(random_tokens(2, 100, n_experts=14)):
        if token == 40:
            pool.policy.all._last += 2**31 - 30 - pool.policy.all._clock
            pool.policy.all._clock = 2**31 - 30
        assert pool.token(keys) == twin.token(keys)
        assert list(pool.policy) == list(twin.policy)
    assert pool.policy.all._clock < 1000
