"""Who is in a host pool smaller than the model, without a GPU or a file."""

from __future__ import annotations

import numpy as np
import pytest

from vkmoe.choices import PolicyName
from vkmoe.experts.decide.keys import DecayedCounts, KeySpace
from vkmoe.experts.decide.locations import FREE
from vkmoe.experts.decide.residency import PoolResidency
from vkmoe.experts.decide.settings import PoolSpec

SPACE = KeySpace(n_layers=2, n_experts=6)


@pytest.mark.parametrize("policy", ["lru", "slru", "lfru"])
@pytest.mark.parametrize("n_kept", [0, 1, 2])
@pytest.mark.parametrize("n_twice", [0, 1, 2])
def test_who_comes_never_leaves_for_another_of_the_same_call(
    policy: PolicyName, n_twice: int, n_kept: int
) -> None:
    """Guessed experts, whom nobody keeps, where some of the pool also have a device slot."""
    counts = DecayedCounts(SPACE.n_keys, half_life=8)
    pools = (PoolSpec((0, 1), 4, 0, 256),)
    residency = PoolResidency(SPACE, pools, policy, counts)
    nobody = np.zeros(SPACE.n_keys, np.bool_)
    residency.locations.arrive([move.key for move in residency.bring([0, 1, 2, 3], nobody, nobody)])
    in_slots, kept = nobody.copy(), nobody.copy()
    in_slots[:n_twice] = True
    kept[4 - n_kept : 4] = True
    moves = residency.bring([6, 7, 8, 9], kept, in_slots)
    coming, leaving = [move.key for move in moves], [move.victim for move in moves]
    assert coming == [6, 7, 8, 9][: 4 - n_kept] and FREE not in leaving
    assert set(leaving) == set(range(4 - n_kept)) and leaving[:n_twice] == [0, 1][:n_twice]
    residency.check_integrity()
    residency.locations.arrive(coming)
    residency.check_integrity()
    assert set(np.flatnonzero(residency.locations.present)) == {*coming, *range(4 - n_kept, 4)}


@pytest.mark.parametrize("policy", ["lru", "slru", "lfru"])
@pytest.mark.parametrize("floor", [0, 1, 2])
@pytest.mark.parametrize("layer", [0, 1])
def test_as_many_find_room_at_once_as_is_said(policy: PolicyName, floor: int, layer: int) -> None:
    """Whoever was there before, even if none of them has a device slot."""
    for n_before in range(6):
        counts = DecayedCounts(SPACE.n_keys, half_life=8)
        residency = PoolResidency(SPACE, (PoolSpec((0, 1), 5, floor, 256),), policy, counts)
        nobody = np.zeros(SPACE.n_keys, np.bool_)
        keys = [*SPACE.keys(0)[:n_before], *SPACE.keys(1)[: 5 - n_before]]
        residency.bring(keys, nobody, nobody)
        residency.locations.arrive(keys)
        assert residency.n_at_once == 5 - floor
        wanted = SPACE.keys(layer)[-residency.n_at_once :]
        kept = nobody.copy()
        kept[wanted] = True
        absent = [key for key in wanted.tolist() if not residency.locations.resident[key]]
        assert [move.key for move in residency.bring(absent, kept, nobody)] == absent
        residency.check_integrity()
