"""Where experts are computed if that is left open: which modes come into question, which are
measured, what is remembered of that and when it holds no more."""

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
from vkmoe.placement.decide import Candidate, Choosing, Decision, decide
from vkmoe.placement.forecast.device_profiles import read_profile
from vkmoe.placement.forecast.speeds import Speeds
from vkmoe.placement.mode_choice import (
    ModeChoice,
    ModeQuestion,
    decide_with,
    known_choice,
    mode_question,
)

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


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that differ by 40 % are near enough to be measured."""
    monkeypatch.setattr(mode_choice, "MODEL_ERROR", 0.4)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where choices are remembered: nowhere yet."""
    need_cpu()
    modes = tmp_path / "modes"
    monkeypatch.setattr(
        remembered, "remembered_path", lambda device, what="tuning": modes / f"{device.name}.json"
    )
    return modes


def asked(profile: str | DeviceInfo, model: str = BIG, ram: int = ROOM, **options: Any) -> Any:
    device = profile if isinstance(profile, DeviceInfo) else cpu_info()
    speeds = Speeds()
    if isinstance(profile, str) and profile != "cpu":
        device, speeds = read_profile(profile).info, read_profile(profile).speeds
    config, choosing = EngineConfig(**options), Choosing(lambda: speeds)
    return mode_question(config, Described(model).file("Q4_K"), device, None, choosing, ram)


ALL = ("cache", "hybrid", "cpu")
QUESTIONS: dict[str, tuple[Any, dict[str, Any], tuple[str, ...], str, set[str]]] = {
    "half of the experts fit": ("rtx3060-12gb", {}, ALL, "cache", set()),
    "few fit": ("8gb-nobar", {}, ALL, "hybrid", set()),
    "next to none fits": (TINY_CARD, {"model": SMALL}, ALL, "hybrid", {"cpu", "hybrid"}),
    "slots that were asked for": ("8gb-nobar", {"expert_slots": 8}, ALL[:2], "hybrid", set()),
    "host memory is too small": ("8gb-nobar", {"ram": 12 * GIB}, ALL, "hybrid", set()),
    "shared memory": ("uma-32gb", {"model": SMALL}, ("resident", "cpu"), "resident", set()),
    "shaders on the CPU": (SOFTWARE, {"model": SMALL}, ("resident", "cpu"), "cpu", set()),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_modes_that_come_into_question_and_the_best(name: str) -> None:
    """Those whose times differ less than predictions err are measured: by less than 30 %."""
    profile, options, modes, best, close = QUESTIONS[name]
    found = asked(profile, **options)
    assert set(found.candidates) == set(modes) and found.predicted.mode == best
    assert set(found.close) == close
    with_slots = {"hybrid"} if name == "next to none fits" else {"cache", "hybrid"} & set(modes)
    assert {mode for mode, x in found.candidates.items() if x.plan.expert_slots} == with_slots
    times = [each.prediction.seconds for each in found.candidates.values()]
    assert times == sorted(times)


SETTLED: dict[str, tuple[Any, dict[str, Any]]] = {
    "all fit in a card's own memory": ("navi31", {"model": SMALL}),
    "the CPU is the device": ("cpu", {"model": SMALL}),
    "a mode was asked for": ("8gb-nobar", {"expert_mode": "cache"}),
    "layers were asked for": ("8gb-nobar", {"n_cpu_moe": 30}),
    "the CPU is ruled out": ("8gb-nobar", {"cpu_moe": False}),
    "ruled out by another option": ("8gb-nobar", {"host_pool": "20GiB"}),
    "no slot, as was asked": ("8gb-nobar", {"expert_cache": "1"}),
}


@pytest.mark.parametrize("name", SETTLED)
def test_nothing_is_to_be_chosen(name: str) -> None:
    profile, options = SETTLED[name]
    assert asked(profile, **options) is None


def test_small_models_are_not_worth_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mode_choice, "LEAST_EXPERTS", 18 * GIB)
    assert asked("8gb-nobar") is None


@pytest.mark.usefixtures("wide")
def test_what_reads_the_file_is_not_measured() -> None:
    """The first layers would not show what that costs."""
    found = asked("rtx3060-12gb")
    slow = replace(found.candidates["hybrid"].prediction, file_share=0.01)
    hybrid = replace(found.candidates["hybrid"], prediction=slow)
    assert found.close
    assert not replace(found, candidates={**found.candidates, "hybrid": hybrid}).close


def test_the_fastest_is_chosen_by_prompt_and_reply_of_the_whole_model() -> None:
    """As predicted, and corrected by what was measured; what was not is no choice."""
    question = asked("rtx3060-12gb")
    cache, hybrid = (question.candidates[mode].prediction for mode in ("cache", "hybrid"))
    assert cache.prompt_rate > 3 * hybrid.prompt_rate
    a_little_faster = 1.96 * hybrid.rate / cache.rate
    found = question.answer({"cache": 2.0, "hybrid": a_little_faster}, "2 of 48 layers")
    rates = f"cache {cache.rate / 2:.3g}, hybrid {cache.rate / 1.96:.3g} tok/s"
    assert found == ModeChoice("cache", f"measured of 2 of 48 layers: {rates}")
    found = question.answer({"cache": 2.0, "hybrid": 1.0}, "2 of 48 layers")
    assert found.mode == "hybrid" and "cpu" not in found.reason


def test_a_new_measurement_replaces_an_earlier_correction() -> None:
    """It is held against what bytes and speeds alone predict."""
    question, ratios = asked("rtx3060-12gb"), {"cache": 2.0, "hybrid": 1.0}
    machine = replace(question.decided.machine, corrections={"cache": 1.6, "hybrid": 0.8})
    slower = {
        mode: replace(x, prediction=replace(x.prediction, rate=x.prediction.rate / c))
        for mode, x in question.candidates.items()
        if (c := machine.correction(mode))
    }
    decided = replace(question.decided, machine=machine)
    corrected = replace(question, candidates=slower, decided=decided)
    assert corrected.answer(ratios, "some") == question.answer(ratios, "some")


def test_the_first_layers_of_the_cpu_are_a_choice_too() -> None:
    """Where the heaps of an APU hold all but some layers."""
    found = asked("uma-32gb", ram=read_profile("uma-32gb").available_host_bytes)
    choice = found.predicted
    assert choice.mode == "cpu" and 0 < (choice.cpu_layers or 0) < 48
    assert choice.asked(EngineConfig()) == EngineConfig(n_cpu_moe=choice.cpu_layers)


CACHE, HYBRID = ModeChoice("cache", "measured: cache"), ModeChoice("hybrid", "measured: hybrid")


def test_what_was_measured_is_remembered_of_each_model_and_its_options(folder: Path) -> None:
    card = asked("rtx3060-12gb")
    assert card.recall() is None
    card.remember(HYBRID, {})
    asked("rtx3060-12gb", threads=3).remember(CACHE, {})
    assert asked("rtx3060-12gb").recall() == HYBRID
    assert asked("rtx3060-12gb", threads=3).recall().mode == "cache"
    assert asked("rtx3060-12gb", vram_margin="600MiB").recall().mode == "hybrid"
    others = ({"vram_margin": "5GiB"}, {"threads": 2}, {"expert_policy": "lru"})
    assert not any(asked("rtx3060-12gb", **other).recall() for other in others)
    assert asked("8gb-nobar").recall() is None and len(list(folder.iterdir())) == 1
    card.remember(CACHE, {})
    assert card.recall().mode == "cache", "the newest measurement counts"


Change = Callable[[dict[str, Any]], object]
CHANGES: dict[str, Change] = {
    "driver": lambda it: it.update(driver="older"),
    "shaders": lambda it: it.update(shaders="0"),
    "vkmoe": lambda it: it.update(vkmoe="0.0.1"),
    "cpu": lambda it: it.update(cpu="another"),
    "model": lambda it: it.update(choices={"another": choice_of(it)}),
    "no mode": lambda it: choice_of(it).__setitem__(0, "teleport"),
    "no choice": lambda it: choice_of(it).pop(0),
    "no text": lambda it: choice_of(it).__setitem__(1, 7),
    "no entry": lambda it: it.update(choices=["cpu"]),
    "no list": lambda it: it.update(choices=7),
    "gone": lambda it: it.pop("choices"),
    "no correction": lambda it: it["corrections"].update(cache=0),
}


def choice_of(document: dict[str, Any]) -> list[Any]:
    """The only one that is remembered: mode and reason."""
    (found,) = document["choices"].values()
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.sample(6)
def test_what_does_not_fit_or_is_damaged_counts_as_never_measured(
    change: str, folder: Path
) -> None:
    question: ModeQuestion = asked("rtx3060-12gb")
    question.remember(HYBRID, {"hybrid": 2.0})
    (path,) = folder.iterdir()
    document = json.loads(path.read_text())
    CHANGES[change](document)
    path.write_text(json.dumps(document))
    assert question.recall() is None
    question.remember(HYBRID, {})
    assert question.recall() is not None, "it is written anew"
    path.write_bytes(b"[" * 100_000)
    assert question.recall() is None


def _slow(question: ModeQuestion) -> Candidate:
    """The plan of the mode hybrid, if a correction were learned that makes its tokens slow."""
    found = question.candidates["hybrid"]
    return replace(found, prediction=replace(found.prediction, rate=1.0))


@pytest.mark.usefixtures("wide")
def test_what_is_known_without_measuring() -> None:
    """The prediction, unless something was measured; with --tuning table the prediction alone."""
    config, question = EngineConfig(), asked("rtx3060-12gb")
    found = known_choice(question, config)
    assert found is not None and found.mode == "cache"
    assert found.reason.startswith("predicted: cache ") and found.reason.endswith("run measures")
    question.remember(HYBRID, {})
    assert known_choice(question, config) == question.recall() == HYBRID
    apart = replace(question, candidates={**question.candidates, "hybrid": _slow(question)})
    assert not apart.close and known_choice(apart, config) == HYBRID, "the answer stays the same"
    by_table = known_choice(question, EngineConfig(tuning="table"))
    assert by_table == question.predicted and "measure" not in str(by_table)
    clear = asked("8gb-nobar")
    assert known_choice(clear, config) == clear.predicted, "nothing is near enough to measure"
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
