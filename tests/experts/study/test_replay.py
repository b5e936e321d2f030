"""Replaying traces: the decisions of `Residency`, Belady's optimum, and many replays of one."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.experts.invented_traces import drifting, of_ids, trace_of
from tests.experts.pins import named, warm
from tests.experts.tokens import after_token
from vkmoe.choices import PolicyName, SlotSharing
from vkmoe.experts.decide.keys import KeySpace
from vkmoe.experts.decide.residency import Residency
from vkmoe.experts.decide.settings import CacheSettings, PoolSpec, make_pools
from vkmoe.experts.records.trace import Trace
from vkmoe.experts.study import replay as module
from vkmoe.experts.study.replay import (
    ENOUGH_TOKENS,
    KnowsNext,
    Transfers,
    Wanted,
    belady_hits,
    bend_of_curve,
    ceiling,
    ladder,
    misses,
    run_sweep,
    simulate,
)

POLICIES = get_args(PolicyName)
TRACE = trace_of(drifting(80, 3, 16, 4), 16)


def pools_of(n_layers: int, capacity: int) -> tuple[PoolSpec, ...]:
    return make_pools([capacity] * n_layers, [1] * n_layers, 2, "layer")


def test_an_expert_is_found_by_the_token_after_the_one_that_missed_it() -> None:
    """Hits are judged by what was there before the token: its own misses do not count."""
    trace = of_ids([0], [0], [1], [0], [1], [1])
    result = simulate(trace, CacheSettings("lru"), [PoolSpec((0,), 1, 0, 1)])
    assert result.hits[:, 0].tolist() == [0, 1, 0, 0, 0, 1]
    assert result.n_promoted.tolist() == [4], "what the last one missed is left to a next one"
    assert result.hit_rate == pytest.approx(2 / 6)


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
        residency.observe(routing[None])
        residency.arrived(residency.decide())
        residency.learn()  # behind the decision, as the engine does
        residency.check_integrity()


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
    result = simulate(trace, CacheSettings("slru"), pools)
    assert (result.hit_rate, int(result.n_promoted.sum()), result.read_bytes) == (1, 0, 0)
    best = ceiling(trace, pools, result.start)
    split = misses(result, best)
    assert (split.compulsory, split.capacity, split.policy) == (0, 0, 0)
    one_less = simulate(trace, CacheSettings("slru"), make_pools([8, 8, 7], [1] * 3, 2, allocation))
    assert one_less.hit_rate < 1


def test_misses_are_split_by_their_cause() -> None:
    trace = of_ids([0], [1], [0], [2], [0], [1])
    pool = PoolSpec((0,), 1, 0, 1)
    result = simulate(trace, CacheSettings("lru"), [pool])  # never finds what it needs
    split = misses(result, ceiling(trace, [pool]))  # Belady keeps 0 throughout
    assert (split.compulsory, split.capacity, split.policy) == (3, 1, 2)


def test_residents_and_a_profile_are_there_before_the_first_token() -> None:
    trace = of_ids([0, 1], [0, 1], [5, 6], [5, 6])
    choices = CacheSettings("lru", pins=(named(5, 1),))
    result = simulate(trace, choices, pools_of(1, 4))
    assert np.flatnonzero(result.start[0]).tolist() == [1, 5]
    assert result.hits[:, 0].tolist() == [1, 2, 1, 2]
    assert result.n_promoted.tolist() == [4]
    seed = np.array([0, 0, 0, 0, 0, 0, 3.0, 0])
    warm = simulate(trace, CacheSettings("lru"), pools_of(1, 4), seed)
    assert warm.hits[:, 0].tolist() == [0, 2, 1, 2]


# ----- how experts get into slots -----


def test_a_late_copy_is_there_for_the_token_after_the_next() -> None:
    trace = of_ids([0], [0], [0], [1], [0], [1])
    pool = [PoolSpec((0,), 2, 0, 1)]
    result = simulate(trace, CacheSettings("lru"), pool, transfers=Transfers(late=True))
    assert result.hits[:, 0].tolist() == [0, 0, 1, 0, 1, 1]
    assert result.n_promoted.tolist() == [2], "what is under way is not asked for again"


def test_the_first_missed_of_a_layer_land_without_a_copy() -> None:
    trace = of_ids([3, 1, 2], [3, 1, 2], [3, 1, 4], [3, 1, 4])
    pool = [PoolSpec((0,), 4, 0, 1)]
    result = simulate(trace, CacheSettings("lru"), pool, transfers=Transfers(n_landing=2))
    assert result.n_landed == 3 and result.n_promoted.tolist() == [1]
    assert result.hits[:, 0].tolist() == [0, 3, 2, 3]
    late = simulate(trace, CacheSettings("lru"), pool, transfers=Transfers(True, 2))
    assert late.hits[:, 0].tolist() == [0, 2, 2, 3], "2 comes by copy, 3 and 1 are there at once"


def test_copies_stay_within_the_budget_of_a_token() -> None:
    trace, n_copies = trace_of(drifting(60, 2, 16, 4), 16), []
    for budget in (1, 1000):  # bytes; a slot has one
        cache = Residency(trace.space, pools_of(2, 8), CacheSettings("slru"))
        moves = [cache.start()]
        for routing in trace.routing:
            cache.arrived(moves[-1])
            moves.append(after_token(cache, routing, budget_bytes=budget))
        n_copies.append(sum(map(len, moves)))
    assert 0 < n_copies[0] <= 60 < n_copies[1]


def test_free_slots_are_filled_before_a_chunk_that_another_follows() -> None:
    """The next chunk need not bring what was copied; a token has no use for it any more."""
    trace, pool = trace_of(drifting(40, 2, 16, 4), 16, n_prompt=36), pools_of(2, 8)
    trace = replace(trace, ids=np.arange(40))
    late = Transfers(late=True, token_bytes=0)
    found = []
    for n_chunks in (1, 2, 3):
        runs = (*range(0, 36, 36 // n_chunks), *range(36, 40))
        result = simulate(replace(trace, runs=runs), CacheSettings("slru"), pool, transfers=late)
        found.append(int(result.n_promoted.sum()))
        assert not result.hits[:24].any(), "copies beside the second chunk are there for the third"
        assert bool(result.hits[24:36].all()) == (n_chunks == 3)
    assert found == [0, 0, 16]
    alone = simulate(trace, CacheSettings("slru"), pool, transfers=late)
    assert not alone.n_promoted.any(), "tokens of a prompt that run alone are as those decoded"


def test_in_stepped_mode_the_next_layer_finds_what_was_guessed() -> None:
    """Both layers always use what follows from the token, of more experts than have slots."""
    tokens = np.random.default_rng(0).integers(0, 16, 150)
    routing = np.stack([tokens, (tokens + 5) % 16], axis=1)[:, :, None].astype(np.uint32)
    trace = replace(trace_of(routing, 16), ids=tokens)
    for late in (False, True):
        rates = [
            simulate(
                trace,
                CacheSettings("forecast", prefetches=prefetches, executor="stepped"),
                pools_of(2, 4),
                transfers=Transfers(late=late),
            ).hits[60:].mean(axis=0)
            for prefetches in (False, True)
        ]  # fmt: skip
        assert rates[1][1] > 0.9 > 0.5 > rates[0][1]


# ----- Belady's optimum -----


def best_of_all(tokens: list[set[int]], capacity: int, initial: frozenset[int]) -> int:
    """Hits of the best of all ways to fill one pool: every choice at every token is followed."""
    best = {initial: 0}  # the most hits on the way to each content
    for used in tokens:
        after: dict[frozenset[int], int] = {}
        for held, n_hits in best.items():
            total = n_hits + len(held & used)
            for size in range(capacity + 1):
                for kept in itertools.combinations(sorted(held | used), size):
                    content = frozenset(kept)
                    after[content] = max(after.get(content, 0), total)
        best = after
    return max(best.values())


@st.composite
def small_routing(draw: st.DrawFn) -> tuple[NDArray[np.uint32], KeySpace]:
    n_layers, n_experts = draw(st.sampled_from([(1, 3), (1, 5), (2, 3)]))
    n_used = draw(st.integers(1, 2))
    ids = st.permutations(range(n_experts)).map(lambda order: order[:n_used])
    token = st.lists(ids, min_size=n_layers, max_size=n_layers)
    tokens = draw(st.lists(token, min_size=1, max_size=7))
    return np.array(tokens, np.uint32), KeySpace(n_layers, n_experts)


@settings(max_examples=120, deadline=None)
@given(small_routing(), st.integers(1, 4), st.data())
def test_no_cache_has_more_hits(
    case: tuple[NDArray[np.uint32], KeySpace], capacity: int, data: st.DataObject
) -> None:
    """One pool over all layers, starting with up to `capacity` experts."""
    routing, space = case
    start = data.draw(st.sets(st.integers(0, space.n_keys - 1), max_size=capacity))
    initial = np.isin(np.arange(space.n_keys), list(start)).reshape(space.n_layers, -1)
    pool = PoolSpec(tuple(range(space.n_layers)), capacity, 0, 1)
    keys = routing + np.arange(space.n_layers)[:, None] * space.n_experts
    expected = best_of_all([set(token.ravel().tolist()) for token in keys], capacity,
                           frozenset(start))  # fmt: skip
    assert belady_hits(routing, space, [pool], initial).sum() == expected


def test_layers_of_their_own_are_served_as_if_alone() -> None:
    routing, space = drifting(60, 3, 8, 2, seed=1), KeySpace(3, 8)
    pools = [PoolSpec((0,), 3, 0, 1), PoolSpec((2,), 5, 0, 1)]  # layer 1 has no slot
    hits = belady_hits(routing, space, pools)
    for layer, capacity in ((0, 3), (2, 5)):
        alone = belady_hits(routing[:, [layer]], KeySpace(1, 8), [PoolSpec((0,), capacity, 0, 1)])
        assert np.array_equal(hits[:, layer], alone[:, 0])
    assert not hits[:, 1].any()


CHOICES = st.builds(
    CacheSettings,
    policy=st.sampled_from(get_args(PolicyName)),
    pins=st.one_of(st.just(()), st.integers(1, 6).map(lambda n: (named(*range(n)),))),
)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 11),
    st.sampled_from(get_args(SlotSharing)),
    CHOICES,
    st.sampled_from([0.0, 1.0]),
)
def test_no_policy_is_above_it(
    seed: int, capacity: int, allocation: SlotSharing, choices: CacheSettings, persistence: float
) -> None:
    trace = trace_of(drifting(50, 3, 12, 3, seed, persistence), 12)
    pools = make_pools([capacity] * 3, [1] * 3, 3, allocation)
    result = simulate(trace, choices, pools)
    best = belady_hits(trace.routing, trace.space, pools, result.start)
    assert result.hits.sum() <= best.sum()
    if allocation == "layer":
        assert (result.layer_hits <= best.sum(axis=0)).all()


# ----- sweeps -----


def plain(policy: PolicyName, n_slots: int) -> CacheSettings:
    # So that a mix-up would show.
    return CacheSettings(policy, pins=(warm(1, n_slots),))


@pytest.mark.parametrize(
    ("n_experts", "n_used", "expected"),
    [
        (32, 4, (4, 8, 16, 24, 32)),
        (128, 8, (8, 16, 32, 64, 96, 128)),
        (60, 4, (4, 8, 16, 30, 45, 60)),
        (8, 2, (2, 4, 6, 8)),
        (8, 8, (8,)),
        (2, 1, (1, 2)),
        (1, 1, (1,)),
    ],
)
def test_the_ladder_goes_from_one_token_to_all_experts(
    n_experts: int, n_used: int, expected: tuple[int, ...]
) -> None:
    assert ladder(n_experts, n_used) == expected


@pytest.mark.parametrize("serial_uses", [0, 1 << 60], ids=["processes", "alone"])
def test_every_result_is_that_of_its_own_replay(
    serial_uses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SERIAL_USES", serial_uses)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    done: list[tuple[int, int]] = []
    found = run_sweep(
        TRACE, Wanted((8, 5, 8), POLICIES, plain, "slru"), lambda *counts: done.append(counts)
    )
    assert [rung.slots for rung in found.rungs] == [5, 8]
    n_all = 2 * (1 + 1 + len(POLICIES))  # of each number of slots: shared, exact, a policy each
    assert done == [(n, n_all) for n in range(1, n_all + 1)]
    for rung in found.rungs:
        own, shared = (
            make_pools([rung.slots] * 3, TRACE.header.span_bytes, 4, allocation)
            for allocation in ("layer", "global")
        )
        for policy in POLICIES:
            alone = simulate(TRACE, plain(policy, rung.slots), own)
            assert np.array_equal(rung.own[policy].hits, alone.hits)
            assert np.array_equal(rung.own[policy].n_promoted, alone.n_promoted)
        alone = simulate(TRACE, plain("forecast", rung.slots), own, table=KnowsNext(TRACE))
        assert np.array_equal(rung.exact.hits, alone.hits)
        assert np.array_equal(rung.chosen.hits, rung.own["slru"].hits)
        alone = simulate(TRACE, plain("slru", rung.slots), shared)
        assert np.array_equal(rung.shared.hits, alone.hits)
        assert np.array_equal(rung.own_best, ceiling(TRACE, own))
        assert np.array_equal(rung.shared_best, ceiling(TRACE, shared))


def test_the_main_policy_is_the_one_asked_for_where_it_is_tried() -> None:
    assert run_sweep(TRACE, Wanted((8,), ("lru", "slru"), plain, "lru")).main == "lru"
    assert run_sweep(TRACE, Wanted((8,), ("lru", "slru"), plain, "slru")).main == "slru"
    assert run_sweep(TRACE, Wanted((8,), ("lfru", "lru"), plain, "slru")).main == "lfru"


def bare(policy: PolicyName, n_slots: int) -> CacheSettings:
    return CacheSettings(policy)


def rounds(n_tokens: int) -> Trace:
    """Tokens that go round in 8 of 32 experts."""
    ids = np.array([[[2 * n % 8, (2 * n + 1) % 8]] for n in range(n_tokens)], np.uint32)
    return trace_of(ids, 32)


@pytest.mark.parametrize("slots", [(2,), (31, 32), (4, 8, 24)])
def test_the_curve_bends_at_the_same_slots_whatever_else_is_tried(slots: tuple[int, ...]) -> None:
    """Below 8 recency finds nothing, above nothing is left."""
    curve = (32, 2, 4, 8, 16, 24)
    found = run_sweep(rounds(ENOUGH_TOKENS), Wanted(slots, ("lru", "lfru"), bare, "lru", curve))
    assert bend_of_curve(found) == 8
    assert [rung.slots for rung in found.rungs] == sorted(slots)
    assert list(found.curve) == sorted(curve)
    rates = {n: result.hit_rate for n, result in found.curve.items()}
    assert rates[4] == 0
    assert rates[8] == rates[24] == pytest.approx(0.98)


def test_a_curve_that_does_not_bend_is_known_by_all_its_experts() -> None:
    ids = np.array([[[n % 16]] for n in range(ENOUGH_TOKENS)], np.uint32)
    found = run_sweep(trace_of(ids, 16), Wanted((4,), ("lru",), bare, "lru", ladder(16, 1)))
    assert bend_of_curve(found) == 16


def test_a_few_tokens_have_no_curve() -> None:
    found = run_sweep(rounds(ENOUGH_TOKENS - 1), Wanted((8,), ("lru",), bare, "lru", (4, 8, 32)))
    assert (bend_of_curve(found), found.curve) == (None, {})
