"""Where experts are computed if that is left open: measured once, remembered, then run."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.cpu_turns import listed_turns
from tests.engine.tiny import model_path
from tests.needs import need_cpu
from vkmoe import mode_trial
from vkmoe.choices import ModeName
from vkmoe.cli.notes import opened
from vkmoe.config import EngineConfig
from vkmoe.devices import choose_device, list_devices, open_device
from vkmoe.engine import Engine
from vkmoe.errors import DeviceLostError, OutOfMemoryError
from vkmoe.experts.records.timing import Computing
from vkmoe.llm import LLM, demo_model_path
from vkmoe.mode_trial import first_layers, measure_modes
from vkmoe.models import open_model
from vkmoe.placement import mode_choice, remembered
from vkmoe.placement.decide import Choosing
from vkmoe.placement.forecast import measured
from vkmoe.placement.forecast.measured import Known, recall_speeds

pytestmark = pytest.mark.usefixtures("one_device")

SLOTS: dict[str, Any] = {"device": "vulkan", "expert_slots": 4, "ctx_size": 64}  # cache or hybrid
SHARED: dict[str, Any] = {"device": "vulkan", "ctx_size": 64}  # all fit: resident or cpu


@pytest.fixture(autouse=True)
def any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models are chosen for, too, in a short time, and nothing is remembered yet."""
    need_cpu()
    monkeypatch.setattr(mode_trial, "WARM_SECONDS", 0.1)
    monkeypatch.setattr(mode_trial, "SECONDS", 0.1)
    monkeypatch.setattr(mode_choice, "LEAST_EXPERTS", 1)
    monkeypatch.setattr(mode_choice, "MODEL_ERROR", 1e9)  # all are near enough to be measured
    monkeypatch.setattr(
        remembered, "remembered_path", lambda device, what="tuning": tmp_path / f"{what}.json"
    )


@pytest.mark.parametrize(("options", "modes"), [(SLOTS, "cache hybrid"), (SHARED, "resident cpu")])
def test_modes_are_measured_once_and_the_choice_is_kept(
    options: dict[str, Any], modes: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vkmoe")
    with LLM(**options) as llm:
        chosen, reason = llm.plan.mode.name, llm.plan.mode_reason
    assert chosen in modes.split() and reason.startswith("measured of 2 of 6 layers: ")
    assert all(f"{mode} " in reason for mode in modes.split())
    assert sum(x.startswith("measuring where") for x in caplog.messages) == 1
    with LLM(**options) as llm:
        assert (llm.plan.mode.name, llm.plan.mode_reason) == (chosen, reason)
    assert sum(x.startswith("measuring where") for x in caplog.messages) == 1
    with LLM(tuning="table", **options) as llm:
        assert "measured" not in llm.plan.mode_reason


@pytest.mark.parametrize(
    ("mode", "options"),
    [("cache", SLOTS), ("hybrid", SLOTS), ("resident", SHARED), ("cpu", SHARED)],
)
@pytest.mark.sample(2)
def test_the_line_at_the_start_tells_which_mode_runs_and_why(
    mode: ModeName,
    options: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the counters: which experts the CPU computed, and which were found on the device."""
    modes = ("cache", "hybrid") if options is SLOTS else ("resident", "cpu")
    ratios = {other: 1.0 if other == mode else 1e6 for other in modes}
    monkeypatch.setattr(mode_trial, "measure_modes", lambda *given: ratios)
    turns = listed_turns(monkeypatch)
    with opened(None, EngineConfig(**options), verbose=False, quiet=False) as llm:
        llm.generate("def f(x):", max_tokens=6, temp=0, ignore_eos=True)
        assert llm.engine.profiler is not None
        tally = llm.engine.profiler.served().total
        rate = llm.engine.prediction.rate  # which is corrected by 1
        assert llm.plan.mode.name == mode
    (line,) = (x for x in capsys.readouterr().err.splitlines() if x.startswith("experts: "))
    assert line.startswith(f"experts: {mode}, ")
    assert f"(measured of 2 of 6 layers: {mode} {rate:.3g}, {_other(modes, mode)} " in line
    assert bool(turns) == (mode in ("hybrid", "cpu"))
    share = tally.n_hits / tally.n_uses
    assert {"resident": share == 1, "cpu": share == 0}.get(mode, 0 < share < 1)


def _other(modes: tuple[str, str], mode: str) -> str:
    return next(other for other in modes if other != mode)


def test_a_mode_that_cannot_be_loaded_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vkmoe")

    def refused(part: Any, config: EngineConfig, progress: Any) -> Engine:
        if config.expert_mode == without:
            part.close()
            raise OutOfMemoryError("no room", "try less")
        return Engine(part, config, progress)

    monkeypatch.setattr(mode_trial, "Engine", refused)
    for without, reason in (("cache", "measured of"), ("hybrid", "predicted: hybrid")):
        with LLM(**SLOTS) as llm:  # the best by prediction, which may have room where it is alone
            assert llm.plan.mode.name == "hybrid" and llm.plan.mode_reason.startswith(reason)
        assert f"mode {without} cannot be measured: no room" in caplog.messages
    n_trials = sum(text.startswith("measuring where") for text in caplog.messages)
    assert n_trials == 2, "none is remembered"


def test_a_device_that_fails_in_the_trial_leaves_the_prediction(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lost(*given: Any, **named: Any) -> None:
        raise DeviceLostError("the device is lost", "")

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "run_token", lost)
        with LLM(**SLOTS) as llm:
            assert llm.plan.mode_reason.startswith("predicted: ")
    assert "cannot be measured: the device is lost" in caplog.text
    with LLM(**SLOTS) as llm:
        assert llm.plan.mode_reason.startswith("measured"), "nothing was remembered"


def test_what_a_trial_found_corrects_predictions_and_speeds_are_measured_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all models on this device; the speeds of memory are remembered, too."""
    caplog.set_level(logging.INFO, "vkmoe")
    ratios = {"cache": 3.5, "hybrid": 0.5}
    monkeypatch.setattr(mode_trial, "measure_modes", lambda *given: ratios)
    LLM(**SLOTS).close()
    device = choose_device(list_devices(), "vulkan")
    known = recall_speeds(device, demo_model_path())
    assert known.corrections == {"cache": 3.5, "hybrid": 0.5} and known.measured
    config = EngineConfig(**SLOTS)
    with open_model(demo_model_path()) as model:
        plain = Choosing(lambda: known.speeds)
        found = [
            mode_choice.mode_question(config, model, device, None, choosing)
            for choosing in (plain, replace(plain, corrections=known.corrections))
        ]
    rates = [question.candidates["cache"].prediction.rate for question in found if question]
    assert rates[0] == pytest.approx(3.5 * rates[1])
    with Engine(demo_model_path(), EngineConfig(expert_mode="cache", **SLOTS)) as engine:
        run = engine.prediction
    assert 1 / run.rate > 3.4 * run.layer_seconds, "a run goes by corrections, too"
    LLM(**SLOTS).close()
    assert sum(x.startswith("measuring how fast") for x in caplog.messages) == 1
    apart = replace(device, type="discrete")
    assert recall_speeds(apart, demo_model_path()) == Known(), "its memory is another's"
    remembered.remembered_path(device, "speeds").write_text("{}")
    assert recall_speeds(device, demo_model_path()) == Known(), "damaged: never measured"


def test_shaders_on_a_cpu_are_timed_rather_than_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """They reach a small part of what the CPU reads; how small differs from CPU to CPU."""
    monkeypatch.setattr(measured, "measure_memory", lambda device: 5e8)
    with open_device("vulkan", False, None) as device:
        speeds = measured.measure_speeds(device, demo_model_path())
    assert speeds.device == 5e8 < speeds.host
    with Engine(demo_model_path(), EngineConfig(**SHARED)) as engine:
        found = engine.prediction
    assert 1 / found.rate == pytest.approx((found.bytes.trunk + found.bytes.experts) / 5e8)


def test_a_short_context_is_walked_again() -> None:
    """A model may know fewer positions than there are rounds."""
    config, device = EngineConfig(**SLOTS), choose_device(list_devices(), "vulkan")
    with open_model(demo_model_path()) as model:
        question = mode_choice.mode_question(config, model, device)
        assert question is not None
        few = replace(model, spec=replace(model.spec, context_length=6))
        ratios = measure_modes(few, config, question, [3, 4])
    assert set(ratios) == {"cache", "hybrid"} and min(ratios.values()) > 0


def test_a_trial_is_held_against_a_prediction_without_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it decodes. Of so few layers reading the output matrix would be much of the time."""
    device = choose_device(list_devices(), "vulkan")

    def as_predicted(arm: Any) -> float:
        found, speeds = arm._engine.prediction, recall_speeds(device, demo_model_path()).speeds
        assert found.bytes.head > 0.05 * (found.bytes.trunk + found.bytes.experts)
        seconds: float = 1 / found.rate - found.bytes.head / speeds.device
        return seconds

    monkeypatch.setattr(mode_trial._ModeArm, "seconds", as_predicted)
    LLM(**SLOTS).close()
    found = recall_speeds(device, demo_model_path()).corrections
    assert found == pytest.approx({"cache": 1.0, "hybrid": 1.0})


@pytest.mark.parametrize(("intervals", "least", "most"), [([(5, 400_005)] * 2, 4e-4, 4e-4),
                                                          ([], 2e-3, 1.0)])  # fmt: skip
def test_a_trial_leaves_out_what_a_token_takes_for_any_number_of_layers(
    intervals: list[tuple[int, int]], least: float, most: float
) -> None:
    """Submitting and waiting; where the device tells no times, all of it counts."""
    engine = Mock(ctx_size=64, prediction=Mock(layer_seconds=1e-4))
    engine.run_token.side_effect = lambda *given, **named: time.sleep(0.002)
    engine.computing.return_value = Computing(intervals, 2, 0, 0)
    arm = mode_trial._ModeArm(engine, [1] * 64)
    assert least <= arm.seconds() <= most and engine.run_token.call_count == mode_trial.N_TOKENS


def test_the_first_layers_of_a_model_are_those_up_to_the_last_with_experts() -> None:
    """Layers before them that have none are kept: what comes behind them reads what they make."""
    with open_model(model_path("deepseek2_lite")) as model:
        n_before = model.spec.moe_layers[0]
        assert n_before > 0
        part = first_layers(model, 1)
        assert part.spec.layers == model.spec.layers[: n_before + 1]
        assert part.tensors.layers == model.tensors.layers[: n_before + 1]
        assert first_layers(model, 99).spec == model.spec
