"""What was asked, planned and measured becomes how an expert cache works."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.experts.pins import named, warm
from tests.placement.invented_models import DENSE, N_USED, SPEC
from vkmoe.config import EngineConfig
from vkmoe.errors import UsageError
from vkmoe.experts.decide.settings import (
    CacheSettings,
    cache_settings,
    copies_overlap,
    make_pools,
)
from vkmoe.facts import MemoryPlan
from vkmoe.kv_types import both
from vkmoe.modes import AtHome, Cache, Resident

SPAN = 4096


def cached(*slots: int) -> MemoryPlan:
    return MemoryPlan(1024, both("f16"), Cache(), (), expert_slots=slots)


UNEVEN = cached(20, 20, 19)
RESIDENT = MemoryPlan(1024, both("f16"), Resident(), ())
AT_HOME = MemoryPlan(1024, both("f16"), AtHome(), ())


def settings_of(config: EngineConfig, plan: MemoryPlan, overlaps: bool = False) -> CacheSettings:
    return cache_settings(config, SPEC.name, SPEC.experts, plan, overlaps)


def settings(plan: MemoryPlan = UNEVEN, **asked: Any) -> CacheSettings:
    return settings_of(EngineConfig(**asked), plan)


def test_options_become_settings() -> None:
    made = settings(
        expert_policy="lfru", moe_warmpin=3, moe_warmpin_after=5, expert_resident_ids="7,2,9",
        moe_predict_prefetch=False,
    )  # fmt: skip
    assert made == CacheSettings("lfru", (named(7, 2, 9), warm(3, 5)), prefetches=False)


def test_what_is_forecast_is_fetched_ahead_unless_that_is_off() -> None:
    assert settings() == CacheSettings("forecast", prefetches=True, executor="fused")
    assert not settings(moe_predict_prefetch=False).prefetches
    assert settings(replace(UNEVEN, executor="stepped")).executor == "stepped"


def test_copies_beside_tokens_come_later() -> None:
    assert settings_of(EngineConfig(), UNEVEN, overlaps=True).lag == 2
    assert settings().lag == 1


def test_copies_overlap_tokens_where_there_is_a_queue_unless_told_otherwise() -> None:
    for has_queue in (False, True):
        assert copies_overlap(EngineConfig(), has_queue) == has_queue
        assert copies_overlap(EngineConfig(expert_copies="overlap"), has_queue)
        assert not copies_overlap(EngineConfig(expert_copies="wait"), has_queue)


def test_guesses_serve_a_small_host_pool_without_slots() -> None:
    plan = replace(AT_HOME, host_slots=(40,), executor="stepped")
    assert settings(plan, moe_warmpin=2) == CacheSettings("forecast", executor="stepped")


def test_as_many_as_a_token_uses_are_pinned_where_nothing_is_forecast() -> None:
    assert settings().pins == ()
    assert settings(expert_policy="lru").pins == (warm(N_USED),)
    assert settings(expert_policy="lru", moe_warmpin=0).pins == ()
    assert settings(moe_warmpin=2).pins == (warm(2),)


@pytest.mark.parametrize("plan", [RESIDENT, AT_HOME], ids=["device", "host"])
def test_without_slots_nothing_is_pinned(plan: MemoryPlan) -> None:
    config = EngineConfig(expert_policy="lru", moe_warmpin=2)
    assert settings_of(config, plan) == CacheSettings("lru")
    assert make_pools(plan.expert_slots, (SPAN,) * 3, N_USED, "layer") == ()


def test_ids_are_residents() -> None:
    assert settings(expert_resident_ids="7, 2,,7,").pins == (named(7, 2),)


@pytest.mark.parametrize("plan", [cached(20), AT_HOME, RESIDENT], ids=lambda p: p.mode.experts_in)
def test_an_id_the_model_does_not_have_is_named(plan: MemoryPlan) -> None:
    with pytest.raises(
        UsageError, match=r"--expert-resident-ids names expert 128; .*128"
    ) as caught:
        settings(plan, expert_resident_ids="127,128,3")
    assert caught.value.hint


def test_ids_of_a_model_without_experts_do_not_matter() -> None:
    config = EngineConfig(expert_resident_ids="500", expert_slots=3)
    assert cache_settings(config, DENSE.name, None, RESIDENT) == CacheSettings("forecast")
    assert make_pools(RESIDENT.expert_slots, (), 0, "layer") == ()


def test_more_residents_than_slots() -> None:
    asked: dict[str, Any] = {"expert_resident_ids": "0,1,2,3"}
    words = "the 4 experts of --expert-resident-ids do not fit in the 3 slots of a layer"
    with pytest.raises(UsageError, match=words):
        settings(cached(4, 3), **asked)
    assert settings(cached(4, 4), **asked).pins[0].n == 4
    assert settings(RESIDENT, **asked) == CacheSettings("forecast")
    with pytest.raises(UsageError, match="do not fit in the 0 slots") as caught:
        settings(AT_HOME, **asked)
    assert caught.value.hint == "there are no slots: leave that out"
    with pytest.raises(UsageError) as caught:
        settings(AT_HOME, expert_cache="1KiB", **asked)
    assert caught.value.hint == "there are no slots: give a larger --expert-cache"


def test_one_resident_is_one_expert() -> None:
    with pytest.raises(UsageError, match="the 1 expert of --expert-resident-ids does not fit"):
        settings(AT_HOME, expert_resident_ids="3")


def test_warm_pinning_needs_slots_that_residents_leave() -> None:
    asked: dict[str, Any] = {"expert_resident_ids": "0,1,2,3"}
    with pytest.raises(UsageError, match="--moe-warmpin 2 has no slots left") as caught:
        settings(cached(8, 8), moe_warmpin=2, **asked)
    assert "--expert-resident-ids" in str(caught.value) and caught.value.exit_code == 2
    for fine in ({}, {"moe_warmpin": 0}):
        assert settings(cached(8, 8), **fine, **asked).pins[0].n == 4


def test_one_slot_leaves_nothing_to_pin_unless_it_is_shared() -> None:
    with pytest.raises(UsageError, match="--moe-warmpin 2 has no slots left"):
        settings(cached(1, 1), moe_warmpin=2)
    assert settings(cached(1, 1), moe_warmpin=2, expert_allocation="global").pins == (warm(2),)
    by_default = settings(cached(1, 1), expert_policy="slru")
    assert by_default.pins == (warm(N_USED),), "by default it simply finds no room"


def test_layers_have_pools_of_their_own_or_share_those_of_their_size() -> None:
    plan, sizes = cached(5, 4, 4), (SPAN, 2 * SPAN, SPAN)
    own = make_pools(plan.expert_slots, sizes, N_USED, "layer")
    assert [(pool.layers, pool.capacity, pool.slot_bytes) for pool in own] == [
        ((0,), 5, SPAN), ((1,), 4, 2 * SPAN), ((2,), 4, SPAN)
    ]  # fmt: skip
    shared = make_pools(plan.expert_slots, sizes, N_USED, "global")
    assert [(pool.layers, pool.capacity, pool.slot_bytes) for pool in shared] == [
        ((0, 2), 9, SPAN), ((1,), 4, 2 * SPAN)
    ]  # fmt: skip
