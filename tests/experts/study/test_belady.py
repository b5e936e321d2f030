"""Belady's optimum against all that a cache could do, and against every policy."""

from __future__ import annotations

import itertools
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.experts.invented_traces import drifting, of_ids, trace_of
from tests.experts.pins import first_n
from vkmoe.choices import PolicyName, SlotSharing
from vkmoe.experts.decide.keys import KeySpace
from vkmoe.experts.decide.settings import CacheSettings, PoolSpec, make_pools
from vkmoe.experts.study.belady import belady_hits, first_uses
from vkmoe.experts.study.replay import simulate


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


def test_an_expert_that_comes_back_later_passes_by() -> None:
    """0 and 1 alternate in one slot: holding on to 0 serves every second use of it."""
    trace = of_ids([0], [1], [0], [1], [0], [1])
    pool = PoolSpec((0,), 1, 0, 1)
    assert belady_hits(trace.routing, trace.space, [pool])[:, 0].tolist() == [0, 0, 1, 0, 1, 0]


def test_with_room_for_all_only_first_uses_miss() -> None:
    routing, space = drifting(80, 2, 8, 2, seed=2), KeySpace(2, 8)
    pools = make_pools([8, 8], [1, 1], 2, "layer")
    n_misses = 160 - belady_hits(routing, space, pools).sum(axis=0)
    assert np.array_equal(n_misses, first_uses(routing, space))
    everything = np.ones((2, 8), np.bool_)
    assert belady_hits(routing, space, pools, everything).min() == 2
    assert not first_uses(routing, space, everything).any()


CHOICES = st.builds(
    CacheSettings,
    policy=st.sampled_from(get_args(PolicyName)),
    half_life=st.sampled_from([2.0, 256.0]),
    pins=st.one_of(st.just(()), st.integers(1, 6).map(lambda n: (first_n(n),))),
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


@pytest.mark.parametrize("allocation", get_args(SlotSharing))
def test_more_slots_never_hurt_it(allocation: SlotSharing) -> None:
    routing, space = drifting(100, 3, 12, 3, seed=3), KeySpace(3, 12)
    hits = [
        belady_hits(routing, space, make_pools([n] * 3, [1] * 3, 3, allocation)).sum()
        for n in range(1, 13)
    ]
    assert hits == sorted(hits)
    assert hits[0] < hits[5] < hits[-1]
