"""The record of where experts are: every change, and Ctrl-C at every line of one."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vkmoe.experts.decide.keys import KeySpace
from vkmoe.experts.decide.locations import FREE, Locations
from vkmoe.experts.decide.settings import PoolSpec

SPACE = KeySpace(n_layers=3, n_experts=8)
POOLS = (PoolSpec((0, 2), 5, 0, 256), PoolSpec((1,), 3, 0, 1024))
N_LANDING = 2


def made(n_landing: int = N_LANDING) -> Locations:
    locations = Locations(SPACE, POOLS)
    locations.set_apart(n_landing)
    return locations


def enter(locations: Locations, *keys: int) -> None:
    """Into free slots, and there at once."""
    locations.enter(np.array(keys), np.full(len(keys), FREE))
    locations.arrive(list(keys))


def slots(locations: Locations, keys: list[int]) -> list[int]:
    return [locations.slot_of(key) for key in keys]


def test_an_expert_takes_the_slot_of_its_victim_and_is_there_when_it_arrives() -> None:
    locations = made()
    enter(locations, 0, 16, 8)
    before = locations.slot_of(16)
    locations.changed[:] = False
    locations.enter(np.array([17, 9]), np.array([16, FREE]))
    assert locations.slot_of(17) == before and [locations.n_free(0), locations.n_free(1)] == [3, 1]
    assert np.flatnonzero(locations.resident).tolist() == [0, 8, 9, 17]
    assert np.flatnonzero(locations.present).tolist() == [0, 8]
    assert np.flatnonzero(locations.changed).tolist() == [16], "nothing leads to the newcomers yet"
    locations.begin_copy([9, 17])
    assert locations.arriving.sum() == 2 and not locations.waiting().size
    locations.arrive([17])
    locations.leave([9])
    assert np.flatnonzero(locations.present).tolist() == [0, 8, 17]
    assert np.flatnonzero(locations.changed).tolist() == [9, 16, 17]
    locations.check_integrity()


def test_an_expert_that_landed_keeps_its_landing_slot_and_gives_its_layer_another() -> None:
    locations = made()
    enter(locations, 0)
    landing, victims = locations.landing.copy(), slots(locations, [0])
    locations.enter(np.array([1, 9]), np.array([0, FREE]))
    theirs = slots(locations, [1, 9])
    assert theirs[:1] == victims
    assert locations.land(np.array([1, 9]), np.array([1, 0])).tolist() == [1, N_LANDING]
    assert slots(locations, [1, 9]) == [landing[0, 1], landing[1, 0]]
    assert [locations.landing[0, 1], locations.landing[1, 0]] == theirs
    assert locations.are_present(np.array([1, 9])).all()
    locations.check_integrity()


def test_a_pin_ends_with_its_last_reason() -> None:
    locations = made()
    assert not locations.pin(np.array([1, 2, 3]), 1).size
    assert not locations.pin(np.array([3, 4]), 2).size
    assert locations.pin(np.array([2]), 1).tolist() == [1], "3 is still pinned by the other rule"
    assert np.flatnonzero(locations.pins).tolist() == [2, 3, 4]
    enter(locations, 2, 5, 8)
    assert locations.n_pinned.tolist() == [1, 0]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_random_changes_keep_every_slot_to_one_use(seed: int) -> None:
    rng = np.random.default_rng(seed)
    locations = made()
    for _ in range(30):
        absent = np.flatnonzero(~locations.resident)
        here = np.flatnonzero(locations.present)
        key = int(rng.choice(absent))
        pool = locations.pool_of[key]
        mine = here[locations.pool_of[here] == pool]
        if locations.n_free(pool):
            locations.enter(np.array([key]), np.array([FREE]))
        elif mine.size:
            locations.enter(np.array([key]), rng.choice(mine, 1))
        waiting = locations.waiting()
        locations.check_integrity()
        if waiting.size and rng.random() < 0.5:
            locations.land(waiting[:1], rng.integers(0, N_LANDING, 1))
        elif waiting.size and rng.random() < 0.8:
            locations.arrive(waiting)
        elif (here := np.flatnonzero(locations.present)).size:
            locations.leave(rng.choice(here, 1))
        locations.check_integrity()
        held = np.flatnonzero(locations.resident)
        rows = locations.holders(range(len(POOLS)))
        assert sorted(rows[rows < SPACE.n_keys].tolist()) == held.tolist()
