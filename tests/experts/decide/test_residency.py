"""Residency: what moves, what is pinned and when, without a GPU."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest

from tests.experts.pins import named, warm
from tests.experts.tokens import after_token
from vkmoe.choices import PolicyName
from vkmoe.experts.decide.keys import HALF_LIFE, KeySpace
from vkmoe.experts.decide.locations import FREE, Move
from vkmoe.experts.decide.residency import Residency
from vkmoe.experts.decide.settings import CacheSettings, make_pools

SPACE = KeySpace(n_layers=2, n_experts=16)


def residency(slots: int = 8, allocation: Any = "layer", seed: Any = None, **choices: Any
              ) -> Residency:  # fmt: skip
    pools = make_pools([slots] * 2, [256] * 2, 2, allocation)
    return Residency(SPACE, pools, CacheSettings(choices.pop("policy", "slru"), **choices), seed)


def token(cache: Residency, *rows: tuple[int, ...]) -> list[Move]:
    """One token whose moves land at once."""
    moves = after_token(cache, np.array(rows, np.uint32))
    cache.arrived(moves)
    cache.check_integrity()
    return moves


def held(cache: Residency, layer: int = 0) -> set[int]:
    return set(np.flatnonzero(cache.present[layer]).tolist())


def test_misses_take_free_slots_first_and_in_rank_order() -> None:
    cache = residency(slots=3)
    moves = token(cache, (5, 2), (1, 9))
    assert moves == [Move(0, 5, FREE), Move(1, 16 + 1, FREE), Move(0, 2, FREE), Move(1, 25, FREE)]
    assert [move.key for move in token(cache, (7, 8), (1, 9))] == [7, 8]
    assert {7, 8} <= held(cache) and len(held(cache)) == 3


def test_an_expert_is_served_only_once_its_copy_has_landed() -> None:
    cache = residency()
    used = np.array([(0, 1), (2, 3)], np.uint32)
    moves = after_token(cache, used)
    assert not cache.hits(used).any(), "counted before it arrived"
    assert after_token(cache, used) == [], "asked for twice"
    cache.arrived(moves)
    assert cache.hits(used).all()


def test_a_failed_copy_is_tried_again() -> None:
    cache = residency()
    used = np.array([(0, 1), (2, 3)], np.uint32)
    cache.locations.leave([move.key for move in after_token(cache, used)])
    cache.check_integrity()
    assert [move.key for move in after_token(cache, used)] == [0, 18, 1, 19]


def test_warm_pinning_takes_the_hottest_and_fetches_who_is_absent() -> None:
    cache = residency(slots=8, policy="lru", pins=(warm(2, 12),))
    for _ in range(5):
        token(cache, (14, 15), (0, 1))
    for first in (0, 2, 4, 6, 8, 10):  # push 14 and 15 out of layer 0
        token(cache, (first, first + 1), (0, 1))
    assert not held(cache) & {14, 15}
    assert cache.warm_at is None
    token(cache, (12, 13), (0, 1))
    assert cache.warm_at == 12
    assert cache.pinned == [[14, 15], [0, 1]] and {14, 15} <= held(cache)
    for first in (0, 2, 4, 6, 8, 10):
        token(cache, (first, first + 1), (2, 3))
    assert {14, 15} <= held(cache), "a pinned expert left"


def test_pins_are_chosen_anew_and_follow_the_text() -> None:
    cache = residency(slots=8, policy="lru", pins=(warm(2, 6),))
    for _ in range(6):
        token(cache, (14, 15), (0, 1))
    assert cache.pinned == [[14, 15], [0, 1]] and cache.warm_at == 6
    for _ in range(5):
        token(cache, (3, 4), (0, 1))
    assert cache.warm_at == 6 and cache.pinned[0] == [14, 15], "chosen before its time"
    token(cache, (3, 4), (0, 1))
    assert cache.pinned == [[3, 4], [0, 1]] and cache.warm_at == 12, "late uses count more"
    for first in (0, 5, 7, 9, 11, 1):
        token(cache, (first, first + 1), (0, 1))
    assert not held(cache) & {14, 15} and {3, 4} <= held(cache)


@pytest.mark.parametrize(("slots", "n_pinned"), [(1, 0), (2, 1), (5, 2), (8, 4), (16, 6)])
def test_warm_pinning_takes_at_most_half_of_the_slots(slots: int, n_pinned: int) -> None:
    cache = residency(slots=slots, pins=(warm(6, 3),))
    for first in (0, 2, 4):
        token(cache, (first, first + 1), (first, first + 1))
    assert [len(ids) for ids in cache.pinned] == [n_pinned, n_pinned]


def test_a_tight_shared_budget_goes_to_the_hottest_layer() -> None:
    """Layer 1 uses the same two experts again and again, layer 0 spreads over all."""
    cache = residency(slots=3, allocation="global", pins=(warm(3, 8),))
    for first in range(0, 16, 2):
        token(cache, (first, first + 1), (4, 5))
    assert cache.pinned[1] == [4, 5] and len(cache.pinned[0]) == 1


def test_without_uses_nothing_is_pinned() -> None:
    """A sort of zero counts would pin experts that nobody ever used."""
    cache = residency(slots=16, pins=(warm(4, 1),))
    token(cache, (3, 9), (0, 15))
    assert cache.pinned == [[3, 9], [0, 15]]


def test_residents_never_leave() -> None:
    cache = residency(slots=4, pins=(named(0, 1),))
    cache.arrived(cache.start())
    assert held(cache) == {0, 1} and cache.pinned == [[0, 1], [0, 1]]
    for first in (2, 4, 6, 8):
        token(cache, (first, first + 1), (first, first + 1))
        assert {0, 1} <= held(cache)


def test_a_profile_fills_the_slots_and_pins_at_once() -> None:
    counts = np.zeros(SPACE.n_keys)
    counts[[3, 4, 5, 16 + 15]] = [1.0, 9.0, 5.0, 2.0]
    cache = residency(slots=2, seed=counts, pins=(warm(1),))
    cache.arrived(cache.start())
    cache.check_integrity()
    assert held(cache, 0) == {4, 5} and held(cache, 1) == {15}
    assert cache.pinned == [[4], [15]] and cache.warm_at == 0


@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_what_a_profile_says_is_used_most_leaves_last(policy: Any) -> None:
    counts = np.zeros(SPACE.n_keys)
    counts[:8] = [100, 50, 20, 10, 5, 4, 3, 2]
    cache = residency(slots=8, policy=policy, seed=counts)
    cache.arrived(cache.start())
    token(cache, (12, 13), (0, 1))
    token(cache, (14, 15), (0, 1))
    assert {0, 1, 2, 3} <= held(cache)


def test_a_profile_without_uses_is_none() -> None:
    cache = residency(slots=8, seed=np.zeros(SPACE.n_keys), pins=(warm(2, 2),))
    assert cache.start() == []
    for _ in range(2):
        token(cache, (3, 9), (0, 15))
    assert cache.pinned == [[3, 9], [0, 15]] and cache.warm_at == 2


def test_choosing_pins_throws_nothing_out_that_the_token_used() -> None:
    cache = residency(slots=2, pins=(warm(1, 4),))
    for _ in range(3):
        token(cache, (4, 5), (4, 5))
    token(cache, (8, 9), (8, 9))
    assert held(cache) == {8, 9} and cache.pinned == [[4], [4]]


def test_pins_with_no_room_for_them_do_not_count_as_warm() -> None:
    cache = residency(slots=1, pins=(warm(2, 1),))
    token(cache, (3, 9), (0, 15))
    assert cache.pinned == [[], []] and cache.warm_at is None


def test_a_profile_respects_the_floor_of_shared_slots() -> None:
    counts = np.zeros(SPACE.n_keys)
    counts[:16], counts[16:18] = 9.0, 1.0
    cache = residency(slots=4, allocation="global", seed=counts)
    cache.arrived(cache.start())
    assert held(cache, 1) == {0, 1} and len(held(cache, 0)) == 6


def test_experts_that_lose_their_slots_keep_pins_and_counts() -> None:
    cache = residency(slots=8, pins=(warm(2, 3),))
    for _ in range(4):
        token(cache, (8, 9), (8, 9))
    cache.locations.leave(np.flatnonzero(cache.locations.resident))
    cache.check_integrity()
    assert not cache.present.any() and cache.pinned == [[8, 9], [8, 9]]
    assert cache.counts.values()[8] > 3
    token(cache, (8, 9), (8, 9))
    for first in (0, 2, 4, 6, 10, 12):
        token(cache, (first, first + 1), (first, first + 1))
    assert {8, 9} <= held(cache)


def test_ranks_of_all_layers_come_before_later_ranks_in_shared_slots() -> None:
    cache = residency(slots=1, allocation="global")
    moves = token(cache, (5, 6), (7, 8))
    assert [divmod(move.key, SPACE.n_experts) for move in moves] == [(0, 5), (1, 7)]


@pytest.mark.parametrize("policy", get_args(PolicyName))
@pytest.mark.parametrize("allocation", ["layer", "global"])
def test_a_batch_is_its_tokens_observed_one_by_one(allocation: Any, policy: Any) -> None:
    """All that follows is the same, where nothing is decided between the tokens of a batch.

    Tokens of a batch use the same experts again and again.
    """
    rng = np.random.default_rng(3)
    together, in_turn = (
        residency(4, allocation, policy=policy, pins=(warm(1, 7),)) for _ in range(2)
    )
    for _ in range(40):
        n_tokens = int(rng.integers(1, 6))
        rows = [rng.permutation(6)[:2] for _ in range(2 * n_tokens)]
        batch = np.array(rows, np.uint32).reshape(n_tokens, 2, 2)
        keys = together.observe(batch)
        together.learn()
        assert (keys == batch + np.array([[0], [16]])).all()
        for ids in batch:
            in_turn.observe(ids[None])
            in_turn.learn()
        moves, others = together.decide(), in_turn.decide()
        assert moves == others and len({move.key for move in moves}) == len(moves)
        assert not {move.victim for move in moves} & set(keys.ravel().tolist())
        for cache in (together, in_turn):
            cache.arrived(moves)
            cache.check_integrity()
        assert (together.counts.values() == in_turn.counts.values()).all()
        assert together.n_tokens == in_turn.n_tokens and together.warm_at == in_turn.warm_at
        assert together.pinned == in_turn.pinned and (together.present == in_turn.present).all()
    assert together.warm_at is not None


def test_an_expert_that_two_tokens_of_a_batch_missed_is_brought_once() -> None:
    """A use of each token counts, and each is as old as its place in the batch."""
    cache = residency()
    cache.observe(np.array([[(0, 1), (0, 1)], [(0, 2), (0, 2)]], np.uint32))
    cache.learn()
    assert [move.key for move in cache.decide()] == [0, 16, 1, 17, 2, 18]
    before = 0.5 ** (1 / HALF_LIFE)
    assert cache.counts.values()[:4] == pytest.approx([1 + before, before, 1.0, 0.0])
    assert cache.decide() == [], "nothing was observed since"
