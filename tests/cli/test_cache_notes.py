"""What a start says of options of the expert cache that do nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vkmoe.cli.cache_notes import cache_notes
from vkmoe.config import EngineConfig
from vkmoe.experts.decide.settings import size_cache
from vkmoe.facts import Allocation, ExpertMode, MemoryPlan

from .conftest import FakeLLM, Run

CACHED = MemoryPlan(64, "f16", ExpertMode("cache"), (), (9, 8), size_cache((9, 8), (1, 1), 32, 4))
RESIDENT = replace(CACHED, mode=ExpertMode("device"), expert_slots=())
AT_HOME = replace(CACHED, mode=ExpertMode("host"), expert_slots=())
DENSE = replace(RESIDENT, sizing=None)


def notes(plan: MemoryPlan, **asked: Any) -> list[str]:
    return cache_notes(EngineConfig(**asked), plan)


@pytest.mark.parametrize("plan", [CACHED, RESIDENT, AT_HOME, DENSE])
def test_defaults_need_no_note(plan: MemoryPlan) -> None:
    assert notes(plan) == []
    assert notes(plan, expert_policy="slru", expert_stats="s.txt", ctx_size=9) == []


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"expert_policy": "lru"}, "--expert-policy has no effect"),
        ({"moe_warmpin": 0, "expert_half_life": 9.0}, "--expert-half-life and --moe-warmpin have"),
        (
            {"expert_allocation": "global", "moe_warmpin": 1, "expert_resident_ids": "1"},
            "--expert-allocation, --moe-warmpin and --expert-resident-ids have no effect",
        ),
        (
            {"expert_resident_selection": "frequency", "expert_warmup_tokens": 3},
            "--expert-resident-selection and --expert-warmup-tokens have no effect",
        ),
        (
            {"expert_predictor": "frequency", "promote_on_read": True, "miss": "gather"},
            "--miss, --promote-on-read and --expert-predictor have no effect",
        ),
        (
            {"expert_admission": False, "moe_predict_prefetch": False, "expert_copies": "wait"},
            "--no-moe-predict-prefetch, --no-expert-admission and --expert-copies have no effect",
        ),
    ],
)
def test_where_nothing_moves_choices_have_no_effect(asked: dict[str, Any], words: str) -> None:
    for plan, reason in (
        (RESIDENT, "all 32 experts of each layer are on the device: "),
        (AT_HOME, "no expert has a slot: "),
        (DENSE, "the model has no experts: "),
    ):
        (line,) = notes(plan, **asked)
        assert line.startswith(reason + words)


def test_amounts_have_no_effect_without_experts_only() -> None:
    plan = replace(DENSE, sizing=size_cache((), (), 0, 0, "--expert-slots"))
    assert notes(plan, expert_slots=3) == ["the model has no experts: --expert-slots has no effect"]
    assert notes(RESIDENT, expert_slots=99) == [] == notes(AT_HOME, expert_cache="1KiB")


def test_what_the_plan_has_to_say_is_said() -> None:
    """As of --host-pool, which only the plan knows to be idle."""
    said = "--host-pool 8GiB has no effect: all experts are on the device"
    assert notes(replace(RESIDENT, notes=(said,)), host_pool="8GiB") == [said]


def test_a_pool_without_all_experts_says_so_and_lets_a_predictor_work() -> None:
    line = Allocation("host pool, 40 of 64 experts", "host", 3 << 20, "as --host-pool")
    plan = replace(
        AT_HOME, lines=(line,), host_slots=(40,), executor="stepped", executor_reason="it reads"
    )
    said = (
        "host pool, 40 of 64 experts, 3.0 MiB (as --host-pool); the executor is stepped: it reads"
    )
    asked: Any = {"expert_policy": "lru", "expert_half_life": 9.0}
    assert notes(plan, expert_predictor="frequency", moe_predict_prefetch=True, **asked) == [said]
    assert notes(plan, miss="gather")[1] == "no expert has a slot: --miss has no effect"


def test_one_queue_cannot_copy_beside_a_token() -> None:
    asked = EngineConfig(expert_copies="overlap")
    assert "take turns" in cache_notes(asked, CACHED, one_queue=True)[0]
    assert cache_notes(asked, CACHED) == cache_notes(EngineConfig(), CACHED, one_queue=True) == []


def test_only_a_model_without_experts_has_no_router_to_stop_at() -> None:
    assert notes(DENSE, executor="stepped")[0].endswith(": --executor has no effect")
    assert not any(notes(plan, executor="stepped") for plan in (RESIDENT, CACHED, AT_HOME))


def test_a_profile_is_counted_with_the_half_life_wherever_experts_are() -> None:
    assert notes(RESIDENT, expert_half_life=9.0, expert_profile="p.npz") == []


def test_a_warm_up_needs_the_selection_by_frequency() -> None:
    (line,) = notes(CACHED, expert_warmup_tokens=5)
    assert "frequency: --expert-warmup-tokens has no effect" in line
    more: Any = {"expert_resident_selection": "frequency", "expert_num_resident": 2}
    assert notes(CACHED, expert_warmup_tokens=5, **more) == []
    assert notes(CACHED, expert_policy="lru", moe_warmpin=2, expert_half_life=9.0) == []


def test_where_nobody_is_pinned_there_is_no_time_for_it() -> None:
    assert notes(CACHED, moe_warmpin=0, moe_warmpin_after=5, expert_warmup_tokens=5) == [
        "without --expert-resident-selection frequency: --expert-warmup-tokens has no effect",
        "with --moe-warmpin 0: --moe-warmpin-after has no effect",
    ]
    assert notes(CACHED, moe_warmpin_after=5) == notes(CACHED, moe_warmpin=0) == []


@pytest.mark.parametrize(
    ("asked", "begin"),
    [
        ({"expert_resident_selection": "first_n"}, "--expert-resident-selection takes all 8 slots"),
        (
            {"expert_resident_selection": "frequency"},
            "--expert-resident-selection takes all 8 slots of a layer after 4096 tokens",
        ),
        ({"expert_resident_ids": "1,2,3,4,5,6,7,8"}, "--expert-resident-ids takes all 8 slots"),
    ],
)
def test_residents_in_all_slots_of_a_layer(asked: dict[str, Any], begin: str) -> None:
    (line,) = notes(CACHED, **asked)
    assert line.startswith(begin) and line.endswith("no slot is left to follow the text")


def test_named_experts_may_leave_a_slot() -> None:
    ids = "1,2,3,4,5,6,7,8"
    assert notes(replace(CACHED, expert_slots=(9, 9)), expert_resident_ids=ids) == []


def test_residents_that_leave_a_slot() -> None:
    for n_resident, n_notes in ((7, 0), (8, 1)):
        asked: Any = {
            "expert_resident_selection": "first_n", "expert_num_resident": n_resident
        }  # fmt: skip
        assert len(notes(CACHED, **asked)) == n_notes
        assert notes(CACHED, expert_allocation="global", **asked) == [], "9 and 8 shared by two"


def test_a_start_says_it_unless_quiet(run: Run, fake: type[FakeLLM]) -> None:
    line = "the model has no experts: --moe-warmpin has no effect"
    assert run("generate", "-p", "x", "--moe-warmpin", "2").err.splitlines().count(line) == 1
    assert run("generate", "-p", "x", "--moe-warmpin", "2", "--quiet").err == ""
