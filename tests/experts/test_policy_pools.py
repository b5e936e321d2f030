"""Cache policies at the edges of size, and in pools that several layers share."""

from __future__ import annotations

import numpy as np
import pytest

from tests.experts.policy_pool import N_USED, PolicyPool, random_tokens
from vkmoe.experts.create import POLICIES
from vkmoe.experts.settings import PolicyName

CAPACITY = 8


@pytest.fixture(params=POLICIES)
def name(request: pytest.FixtureRequest) -> PolicyName:
    found: PolicyName = request.param
    return found


# ----- sizes -----


def test_adversarial_routing_at_top_k_slots_keeps_what_the_token_uses(name: PolicyName) -> None:
    """As many slots as a token uses, and every token wants others: no slot is taken twice."""
    pool = PolicyPool(name, N_USED)
    for keys in random_tokens(1, 300, n_experts=9):
        had = [key for key in keys if key in pool.policy]
        assert pool.token(keys) == len(had)
        assert set(pool.policy) == set(keys)
        pool.policy.check_integrity()


def test_one_slot_follows_the_tokens(name: PolicyName) -> None:
    pool = PolicyPool(name, 1)
    for keys in random_tokens(5, 100, n_experts=6):
        present = [key for key in keys if key in pool.policy]
        assert pool.token(keys) == len(present)
        assert list(pool.policy) == (present or [keys[0]]), "kept if used, else the most important"
        pool.policy.check_integrity()


@pytest.mark.parametrize("capacity", [64, 100])
def test_with_a_slot_for_everyone_each_misses_once(name: PolicyName, capacity: int) -> None:
    pool = PolicyPool(name, capacity)
    tokens = random_tokens(6, 400)
    assert N_USED * len(tokens) - pool.tokens(tokens) == len({key for t in tokens for key in t})
    pool.policy.check_integrity()


# ----- several layers in one pool -----


def test_a_layer_at_its_floor_loses_to_itself_only(name: PolicyName) -> None:
    """Layer 0 holds 2 of 8 slots and was used first, so it would lose them without a floor."""
    for floor, spared in ((0, False), (1, False), (2, True), (3, True)):
        pool = PolicyPool(name, CAPACITY, n_layers=3, n_experts=16, floor=floor)
        pool.tokens([key] for key in (0, 1, 16, 17, 18, 19, 20, 21))
        assert pool.policy.victim(2, ()) == 0, "its own newcomer"
        for newcomer in (22, 40):
            assert (pool.policy.victim(newcomer, ()) in (0, 1)) != spared, (floor, newcomer)


def test_nobody_leaves_where_all_other_layers_are_at_their_floor(name: PolicyName) -> None:
    pool = PolicyPool(name, CAPACITY, n_layers=3, n_experts=16, floor=4)
    pool.tokens([key] for key in (0, 16, 1, 17, 2, 18, 3, 19))
    assert pool.policy.victim(40, ()) is None
    assert pool.policy.victim(5, ()) == 0
    pool.policy.remove(1)
    assert pool.policy.victim(20, ()) == 16, "a layer below its floor loses nothing either"


def test_a_busy_layer_does_not_starve_the_others(name: PolicyName) -> None:
    floor = 2
    pool = PolicyPool(name, 12, n_layers=3, n_experts=16, floor=floor)
    pool.tokens([[0, 1], [16, 17], [32, 33]])
    rng = np.random.default_rng(7)
    for _ in range(200):
        pool.token(rng.choice(16, 4, replace=False).tolist())
    held = [pool.space.layer(key) for key in pool.policy]
    assert [held.count(layer) for layer in range(3)] == [12 - 2 * floor, floor, floor]
