"""How `vkmoe tune` chooses: what it tries, what it believes of invented times, what it measures."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.tiny import model_path
from tests.gpu.invented import AMD
from tools.synthetic.presets import PRESETS
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.facts import DeviceInfo
from vkmoe.gpu.device import Device
from vkmoe.kernels.launches import KernelClass, Launch, kernel_class
from vkmoe.kernels.tuning import Tuning, choose_tuning
from vkmoe.llm import demo_model_path
from vkmoe.models import open_model
from vkmoe.placement.remembered import Measured
from vkmoe.selftest import launches as launch_choice
from vkmoe.selftest.launches import _Tuner, candidates, choose, measure_launches
from vkmoe.selftest.matrices import (
    COMMON_TYPES,
    N_PARTIALS,
    MatrixWork,
    common_works,
    largest_of_each_class,
    works_of,
)

GPU = replace(
    AMD,
    subgroup_size=64,
    subgroup_range=(32, 64),
    takes_subgroup_size=True,
    features=AMD.features | {"int64"},
)
OLD, NEW, OTHER = Launch(64, 4), Launch(64, 8), Launch(64, 2)
WORK = MatrixWork("matvec", "Q8_0", 40, 256)


@pytest.mark.parametrize(
    ("old", "new", "wins"),
    [
        pytest.param([10, 10, 10, 10], [9, 9, 9, 9], True, id="clearly faster"),
        pytest.param([10, 10, 10, 10], [9.8, 9.8, 9.8, 9.8], False, id="within the margin"),
        pytest.param([10, 10, 10, 10], [11, 11, 11, 11], False, id="slower"),
        pytest.param([10, 10, 10, 10], [6, 9, 9, 12], False, id="it scatters"),
        pytest.param([7, 8, 12, 13], [9, 9, 9, 9], False, id="the table's scatters"),
        pytest.param([10, 10, 10, 10], [9] * 9 + [50], True, id="one that was interrupted"),
    ],
)
def test_a_newcomer_must_win_clearly(old: list[float], new: list[float], wins: bool) -> None:
    best, gain = choose({OLD: old, NEW: new}, OLD)
    assert best == (NEW if wins else OLD) and gain == pytest.approx(0.1 if wins else 0.0)


def test_the_fastest_of_several_wins() -> None:
    times = {OLD: [10.0] * 5, NEW: [8.0] * 5, OTHER: [7.0] * 5}
    best, gain = choose(times, OLD)
    assert best == OTHER and gain == pytest.approx(0.3)


def test_nothing_is_tried_that_the_device_or_the_law_forbids() -> None:
    device: Any = SimpleNamespace(info=GPU)
    table = choose_tuning(GPU)
    head = kernel_class("matvec", "Q6_K", 151936, 2048)
    assert candidates(table, head, device) == [
        Launch(64, 4), Launch(64, 1), Launch(64, 2), Launch(64, 8), Launch(32, 4), Launch(128, 4),
        Launch(64, 4, 32), Launch(64, 4, 64)]  # fmt: skip
    experts = kernel_class("expert_gate_up", "Q6_K", 6144, 2048)
    tried = candidates(table, experts, device)
    assert tried[0] == Launch(64, 4, 64) and all(launch.subgroup_size for launch in tried)
    assert Launch(64, 1, 64) not in tried and Launch(32, 4, 64) not in tried


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with Device(os.environ.get("VKMOE_DEVICE")) as opened:
        yield opened


def measured(device: Device) -> list[Measured | None]:
    return list(measure_launches(device, {WORK.kernel: WORK}, 60.0))


def test_what_is_chosen_agrees_with_its_twin(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other launch is the fastest here; what is wrong is neither timed nor chosen."""
    table = choose_tuning(device.info).table_launch(WORK.kernel)
    times: list[Launch] = []
    compared = Counter[tuple[Launch, bool]]()
    agreements = _Tuner._agreements
    wrong: set[tuple[Launch, bool]] = set()

    def noted(self: Any, kernel: KernelClass, launch: Launch, thorough: bool) -> Any:
        compared[launch, thorough] += 1
        yield from agreements(self, kernel, launch, thorough)
        yield (launch, thorough) not in wrong

    def fastest_last(found: dict[Launch, list[float]], _: Launch) -> tuple[Launch, float]:
        times[:] = found
        return [*found][-1], 0.5 if len(found) > 1 else 0.0

    monkeypatch.setattr(_Tuner, "_agreements", noted)
    monkeypatch.setattr(launch_choice, "choose", fastest_last)
    (found,) = measured(device)
    assert found is not None and found.best != table and found.table == table
    assert compared[found.best, False] == compared[found.best, True] == 1
    wrong = {(found.best, True)}  # one of the cases that only a winner gets
    (second,) = measured(device)
    assert second is not None and second.best != found.best
    wrong = {(found.best, False)}
    measured(device)
    assert found.best not in times
    wrong = {(table, False)}
    assert measured(device) == [None]


def test_no_class_is_begun_after_the_limit(device: Device) -> None:
    assert list(measure_launches(device, {WORK.kernel: WORK}, -1.0)) == []


def test_common_works_are_those_of_the_preset() -> None:
    model = PRESETS["qwen3-30b-a3b"]
    n_layers, width, inner = model.n_layers, model.hidden, model.expert_size
    heads, o_columns = model.n_heads + 2 * model.n_kv_heads, model.n_heads * model.head_size
    wanted = {MatrixWork("matvec", "F32", model.n_experts, width): n_layers}
    for kind in COMMON_TYPES:
        wanted |= {
            MatrixWork("matvec", kind, heads * model.head_size, width): n_layers,
            MatrixWork("matvec_residual", kind, width, o_columns): n_layers,
            MatrixWork("expert_gate_up", kind, inner, width, model.n_experts_used): n_layers,
            MatrixWork("expert_down", kind, width, inner, model.n_experts_used): n_layers,
            MatrixWork("matvec", kind, model.n_tokens, width): 1,
        }
    assert (common_works(), N_PARTIALS) == (wanted, width // 4)


def test_the_common_works_have_every_class_once_and_the_heaviest_first() -> None:
    works = largest_of_each_class(common_works())
    assert len(works) == 21 and next(iter(works)).family == "expert_gate_up"
    assert all(kernel == work.kernel for kernel, work in works.items())
    assert works[kernel_class("matvec", "F32", 128, 2048)].n_rows == 128


@pytest.mark.parametrize(
    "name", ["demo", "qwen2moe_plain", "deepseek2_v2", "deepseek2_v3", "gptoss_mxfp4", "dense_tied"]
)
def test_what_is_measured_of_a_model_is_what_its_programs_launch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = demo_model_path() if name == "demo" else model_path(name)
    with open_model(path) as model:
        wanted = set(largest_of_each_class(works_of(model)))
    asked: set[KernelClass] = set()
    launch = Tuning.launch

    def noted(self: Tuning, kernel: KernelClass) -> Launch:
        asked.add(kernel)
        return launch(self, kernel)

    monkeypatch.setattr(Tuning, "launch", noted)
    with Engine(path, EngineConfig(ctx_size=64)) as engine:
        engine.program()
    assert asked == wanted


@pytest.mark.parametrize("clock", [True, False], ids=["timestamps", "wall"])
@pytest.mark.parametrize(
    "work", [MatrixWork("matvec", "Q6_K", 24, 512), MatrixWork("expert_down", "MXFP4", 16, 256, 2)]
)
@pytest.mark.sample(2)
def test_a_gpu_is_measured_with_cold_caches_in_every_launch_it_allows(
    device: Device, work: MatrixWork, clock: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mapping of GPUs, which this driver runs too."""
    monkeypatch.setattr(DeviceInfo, "is_cpu", False)
    monkeypatch.setattr(launch_choice, "FLUSH_BYTES", 1 << 20)
    monkeypatch.setattr(launch_choice, "SECONDS", 0.0)
    tuner, timed = _Tuner(device), dict[Launch, list[float]]()

    def noted(times: dict[Launch, list[float]], table: Launch) -> tuple[Launch, float]:
        timed.update(times)
        return choose(times, table)

    monkeypatch.setattr(launch_choice, "choose", noted)
    tuner._timed &= clock
    try:
        assert tuner.measure(work.kernel, work) is not None
    finally:
        tuner.close()
    tried = candidates(choose_tuning(device.info), work.kernel, device)
    assert list(timed) == tried and len(tried) > 4 and tried[0] == Launch(64, 1)
    assert all(len(taken) >= 5 and min(taken) > 0 for taken in timed.values())
