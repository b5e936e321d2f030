"""Where missed experts land or are gathered: beside the slots, or as a part of their size."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.invented import DISCRETE_12, GIB, MIB
from tests.models.changed_specs import with_experts
from vkmoe.facts import READ_IN_PLACE, ExpertMode, MemoryPlan, WeightBytes
from vkmoe.placement.memory import device_budget

from .invented_models import MIXED, N_USED, SPEC, WEIGHTS, planned

PROMOTE, GATHER = ExpertMode("cache", promote=True), ExpertMode("cache", "gather", promote=True)
one_and_two_sizes = pytest.mark.parametrize("weights", [WEIGHTS, MIXED], ids=["one", "two sizes"])


def bytes_of(made: MemoryPlan, item: str) -> int:
    (found,) = (line.n_bytes for line in made.lines if line.item.startswith(item))
    return found


@one_and_two_sizes
@pytest.mark.parametrize("mode", [PROMOTE, GATHER], ids=["promote", "gather"])
def test_landing_slots_come_on_top_of_slots_asked_for(
    weights: WeightBytes, mode: ExpertMode
) -> None:
    plain, made = (
        planned(DISCRETE_12, weights, mode=w, expert_slots=9) for w in (READ_IN_PLACE, mode)
    )
    assert plain.expert_slots == made.expert_slots == (9,) * 48
    assert (plain.landing_slots, made.landing_slots) == (0, 2)
    assert bytes_of(made, "expert slots") == bytes_of(plain, "expert slots")
    landing = bytes_of(made, "landing slots, 2 in each layer")
    assert abs(landing - 2 * sum(weights.spans)) < MIB
    assert bool(made.layout("gathered experts").runs) == (mode is GATHER)
    if mode is GATHER:
        gathered = bytes_of(made, f"gathered experts, {N_USED} at a time")
        assert 0 <= gathered - N_USED * max(weights.spans) < MIB


@one_and_two_sizes
@pytest.mark.parametrize("asked", [{}, {"expert_cache": "3GiB"}], ids=["left over", "3 GiB"])
@pytest.mark.parametrize("mode", [PROMOTE, GATHER], ids=["promote", "gather"])
def test_landing_slots_are_a_part_of_a_size(
    weights: WeightBytes, asked: dict[str, Any], mode: ExpertMode
) -> None:
    """Two slots fewer in each layer, where nothing is gathered."""
    plain, made = (planned(DISCRETE_12, weights, mode=w, **asked) for w in (READ_IN_PLACE, mode))
    assert made.total("device") <= device_budget(DISCRETE_12, 40 * GIB)
    both = bytes_of(made, "expert slots") + bytes_of(made, "landing slots")
    if asked:
        assert both <= 3 * GIB
    n_fewer = sum(plain.expert_slots) - sum(made.expert_slots)
    n_expected = 2 * 48 + (N_USED if mode is GATHER and not asked else 0)
    assert n_expected - 2 <= n_fewer <= n_expected + 4


@pytest.mark.parametrize("mode", [PROMOTE, GATHER], ids=["promote", "gather"])
def test_a_layer_has_no_more_landing_slots_than_a_token_uses_experts(mode: ExpertMode) -> None:
    one = with_experts(SPEC, n_used=1)
    made = planned(DISCRETE_12, mode=mode, spec=one, expert_slots=9)
    landing = bytes_of(made, "landing slots, 1 in each layer")
    assert made.landing_slots == 1 and abs(landing - sum(WEIGHTS.spans)) < MIB


def test_without_room_for_slots_there_is_nowhere_to_land() -> None:
    made = planned(DISCRETE_12, expert_cache="400MiB", mode=GATHER)
    assert (made.mode.experts_in, made.landing_slots) == ("host", 0)
    assert not made.layouts("gathered experts")
    assert "beside 2 to land in" in made.lines[-1].reason
    assert planned(DISCRETE_12, expert_cache="400MiB").expert_slots[-1] == 2
