"""What every cache policy promises (experts/decide/policies.py), at 8 slots and at the edges."""

from __future__ import annotations

from typing import get_args

import pytest

from tests.experts.policy_pool import PolicyPool, random_tokens
from vkmoe.choices import PolicyName
from vkmoe.experts.decide.keys import DecayedCounts, KeySpace
from vkmoe.experts.decide.locations import Locations
from vkmoe.experts.decide.policies import POLICIES
from vkmoe.experts.decide.settings import PoolSpec

CAPACITY = 8
NEWCOMER = 60


@pytest.fixture(params=POLICIES)
def name(request: pytest.FixtureRequest) -> PolicyName:
    found: PolicyName = request.param
    return found


def filled(name: PolicyName) -> PolicyPool:
    """Eight slots: 0..7 inserted in turn, one per token, and each used once."""
    pool = PolicyPool(name, CAPACITY)
    pool.tokens([key] for key in range(CAPACITY))
    return pool


@pytest.fixture
def full(name: PolicyName) -> PolicyPool:
    return filled(name)


# ----- names -----


def test_every_name_of_the_settings_makes_its_policy() -> None:
    pool, space = PoolSpec((0,), 3, 0, 256), KeySpace(1, 8)
    assert tuple(POLICIES) == get_args(PolicyName)
    for kind in POLICIES.values():
        made = kind(Locations(space, [pool]), DecayedCounts(8, 64.0))
        assert made.pools == (pool,) and made.locations.n_free(0) == 3


# ----- uses, insertions, removals -----


def test_use_returns_the_misses_in_their_order(full: PolicyPool) -> None:
    assert full.policy.use([9, 3, 12, 0, 10]) == [9, 12, 10]
    assert full.policy.use([5, 1]) == []
    assert sorted(full.policy) == list(range(CAPACITY)), "a use moves nobody in or out"


def test_insert_and_remove_change_who_is_resident(full: PolicyPool) -> None:
    policy = full.policy
    policy.remove(3)
    assert 3 not in policy and len(policy) == CAPACITY - 1 and 3 not in list(policy)
    policy.insert(20)
    assert 20 in policy and len(policy) == CAPACITY
    policy.check_integrity()


def test_a_full_pool_takes_nobody_and_nobody_twice(full: PolicyPool) -> None:
    with pytest.raises(AssertionError):
        full.policy.insert(NEWCOMER)
    full.policy.remove(0)
    with pytest.raises(AssertionError):
        full.policy.insert(1)
    assert len(full.policy) == CAPACITY - 1
    full.policy.check_integrity()


def test_removing_a_stranger_fails(full: PolicyPool) -> None:
    with pytest.raises(AssertionError):
        full.policy.remove(NEWCOMER)
    assert len(full.policy) == CAPACITY
    full.policy.check_integrity()


# ----- victims -----


def test_of_equals_the_oldest_leaves(name: PolicyName) -> None:
    """Equal counts: every policy falls back on recency."""
    pool = PolicyPool(name, CAPACITY, half_life=1e9)
    pool.tokens([key] for key in (5, 2, 7, 1, 4, 0, 6, 3))
    assert pool.victim() == 5


def test_the_victim_is_the_first_in_the_order_that_may_leave(name: PolicyName) -> None:
    for seed in range(20):
        pool = PolicyPool(name, CAPACITY)
        pool.tokens(random_tokens(seed, 50, n_experts=16))
        order = list(pool.policy)
        assert sorted(order) == sorted(set(order)) and len(order) == CAPACITY
        for needed in ([], order[:1], order[:3], order[::2]):
            allowed = [key for key in order if key not in needed]
            assert pool.victim(needed) == allowed[0]


def test_victim_mutates_nothing(name: PolicyName) -> None:
    asked, twin = filled(name), filled(name)
    for pool in (asked, twin):
        pool.tokens([[1, 3], [5, 9]])
        pool.policy.pin(2)
    for needed in ([], [0, 4], list(asked.policy)):
        asked.policy.victim(NEWCOMER, needed)
    assert list(asked.policy) == list(twin.policy)
    for key in (61, 62, 63):
        assert asked.promote(key) == twin.promote(key)


def test_what_is_needed_never_leaves(full: PolicyPool) -> None:
    for n_needed in range(1, CAPACITY + 1):
        needed = list(full.policy)[:n_needed]
        assert full.victim(needed) not in needed
    assert full.victim(list(full.policy)) is None


def test_the_newest_is_spared_as_long_as_another_may_leave(full: PolicyPool) -> None:
    full.promote(20)
    for _ in range(CAPACITY - 1):
        victim = full.victim()
        assert victim is not None and victim != 20
        full.policy.pin(victim)
    assert full.victim() == 20, "nobody else is left"
    full.policy.remove(20)
    assert full.victim() is None


def test_the_newest_is_spared_though_all_others_were_used_since(full: PolicyPool) -> None:
    full.promote(20)
    for key in sorted(set(full.policy) - {20}) * 2:
        full.token([key])
    assert full.victim() not in (20, None)


def test_a_newcomer_is_not_the_next_victim(name: PolicyName) -> None:
    """The cold start: all others have many uses, and the newcomers come between tokens."""
    pool = PolicyPool(name, CAPACITY)
    pool.tokens([[*range(4)], [*range(4, 8)]] * 20)
    first = pool.promote(20)
    second = pool.promote(21)
    assert first in range(8) and second in range(8)


# ----- pins -----


def test_a_pinned_key_never_leaves(full: PolicyPool) -> None:
    held = (0, 3)
    for key in held:
        full.policy.pin(key)
    for keys in random_tokens(2, 200):
        full.token(keys)
        assert all(key in full.policy and full.policy.is_pinned(key) for key in held)
        assert full.victim() not in held
    assert set(list(full.policy)[-2:]) == set(held), "last in the order"


def test_with_all_pinned_nobody_leaves(full: PolicyPool) -> None:
    for key in range(CAPACITY):
        full.policy.pin(key)
        full.policy.check_integrity()
    assert full.victim() is None
    assert full.policy.use([0, 7, 9]) == [9]
    full.policy.check_integrity()


def test_the_pin_of_a_key_that_is_not_resident_waits_for_it(full: PolicyPool) -> None:
    full.policy.pin(30)
    assert full.policy.is_pinned(30) and 30 not in full.policy
    assert len(full.policy) == CAPACITY
    full.promote(30)
    for keys in random_tokens(3, 100, n_experts=30):
        full.token(keys)
    assert 30 in full.policy


def test_a_pinned_key_can_be_removed_and_comes_back_pinned(full: PolicyPool) -> None:
    full.policy.pin(3)
    full.policy.remove(3)
    assert 3 not in full.policy and full.policy.is_pinned(3)
    full.policy.check_integrity()
    full.policy.insert(3)
    for keys in random_tokens(4, 100):
        full.token(keys)
    assert 3 in full.policy


def test_an_unpinned_key_can_leave_again(full: PolicyPool) -> None:
    full.policy.pin(3)
    full.policy.unpin(3)
    assert not full.policy.is_pinned(3) and 3 in full.policy
    full.policy.check_integrity()
    full.tokens([key, key + 1] for key in range(20, 60))
    assert 3 not in full.policy


def test_pinning_twice_is_pinning_once(full: PolicyPool) -> None:
    for _ in range(2):
        full.policy.pin(3)
        full.policy.pin(40)
    for key in (3, 40):
        full.policy.unpin(key)
        assert not full.policy.is_pinned(key)
    full.policy.check_integrity()
    assert len(full.policy) == CAPACITY


def test_unpinning_what_has_no_pin_does_nothing(full: PolicyPool) -> None:
    before = list(full.policy)
    full.policy.unpin(3)
    full.policy.unpin(40)
    assert list(full.policy) == before and not full.policy.is_pinned(40)
    full.policy.check_integrity()
