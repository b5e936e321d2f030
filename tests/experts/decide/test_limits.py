"""Limits: a policy lets newcomers in by bids and within a budget."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vkmoe.choices import PolicyName
from vkmoe.experts.decide.keys import DecayedCounts, KeySpace
from vkmoe.experts.decide.locations import FREE, Locations, Move
from vkmoe.experts.decide.policies import POLICIES, Limits, Policy
from vkmoe.experts.decide.settings import PoolSpec

SPACE = KeySpace(3, 8)
NOBODY = np.zeros(SPACE.n_keys, np.bool_)
OWN = [PoolSpec((layer,), 3, 0, 100 + layer) for layer in range(3)]
SHARED = [PoolSpec((0, 2), 6, 2, 100), PoolSpec((1,), 3, 0, 150)]


def full(name: PolicyName = "forecast", pools: Sequence[PoolSpec] = OWN) -> Policy:
    """Experts 0, 1, 2 of each layer have the slots, 0 first."""
    policy = POLICIES[name](Locations(SPACE, pools), DecayedCounts(SPACE.n_keys, 64.0))
    for expert in range(3):
        policy.enter(np.array([expert, 8 + expert, 16 + expert]), np.full(3, FREE))
    return policy


@pytest.mark.parametrize("name", ["lru", "slru", "lfru"])
def test_a_policy_without_forecasts_leaves_bids_to_its_own_values(name: PolicyName) -> None:
    """The one that leaves first is the same with bids, and must be below them."""
    moves = full(name).promote([5], NOBODY, Limits(np.full(1, 9.0)))
    assert [move.victim for move in moves] == [0]


def test_a_free_slot_and_a_pin_ask_for_no_worth() -> None:
    policy = full()
    policy.locations.leave(np.array([0]))
    policy.pin(np.array([12]))
    policy.worth = np.ones(SPACE.n_keys)
    moves = policy.promote([5, 6, 12], NOBODY, Limits(np.full(3, 0.1)))
    assert moves == [Move(1, 12, 8), Move(0, 5, FREE)], "the pinned one first"


@pytest.mark.parametrize(("budget", "expected"), [(0, []), (99, []), (100, [5]), (201, [5, 13]),
                                                  (302, [5, 13]), (303, [5, 13, 21])])  # fmt: skip
def test_copies_stay_within_the_budget_in_the_order_they_were_asked_for(
    budget: float, expected: list[int]
) -> None:
    moves = full().promote([5, 13, 21], NOBODY, Limits(budget_bytes=budget))
    assert [move.key for move in moves] == expected


def test_landed_ones_cost_nothing() -> None:
    moves = full().promote([5, 13, 21], NOBODY, Limits(budget_bytes=0, n_landed=2))
    assert [move.key for move in moves] == [5, 13]
    moves = full().promote([5, 13, 21], NOBODY, Limits(budget_bytes=-5, n_landed=2))
    assert [move.key for move in moves] == [5, 13], "an overdrawn budget is none"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_what_is_let_in_is_worth_it_affordable_and_nobody_needed_leaves(
    seed: int, shared: bool
) -> None:
    random = np.random.default_rng(seed)
    pools = SHARED if shared else OWN
    policy = full(pools=pools)
    for _ in range(12):
        values = random.random(SPACE.n_keys)
        needed = random.random(SPACE.n_keys) < 0.2
        policy.pin(np.flatnonzero(random.random(SPACE.n_keys) < 0.1))
        absent = np.flatnonzero(~policy.locations.resident)
        newcomers = random.permutation(absent)[: random.integers(0, 9)].tolist()
        budget, n_landed = float(random.integers(0, 600)), int(random.integers(0, 3))
        resident = policy.locations.resident
        policy.worth = values
        limits = Limits(values[newcomers], budget, n_landed)
        moves = policy.promote(newcomers, needed, limits)
        policy.check_integrity()
        assert len({move.key for move in moves}) == len(moves)
        assert {move.key for move in moves} <= set(newcomers)
        victims = [move.victim for move in moves if move.victim != FREE]
        assert len(set(victims)) == len(victims)
        assert resident[victims].all() and not needed[victims].any()
        for move in moves:
            assert policy.locations.pool_of[move.key] == move.pool
            if move.victim != FREE and not policy.locations.pins[move.key]:
                assert values[move.key] > values[move.victim]
        copied = [move for move in moves if move.key not in newcomers[:n_landed]]
        assert sum(pools[move.pool].slot_bytes for move in copied) <= budget
