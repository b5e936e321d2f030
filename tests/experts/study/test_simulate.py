"""Replaying traces: the same decisions as `Residency`, and where misses come from."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.experts.invented_traces import drifting, of_ids, trace_of
from tests.experts.pins import first_n, named, warm
from tests.experts.tokens import after_token
from vkmoe.choices import PolicyName, SlotSharing
from vkmoe.experts.decide.residency import Residency
from vkmoe.experts.decide.settings import CacheSettings, PoolSpec, make_pools
from vkmoe.experts.study.replay import Transfers, ceiling, misses, simulate

POLICIES = get_args(PolicyName)


def pools_of(n_layers: int, capacity: int) -> tuple[PoolSpec, ...]:
    return make_pools([capacity] * n_layers, [1] * n_layers, 2, "layer")


def test_an_expert_is_found_by_the_token_after_the_one_that_missed_it() -> None:
    """Hits are judged by what was there before the token: its own misses do not count."""
    trace = of_ids([0], [0], [1], [0], [1])
    result = simulate(trace, CacheSettings("lru"), [PoolSpec((0,), 1, 0, 1)])
    assert result.hits[:, 0].tolist() == [0, 1, 0, 0, 0]
    assert result.n_promoted.tolist() == [4]
    assert result.hit_rate == pytest.approx(1 / 5)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("allocation", get_args(SlotSharing))
def test_hits_are_those_of_the_experts_in_slots(
    policy: PolicyName, allocation: SlotSharing
) -> None:
    """Against `present` itself, asked expert by expert."""
    trace = trace_of(drifting(200, 3, 16, 4), 16, n_prompt=50)
    pools = make_pools([9, 9, 9], [1, 1, 1], 4, allocation)
    choices = CacheSettings(policy, pins=(warm(2, 20),))
    result = simulate(trace, choices, pools)
    residency = Residency(trace.space, pools, choices)
    residency.arrived(residency.start())
    for token, routing in enumerate(trace.routing):
        found = [
            sum(bool(residency.present[layer, expert]) for expert in routing[layer])
            for layer in range(3)
        ]
        assert result.hits[token].tolist() == found
        residency.arrived(after_token(residency, routing))
        residency.check_integrity()
    decode = result.hits[50:].sum() / (150 * 3 * 4)
    assert result.decode_rate == pytest.approx(decode)
    assert result.decode_rate != pytest.approx(result.hit_rate)


def test_bytes_are_counted_with_each_layers_own_size() -> None:
    trace = trace_of(drifting(30, 2, 8, 2), 8)  # spans of 1000 and 1001 bytes
    result = simulate(trace, CacheSettings("lru"), [PoolSpec((0,), 4, 0, 1000)])
    n_missed = 60 - result.layer_hits[0]
    assert result.layer_hits[1] == 0
    assert result.read_bytes == pytest.approx((n_missed * 1000 + 60 * 1001) / 30)
    assert result.copied_bytes == pytest.approx(result.n_promoted[0] * 1000 / 30)
    assert result.n_promoted[1] == 0
    assert result.worst_rate == 0


@pytest.mark.parametrize("allocation", get_args(SlotSharing))
def test_with_a_slot_for_every_expert_there_is_no_cache(allocation: SlotSharing) -> None:
    """The engine reads them in place then: nothing is copied, not even first uses miss."""
    trace = trace_of(drifting(20, 3, 8, 2), 8)
    pools = make_pools([8] * 3, [1] * 3, 2, allocation)
    result = simulate(trace, CacheSettings(), pools)
    assert (result.hit_rate, int(result.n_promoted.sum()), result.read_bytes) == (1, 0, 0)
    best = ceiling(trace, pools, result.start)
    split = misses(result, best)
    assert (split.compulsory, split.capacity, split.policy) == (0, 0, 0)
    one_less = simulate(trace, CacheSettings(), make_pools([8, 8, 7], [1] * 3, 2, allocation))
    assert one_less.hit_rate < 1


def test_misses_are_split_by_their_cause() -> None:
    trace = of_ids([0], [1], [0], [2], [0], [1])
    pool = PoolSpec((0,), 1, 0, 1)
    result = simulate(trace, CacheSettings("lru"), [pool])  # never finds what it needs
    split = misses(result, ceiling(trace, [pool]))  # Belady keeps 0 throughout
    assert (split.compulsory, split.capacity, split.policy) == (3, 1, 2)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 15), st.sampled_from(POLICIES), st.integers(0, 3))
def test_the_parts_of_the_misses_add_up(
    seed: int, capacity: int, policy: PolicyName, n_resident: int
) -> None:
    trace = trace_of(drifting(40, 2, 16, 3, seed), 16)
    choices = CacheSettings(policy, pins=(first_n(min(n_resident, capacity)),))
    result = simulate(trace, choices, pools_of(2, capacity))
    split = misses(result, ceiling(trace, pools_of(2, capacity), result.start))
    assert split.compulsory + split.capacity + split.policy == 240 - result.layer_hits.sum()
    assert min(split.compulsory, split.capacity, split.policy) >= 0


def test_residents_and_a_profile_are_there_before_the_first_token() -> None:
    trace = of_ids([0, 1], [0, 1], [5, 6])
    choices = CacheSettings("lru", pins=(named(5, 1),))
    result = simulate(trace, choices, pools_of(1, 4))
    assert np.flatnonzero(result.start[0]).tolist() == [1, 5]
    assert result.hits[:, 0].tolist() == [1, 2, 1]
    assert result.n_promoted.tolist() == [4]
    seed = np.array([0, 0, 0, 0, 0, 0, 3.0, 0])
    warm = simulate(trace, CacheSettings("lru"), pools_of(1, 4), seed)
    assert warm.hits[:, 0].tolist() == [0, 2, 1]


def test_the_same_trace_gives_the_same_hits() -> None:
    trace = trace_of(drifting(150, 2, 16, 4), 16)
    first, second = (simulate(trace, CacheSettings(), pools_of(2, 8)) for _ in range(2))
    assert np.array_equal(first.hits, second.hits)
    assert np.array_equal(first.n_promoted, second.n_promoted)


# ----- how experts get into slots -----


def test_a_late_copy_is_there_for_the_token_after_the_next() -> None:
    trace = of_ids([0], [0], [0], [1], [0], [1])
    pool = [PoolSpec((0,), 2, 0, 1)]
    result = simulate(trace, CacheSettings("lru"), pool, transfers=Transfers(late=True))
    assert result.hits[:, 0].tolist() == [0, 0, 1, 0, 1, 1]
    assert result.n_promoted.tolist() == [2], "what is under way is not asked for again"


def test_the_first_missed_of_a_layer_land_without_a_copy() -> None:
    trace = of_ids([3, 1, 2], [3, 1, 2], [3, 1, 4])
    pool = [PoolSpec((0,), 4, 0, 1)]
    result = simulate(trace, CacheSettings("lru"), pool, transfers=Transfers(n_landing=2))
    assert result.n_landed == 3 and result.n_promoted.tolist() == [1]
    assert result.hits[:, 0].tolist() == [0, 3, 2]
    late = simulate(trace, CacheSettings("lru"), pool, transfers=Transfers(True, 2))
    assert late.hits[:, 0].tolist() == [0, 2, 2], "2 comes by copy, 3 and 1 are there at once"


def test_copies_stay_within_the_budget_of_a_token() -> None:
    trace, n_copies = trace_of(drifting(60, 2, 16, 4), 16), []
    for budget in (1, 1000):  # bytes; a slot has one
        cache = Residency(trace.space, pools_of(2, 8), CacheSettings())
        moves = [cache.start()]
        for routing in trace.routing:
            cache.arrived(moves[-1])
            moves.append(after_token(cache, routing, budget_bytes=budget))
        n_copies.append(sum(map(len, moves)))
    assert 0 < n_copies[0] <= 60 < n_copies[1]


def test_in_stepped_mode_the_next_layer_finds_what_was_guessed() -> None:
    """Layer 1 always uses what follows from layer 0, of more experts than have slots."""
    random = np.random.default_rng(0)
    first = random.integers(0, 16, 150)
    routing = np.stack([first, (first + 5) % 16], axis=1)[:, :, None].astype(np.uint32)
    choices = CacheSettings(predictor="correlation", executor="stepped", admission=True)
    for late in (False, True):
        result = simulate(
            trace_of(routing, 16), choices, pools_of(2, 4), transfers=Transfers(late=late)
        )
        rates = result.hits[60:].mean(axis=0)
        assert rates[1] > 0.9 > 0.5 > rates[0]


def test_a_second_text_is_not_guessed_from_the_first() -> None:
    tokens = drifting(120, 2, 16, 4)
    choices = CacheSettings(predictor="correlation", admission=True)
    one, two = (
        simulate(trace_of(tokens, 16, starts=starts), choices, pools_of(2, 6))
        for starts in ((0,), (0, 60, 61, 62, 63, 64))
    )
    assert np.array_equal(one.hits[:61], two.hits[:61])
    assert not np.array_equal(one.hits, two.hits)
