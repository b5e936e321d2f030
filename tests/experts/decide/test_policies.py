"""What single policies rank by, where one rule decides; test_policy_random.py has all rules."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from tests.experts.policy_pool import PolicyPool, random_tokens
from tests.samples import sampled
from vkmoe.choices import PolicyName
from vkmoe.experts.decide.keys import DecayedCounts, KeySpace
from vkmoe.experts.decide.locations import Locations
from vkmoe.experts.decide.policies import POLICIES
from vkmoe.experts.decide.settings import PoolSpec

CAPACITY = 8


@pytest.fixture(params=POLICIES)
def name(request: pytest.FixtureRequest) -> PolicyName:
    found: PolicyName = request.param
    return found


def full(name: PolicyName, half_life: float = 1e9) -> PolicyPool:
    """Eight slots: 0 to 7, which were never used."""
    pool = PolicyPool(name, CAPACITY, half_life=half_life)
    for key in range(CAPACITY):
        pool.policy.insert(key)
    return pool


def test_every_name_of_the_settings_makes_its_policy() -> None:
    pool, space = PoolSpec((0,), 3, 0, 256), KeySpace(1, 8)
    assert tuple(POLICIES) == get_args(PolicyName)
    for kind in POLICIES.values():
        made = kind(Locations(space, [pool]), DecayedCounts(8, 64.0))
        assert made.pools == (pool,) and made.locations.n_free(0) == 3


def test_what_cannot_be_is_refused(name: PolicyName) -> None:
    """One more than there are slots, one that is there, and leaving without a slot."""
    policy = full(name).policy
    for operation, key in ((policy.insert, 60), (policy.remove, 60)):
        with pytest.raises(AssertionError):
            operation(key)
    policy.remove(0)
    with pytest.raises(AssertionError):
        policy.insert(1)
    assert len(policy) == CAPACITY - 1
    policy.check_integrity()


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


def test_a_newcomer_survives_the_next_ones(name: PolicyName) -> None:
    """The cold start: it was never used, all others were; newer newcomers leave it its slot."""
    pool = full(name)
    pool.tokens([[*range(CAPACITY)]] * 20)
    left = [pool.promote(key) for key in (20, 21)]
    assert left == [0, 1], "21 did not take the slot of 20"


@pytest.mark.parametrize(("n_after", "victim"), [(3, 1), (5, 0)])
def test_lfru_many_uses_outweigh_a_long_time_but_not_for_ever(n_after: int, victim: int) -> None:
    """12 uses of 0, then all others n times: 12 / (2 + n) against n / 2, which meet at n = 4."""
    pool = full("lfru")
    pool.tokens([[0]] * 12)
    pool.tokens([[*range(1, CAPACITY)]] * n_after)
    assert pool.victim() == victim


@pytest.mark.parametrize("name", ["slru", "lfru"])
def test_an_old_favourite_loses_to_newer_uses(name: PolicyName) -> None:
    """Counts decay: 100 uses long ago weigh less than a few now."""
    for half_life, leaves in ((1e9, 1), (8.0, 0)):
        pool = full(name, half_life)
        for n_tokens, used in ((400, [0]), (10, [*range(1, CAPACITY)]), (10, [])):
            for _ in range(n_tokens):
                pool.counts.use(np.array(used, np.int64))
                if name == "lfru":
                    pool.policy.use(used)
                pool.counts.advance()
        assert pool.victim() == leaves


def test_slru_a_passing_expert_does_not_push_out_a_steady_one() -> None:
    """A use protects; what is protected leaves by recency, and only behind all on probation."""
    pool = full("slru")
    pool.counts.use(np.array([1, 2, 3, 4, 5, 6, 7] * 2))
    pool.token([0])
    assert pool.victim() == 1, "0 was used least, but again since it came"
    pool.tokens([[5], [6]])
    assert pool.victim() == 0, "two of eight slots are protected, and others were used later"
    assert pool.victim([0, 1, 2, 3, 4, 7]) == 5, "by recency"


def skewed(n_tokens: int = 500) -> list[list[int]]:
    """A zipf hot set and, in every token, two keys of a scan through all the others."""
    rng = np.random.default_rng(11)
    weights = 1.0 / np.arange(1, 17)
    hot = [rng.choice(16, 2, replace=False, p=weights / weights.sum()) for _ in range(n_tokens)]
    scan = [(16 + 2 * t % 48, 16 + (2 * t + 1) % 48) for t in range(n_tokens)]
    return [[*map(int, a), *b] for a, b in zip(hot, scan, strict=True)]


@pytest.mark.parametrize("capacity", sampled([8, 12, 16], (12).__eq__))
def test_looking_at_frequency_beats_recency_alone(capacity: int) -> None:
    tokens = skewed()
    with_counts = PolicyPool("slru", capacity).tokens(tokens)
    assert with_counts > 1.03 * PolicyPool("lru", capacity).tokens(tokens)
