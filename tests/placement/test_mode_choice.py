"""Where experts are computed if that is left open: which modes come into question, the rule, what
is remembered of a measurement and when it holds no more."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.invented import GIB, LAVAPIPE
from tests.needs import need_cpu
from tools.pipelines import Described
from vkmoe.config import EngineConfig
from vkmoe.cpu.device import cpu_info
from vkmoe.facts import DeviceInfo
from vkmoe.placement import mode_choice, remembered
from vkmoe.placement.forecast.device_profiles import read_profile
from vkmoe.placement.mode_choice import (
    ModeChoice,
    ModeQuestion,
    decide_with,
    known_choice,
    mode_question,
)
from vkmoe.placement.plan import Decision, decide

BIG, SMALL = "qwen3-30b-a3b", "olmoe-1b-7b"  # 17 and 4 GiB in Q4_K
ROOM = 40 * GIB  # of the host
SOFTWARE = replace(LAVAPIPE, heaps=(replace(LAVAPIPE.heaps[0], size=ROOM, budget=ROOM),))

_CARD = read_profile("8gb-nobar").info
TINY_CARD = replace(
    _CARD,
    heaps=tuple(
        replace(heap, size=GIB, budget=GIB) if heap.device_local and heap.size > GIB else heap
        for heap in _CARD.heaps
    ),
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where choices are remembered: nowhere yet."""
    need_cpu()
    modes = tmp_path / "modes"
    monkeypatch.setattr(
        remembered, "remembered_path", lambda device, what="": modes / f"{device.name}.json"
    )
    return modes


def asked(profile: str | DeviceInfo, model: str = BIG, ram: int = ROOM, **options: Any) -> Any:
    device = profile if isinstance(profile, DeviceInfo) else cpu_info()
    if isinstance(profile, str) and profile != "cpu":
        device = read_profile(profile).info
    config = EngineConfig(**options)
    return mode_question(config, Described(model).file("Q4_K"), device, None, ram)


QUESTIONS: dict[str, tuple[Any, dict[str, Any], set[str], str]] = {
    "half of the experts fit": ("rtx3060-12gb", {}, {"cache", "hybrid", "cpu"}, "cache"),
    "few fit": ("8gb-nobar", {}, {"cache", "hybrid", "cpu"}, "hybrid"),
    "none fits": (TINY_CARD, {"model": SMALL}, {"cache", "cpu"}, "cpu"),
    "slots that were asked for": ("8gb-nobar", {"expert_slots": 8}, {"cache", "hybrid"}, "hybrid"),
    "shared memory": ("uma-32gb", {"model": SMALL}, {"resident", "cpu"}, "resident"),
    "shaders on the CPU": (SOFTWARE, {"model": SMALL}, {"resident", "cpu"}, "cpu"),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_modes_that_come_into_question_and_the_rule(name: str) -> None:
    profile, options, modes, by_rule = QUESTIONS[name]
    found = asked(profile, **options)
    assert set(found.slots) == modes and found.by_rule.mode == by_rule
    with_slots = {"cache", "hybrid"} & modes if name != "none fits" else set()
    assert {mode for mode, n in found.slots.items() if n} == with_slots


SETTLED: dict[str, tuple[Any, dict[str, Any]]] = {
    "all fit in a card's own memory": ("navi31", {"model": SMALL}),
    "the CPU is the device": ("cpu", {"model": SMALL}),
    "a mode was asked for": ("8gb-nobar", {"expert_mode": "cache"}),
    "layers were asked for": ("8gb-nobar", {"n_cpu_moe": 30}),
    "the CPU is ruled out": ("8gb-nobar", {"cpu_moe": False}),
    "ruled out by another option": ("8gb-nobar", {"host_pool": "20GiB"}),
    "no slot, as was asked": ("8gb-nobar", {"expert_cache": "1"}),
    "host memory is too small": ("8gb-nobar", {"ram": 12 * GIB}),
}


@pytest.mark.parametrize("name", SETTLED)
def test_nothing_is_to_be_chosen(name: str) -> None:
    profile, options = SETTLED[name]
    assert asked(profile, **options) is None


def test_small_models_are_not_worth_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mode_choice, "LEAST_EXPERTS", 18 * GIB)
    assert asked("8gb-nobar") is None


@pytest.mark.parametrize(
    ("times", "mode"),
    [
        ({"cache": 5.0, "hybrid": 4.0, "cpu": 6.0}, "hybrid"),
        ({"cache": 5.0, "hybrid": 4.9, "cpu": 6.0}, "cache"),  # too little to be sure
        ({"cache": 5.0, "hybrid": 4.84, "cpu": 4.0}, "cpu"),
        ({"hybrid": 5.0, "cpu": 4.99}, "cpu"),  # the rule's one could not run
    ],
)
def test_another_mode_must_be_clearly_faster_than_that_of_the_rule(
    times: dict[Any, float], mode: str
) -> None:
    found = asked("rtx3060-12gb").answer(times, "2 of 48 layers")
    assert found.mode == mode
    assert f"measured of 2 of 48 layers: {mode} {times[mode]:.3g} ms" in found.reason
    assert all(f"{other} {time:.3g}" in found.reason for other, time in times.items())


TIMES = {"cache": 5.0, "hybrid": 3.0, "cpu": 6.0}


def test_what_was_measured_is_remembered_of_each_model_and_its_options(folder: Path) -> None:
    card = asked("rtx3060-12gb")
    assert card.recall() is None
    card.remember(TIMES, "2 of 48 layers")
    asked("rtx3060-12gb", threads=3).remember({**TIMES, "cpu": 1.0}, "2 of 48 layers")
    assert asked("rtx3060-12gb").recall() == card.answer(TIMES, "2 of 48 layers")
    assert asked("rtx3060-12gb", threads=3).recall().mode == "cpu"
    assert asked("rtx3060-12gb", vram_margin="600MiB").recall().mode == "hybrid"
    others = ({"vram_margin": "5GiB"}, {"threads": 2}, {"expert_predictor": "none"})
    assert not any(asked("rtx3060-12gb", **other).recall() for other in others)
    assert asked("8gb-nobar").recall() is None and len(list(folder.iterdir())) == 1
    card.remember({**TIMES, "hybrid": 9.0}, "1 of 48 layers")
    assert card.recall().mode == "cache", "the newest measurement counts"


Change = Callable[[dict[str, Any]], object]
CHANGES: dict[str, Change] = {
    "driver": lambda it: it.update(driver="older"),
    "shaders": lambda it: it.update(shaders="0"),
    "vkmoe": lambda it: it.update(vkmoe="0.0.1"),
    "cpu": lambda it: it.update(cpu="another"),
    "model": lambda it: it["modes"][0].update(model="another"),
    "no mode": lambda it: it["modes"][0]["times"].update(teleport=1.0),
    "no time": lambda it: it["modes"][0]["times"].update(cpu="soon"),
    "never": lambda it: it["modes"][0]["times"].update(cpu=0),
    "nothing": lambda it: it["modes"][0].update(times={}),
    "no numbers": lambda it: it["modes"][0].update(times=["cpu"]),
    "no text": lambda it: it["modes"][0].update(what=7),
    "no list": lambda it: it.update(modes=7),
    "gone": lambda it: it.pop("modes"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_does_not_fit_or_is_damaged_counts_as_never_measured(
    change: str, folder: Path
) -> None:
    question: ModeQuestion = asked("rtx3060-12gb")
    path = question.remember(TIMES, "2 of 48 layers")  # type: ignore[arg-type]
    document = json.loads(path.read_text())
    CHANGES[change](document)
    path.write_text(json.dumps(document))
    assert question.recall() is None
    question.remember(TIMES, "2 of 48 layers")  # type: ignore[arg-type]
    assert question.recall() is not None, "it is written anew"
    path.write_bytes(b"[" * 100_000)
    assert question.recall() is None


def test_what_is_known_without_measuring() -> None:
    """The rule, unless something was measured; with --tuning table the rule alone."""
    config, question = EngineConfig(), asked("8gb-nobar")
    found = known_choice(question, config)
    assert found is not None and found.mode == "hybrid"
    assert found.reason.endswith("of the experts have a slot; the first run measures")
    question.remember({**TIMES, "cpu": 1.0}, "2 of 48 layers")
    assert known_choice(question, config) == question.recall()
    by_rule = known_choice(question, EngineConfig(tuning="table"))
    assert by_rule == question.by_rule and "measure" not in str(by_rule)
    assert known_choice(None, config) is None


@pytest.mark.parametrize("mode", ["cache", "hybrid", "cpu"])
def test_a_plan_gives_the_reason_of_the_choice_and_names_no_option_as_one(mode: Any) -> None:
    profile, model = read_profile("8gb-nobar"), Described(BIG).file("Q4_K")
    free = profile.available_host_bytes

    def decided(asked: EngineConfig) -> Decision:
        return decide(asked, model, profile.info, available_host_bytes=free)

    made = decide_with(ModeChoice(mode, "it is best"), EngineConfig(), decided).plan
    assert (made.mode.name, made.mode_reason) == (mode, "it is best")
    reasons = [made.mode.reason, *(line.reason for line in made.lines)]
    assert not any("as --expert-mode" in reason for reason in reasons)
    assert decide_with(None, EngineConfig(), decided).plan.mode_reason == ""
