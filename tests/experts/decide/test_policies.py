"""The rules of each cache policy, at sizes where each rule decides alone."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.experts.policy_pool import MakePolicy, OnePool, PolicyPool, held_of, random_tokens
from tests.samples import sampled
from vkmoe.experts.decide.policies import PROTECTED_SHARE, Slru

CAPACITY = 8

# ----- lru: the oracle, so its own rules are compared with a plain list -----


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


# ----- lfru: score = decayed uses / (1 + tokens since the last use) -----


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


# ----- slru: the segments of the default policy -----


def slru(share: float = 0.5) -> MakePolicy:
    return partial(Slru, share=share)


def pool_of(keys: range = range(CAPACITY), share: float = 0.5) -> tuple[PolicyPool, OnePool]:
    """Eight slots, four of them for protected ones; the keys are on probation and never used."""
    pool = PolicyPool(slru(share), CAPACITY, half_life=1e9)
    pool.fill(keys)
    return pool, pool.policy


def protected(policy: OnePool) -> set[int]:
    assert isinstance(policy.all, Slru)
    slru, locations = policy.all, policy.locations
    keys = locations.holders([0])
    found = slru._protected(keys, locations.all_unpinned[keys], [0])
    residents = held_of(locations, 0)
    return {*keys[found].tolist(), *residents[locations.pins[residents] != 0].tolist()}


# ----- segments -----


def test_a_newcomer_is_on_probation_and_a_hit_promotes_it() -> None:
    pool, policy = pool_of()
    assert protected(policy) == set()
    pool.token([3, 5])
    assert protected(policy) == {3, 5}
    pool.token([3])
    assert protected(policy) == {3, 5}


def test_an_overflowing_segment_demotes_its_least_recent() -> None:
    pool, policy = pool_of()
    pool.tokens([[0], [1], [2], [3], [0], [4]])
    assert protected(policy) == {2, 3, 0, 4}, "1 was the least recent, 0 was used again"


def test_a_demoted_key_is_the_most_recent_on_probation() -> None:
    """All counts equal 1, so recency decides whole probation; the newest (7) is spared."""
    pool, policy = pool_of()
    pool.tokens([key] for key in (4, 5, 6, 7, 0, 1, 2, 3))
    assert protected(policy) == {0, 1, 2, 3}
    assert list(policy) == [4, 5, 6, 0, 1, 2, 3, 7]


def test_a_demoted_key_can_leave() -> None:
    pool, policy = pool_of()
    pool.tokens([key] for key in range(CAPACITY))
    assert protected(policy) == {4, 5, 6, 7}
    assert pool.promote(20) == 0


@pytest.mark.parametrize(("capacity", "wanted"), [(1, 0), (2, 0), (3, 0), (4, 1), (8, 2), (32, 8)])
def test_a_quarter_is_protected(capacity: int, wanted: int) -> None:
    pool = PolicyPool("slru", capacity)
    pool.fill(range(capacity))
    pool.tokens([[key] for key in range(capacity)] * 3)
    assert PROTECTED_SHARE == 0.25
    assert len(protected(pool.policy)) == wanted


def test_even_with_all_protected_a_newcomer_finds_a_slot() -> None:
    pool, policy = pool_of(share=1.0)
    pool.tokens([[*range(4)], [*range(4, 8)]])
    assert len(protected(policy)) == CAPACITY - 1
    assert pool.promote(20) == 0


# ----- the victim -----


def test_the_least_used_on_probation_leaves_though_it_is_recent() -> None:
    pool, policy = pool_of()
    pool.counts.use(np.array([0, 1, 2, 3, 4, 6, 7]))
    assert pool.victim() == 5
    pool.counts.use(np.array([5]))
    pool.counts.use(np.array([0, 1, 3, 4, 5, 6, 7]))
    assert pool.victim() == 2
    assert list(policy)[:2] == [2, 0], "equal counts: the least recent"


def test_recency_breaks_ties() -> None:
    pool = PolicyPool("slru", CAPACITY, half_life=1e9)
    pool.fill((4, 2, 7, 1, 3, 0, 6, 5))
    pool.counts.use(np.array([4, 1, 0]))
    assert pool.victim() == 2
    assert pool.victim([2, 7]) == 3
    assert pool.victim([2, 7, 3, 6]) == 4


def test_a_protected_key_outlives_one_on_probation_with_more_uses() -> None:
    pool, _ = pool_of()
    pool.counts.use(np.array([1, 2, 3, 4, 5, 6, 7]))
    pool.counts.use(np.array([1, 2, 3, 4, 5, 6, 7]))
    pool.token([0])
    assert pool.victim() == 1


def test_the_protected_leave_by_recency_where_probation_is_empty_handed() -> None:
    pool, policy = pool_of()
    pool.tokens([[0], [1], [2], [3], [0], [2], [0], [0]])
    assert protected(policy) == {0, 1, 2, 3}
    assert pool.victim([4, 5, 6, 7]) == 1, "not by use: 1 and 3 have as many, 0 has most"
    assert pool.victim([4, 5, 6, 7, 1]) == 3
    assert pool.victim([4, 5, 6, 7, 1, 3]) == 2


def test_the_newest_is_spared_among_the_protected_too() -> None:
    pool, policy = pool_of()
    pool.tokens([[7], [0], [1], [2]])
    assert 7 in protected(policy)
    assert pool.victim([3, 4, 5, 6]) == 0
    assert pool.victim([3, 4, 5, 6, 0, 1, 2]) == 7


def test_the_cold_start_trap() -> None:
    """A newcomer has the lowest count of all, and still another leaves for the one after it."""
    pool, _ = pool_of()
    for _ in range(50):
        pool.counts.use(np.arange(CAPACITY))
    left = [pool.promote(key) for key in (20, 21, 22, 23)]
    assert left == [0, 1, 20, 21], "22 and 23 live; the older newcomers went, not those two"
    pool.tokens([[22], [23]])
    assert pool.promote(24) == 2, "a use lifts newcomers out of the trap"


def test_an_old_favourite_loses_to_newer_uses() -> None:
    """Counts decay: 100 uses long ago weigh less than 2 now."""
    for half_life, leaves in ((1e9, 1), (16.0, 0)):
        pool = PolicyPool("slru", CAPACITY, half_life=half_life)
        pool.fill(range(CAPACITY))
        for n_tokens, used in ((100, [0]), (300, []), (2, [*range(1, CAPACITY)])):
            for _ in range(n_tokens):
                pool.counts.use(np.array(used, np.int64))
                pool.counts.advance()
        assert pool.victim() == leaves


# ----- pins -----


def test_a_pinned_key_is_protected_and_never_demoted() -> None:
    pool, policy = pool_of()
    policy.pin(0)
    assert protected(policy) == {0}
    pool.tokens([[key] for key in range(1, CAPACITY)] * 3)
    assert protected(policy) == {0, 5, 6, 7}


def test_a_pinned_newcomer_goes_straight_to_the_protected() -> None:
    pool, policy = pool_of()
    policy.pin(20)
    pool.promote(20)
    assert 20 in protected(policy)


def test_pins_take_the_place_of_other_protected_ones() -> None:
    pool, policy = pool_of()
    pool.tokens([[0], [1], [2], [3]])
    policy.pin(6)
    policy.pin(7)
    assert protected(policy) == {2, 3, 6, 7}


def test_more_pins_than_the_share_leave_probation_as_it_is() -> None:
    pool, policy = pool_of()
    for key in range(6):
        policy.pin(key)
    pool.token([6])
    assert protected(policy) == set(range(6)) and pool.victim() == 6


def test_an_unpinned_key_stays_protected_as_the_most_recent() -> None:
    pool, policy = pool_of()
    policy.pin(0)
    pool.tokens([[1], [2], [3]])
    policy.unpin(0)
    assert protected(policy) == {0, 1, 2, 3}
    pool.token([4])
    assert protected(policy) == {0, 2, 3, 4}, "1 is the least recent"


# ----- against recency alone -----


def test_without_uses_it_replaces_like_lru() -> None:
    """Nobody is ever used again, all counts are equal: the oldest leaves, as under lru."""
    ours, oracle = (PolicyPool(name, CAPACITY, half_life=1e9) for name in ("slru", "lru"))
    for key in np.random.default_rng(3).permutation(64).tolist():
        for pool in (ours, oracle):
            pool.token([key])
        assert list(ours.policy) == list(oracle.policy)


def skewed(n_tokens: int = 500) -> list[list[int]]:
    """A zipf hot set and, in every token, two keys of a scan through all the others."""
    rng = np.random.default_rng(11)
    weights = 1.0 / np.arange(1, 17)
    hot = [rng.choice(16, 2, replace=False, p=weights / weights.sum()) for _ in range(n_tokens)]
    scan = [(16 + 2 * t % 48, 16 + (2 * t + 1) % 48) for t in range(n_tokens)]
    return [[*map(int, a), *b] for a, b in zip(hot, scan, strict=True)]


@pytest.mark.parametrize("capacity", sampled([8, 12, 16], (12).__eq__))
@pytest.mark.parametrize("share", sampled([0.25, 0.5], (0.25).__eq__))
def test_looking_at_frequency_beats_recency_alone(capacity: int, share: float) -> None:
    tokens = skewed()
    with_counts = PolicyPool(slru(share), capacity).tokens(tokens)
    assert with_counts > 1.03 * PolicyPool("lru", capacity).tokens(tokens)
