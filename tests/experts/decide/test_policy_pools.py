"""Cache policies in pools that several layers share, and in many pools."""

from __future__ import annotations

import numpy as np
import pytest

from tests.experts.policy_pool import PolicyPool, order
from vkmoe.choices import PolicyName
from vkmoe.experts.decide.keys import DecayedCounts, KeySpace
from vkmoe.experts.decide.locations import FREE, Locations
from vkmoe.experts.decide.policies import POLICIES
from vkmoe.experts.decide.settings import PoolSpec


@pytest.fixture(params=POLICIES)
def name(request: pytest.FixtureRequest) -> PolicyName:
    found: PolicyName = request.param
    return found


def test_a_busy_layer_does_not_starve_the_others(name: PolicyName) -> None:
    floor = 2
    pool = PolicyPool(name, 12, n_layers=3, n_experts=16, floor=floor)
    pool.tokens([[0, 1], [16, 17], [32, 33]])
    rng = np.random.default_rng(7)
    for _ in range(200):
        pool.token(rng.choice(16, 4, replace=False).tolist())
    held = [pool.space.layer(key) for key in pool.policy]
    assert [held.count(layer) for layer in range(3)] == [12 - 2 * floor, floor, floor]


@pytest.mark.parametrize("floor", [0, 2])
@pytest.mark.sample(3)
def test_many_newcomers_at_once_get_what_they_get_one_by_one(name: PolicyName, floor: int) -> None:
    rng = np.random.default_rng(8)
    for capacity in (1, 6, 9, 14):
        at_once, in_turn = (
            PolicyPool(name, capacity, n_layers=3, n_experts=8, floor=min(floor, capacity // 3))
            for _ in range(2)
        )
        for _ in range(60):
            keys = rng.choice(24, 6, replace=False).tolist()
            needed = keys[:3]
            for pool in (at_once, in_turn):
                pool.counts.use(np.array(needed))
                pool.policy.use(needed)
            absent = [key for key in keys if key not in in_turn.policy]
            moves = at_once.policy.all.promote(absent, at_once.policy.mask(needed))
            expected = []
            for key in absent:
                victim = in_turn.promote(key, [*needed, *absent])
                if key in in_turn.policy:
                    expected.append((key, FREE if victim is None else victim))
            assert [(move.key, move.victim) for move in moves] == expected
            pinned = int(rng.integers(24))
            for pool in (at_once, in_turn):
                change = pool.policy.unpin if pool.policy.is_pinned(pinned) else pool.policy.pin
                change(pinned)
                pool.policy.check_integrity()
                pool.counts.advance()
            assert list(at_once.policy) == list(in_turn.policy)


def test_pools_side_by_side_are_pools_alone(name: PolicyName) -> None:
    """Five layers in three pools, one of them of layers that are no neighbours; one has none."""
    space, counts = KeySpace(5, 16), DecayedCounts(80, 32.0)
    specs = [PoolSpec((0, 3), 9, 2, 256), PoolSpec((1,), 8, 0, 512), PoolSpec((4,), 5, 0, 256)]
    together = POLICIES[name](Locations(space, specs), counts)
    alone = [POLICIES[name](Locations(space, [spec]), counts) for spec in specs]
    rng = np.random.default_rng(9)
    for token in range(80):
        experts = [rng.choice(16, 4, replace=False) + 16 * layer for layer in (0, 1, 3, 4)]
        keys = np.stack(experts, axis=1).reshape(-1)
        counts.use(keys)
        needed = np.zeros(80, np.bool_)
        needed[keys] = True
        moves = together.promote(together.use(keys).tolist(), needed)
        found = [(move.key, move.victim) for move in sorted(moves, key=lambda move: move.pool)]
        expected = []
        for index, policy in enumerate(alone):
            ours = keys[together.locations.pool_of[keys] == index]
            moves = policy.promote(policy.use(ours).tolist(), needed)
            expected += [(move.key, move.victim) for move in moves]
        assert found == expected
        if token % 7 == 3:
            for policy in (together, *alone):
                mine = keys[:3][policy.locations.pool_of[keys[:3]] >= 0]
                pinned = np.flatnonzero(policy.locations.pins)
                policy.pin(np.union1d(pinned, mine) if token % 2 else np.setdiff1d(pinned, mine))
        together.check_integrity()
        for index, policy in enumerate(alone):
            assert order(together, index) == order(policy, 0)
        counts.advance()
