"""What is compared when, what is remembered, and what a user is told."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.canary.conftest import Modules
from tests.canary.faults import F_MUL, F_SUB, Fault, faults
from tests.conftest import Lend
from tests.engine.tiny import model_path
from tests.models.invented import TUNINGS
from tests.needs import need_cpu
from vkmoe.canary import check
from vkmoe.canary.check import passing, state_of
from vkmoe.canary.programs import Comparison, Pipeline, comparisons
from vkmoe.cli import main
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.errors import DeviceLostError, GpuError, MiscompiledError
from vkmoe.gpu.device import Device, spirv_words
from vkmoe.gpu.runner import Runner
from vkmoe.kernels.comparison import Checks
from vkmoe.kernels.launches import KernelClass, Launch, Tile
from vkmoe.kernels.tuning import Tuning, choose_tuning, plainer
from vkmoe.llm import LLM
from vkmoe.models import ModelFile, open_model
from vkmoe.placement.decide import Decision, decide

MODEL, OTHER = "moe_odd", "olmoe_one_kv_head"


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that are compared, in order."""
    names: list[str] = []
    results = check._Search._compare

    def noting(search: Any, unknown: Sequence[Comparison]) -> None:
        names.extend(name for each in unknown for name in each.variants)
        results(search, unknown)

    monkeypatch.setattr(check._Search, "_compare", noting)
    return names


def load(name: str = MODEL, **options: Any) -> Tuning:
    """Load a model, and return the tuning that it runs with."""
    with Engine(model_path(name), EngineConfig(**options)) as engine:
        return engine.tuning


def run(tuning: Tuning | None = None) -> tuple[Tuning, bytes]:
    """Run a prompt and a token; return the tuning, and the bits of the logits."""
    with Engine(model_path(MODEL), EngineConfig(), tuning=tuning) as engine:
        engine.run_prompt(range(20))
        engine.run_tokens([7], 20)
        return engine.tuning, engine.full_logits().tobytes()


def decision_of(device: Device, tuning: Tuning | None = None) -> Decision:
    with open_model(model_path(MODEL)) as model:
        return decide(EngineConfig(), model, device.info, tuning)


def fault_in(variant: str, opcode: int) -> Fault:
    """One that swaps the first instruction of a kind with another."""
    what = f"opcode {opcode} swapped"
    return next(each for each in faults(spirv_words(variant)) if each.what == what)


# ----- what is remembered -----


def test_kernels_are_compared_once(
    one_device: None, canary: None, memory: Path, compared: list[str]
) -> None:
    """Another model has kernels of its own, and of those it shares no one is compared again."""
    load()
    first = list(compared)
    assert {"finish", "router_topk"} <= set(first) and len(first) > 20
    load()
    assert compared == first
    load(OTHER)
    more = compared[len(first) :]
    assert more and "finish" not in more


@pytest.mark.parametrize("refused", [False, True])
def test_where_kernels_compile_as_they_run_each_core_has_a_device(
    one_device: None, canary: None, memory: Path, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """Where the driver opens no other one, all are compared on the first."""
    used, opened = set[Device](), list[Device]()
    result, another = check._Search._result, Device.another

    def noting(search: Any, compared: Comparison, device: Device) -> Any:
        used.add(device)
        return result(search, compared, device)

    def opening(device: Device) -> Device:
        if refused:
            raise GpuError("no other device", "")
        opened.append(another(device))
        return opened[-1]

    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(check._Search, "_result", noting)
    monkeypatch.setattr(Device, "another", opening)
    load()
    (first,) = used.difference(opened)
    assert len(opened) == (2 if first.info.is_cpu and not refused else 0)
    assert used == {first, *opened}
    for each in opened:
        with pytest.raises(RuntimeError, match="closed"):
            each.native.recorder()


def test_what_takes_long_is_told_once(
    one_device: None,
    canary: None,
    memory: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check, "LONG_S", 0.0)
    with caplog.at_level(logging.INFO, "vkmoe"):
        load()
        load()
    lines = [x.getMessage() for x in caplog.records if "comparing" in x.getMessage()]
    assert len(lines) == 1 and "once for each driver: 1 of " in lines[0]


def test_nothing_is_compared_where_it_is_not_wanted(
    one_device: None, canary: None, memory: Path, compared: list[str]
) -> None:
    load(canary=False)
    assert not compared and not memory.exists()


def test_no_kernel_of_threads_is_compared(canary: None, memory: Path, compared: list[str]) -> None:
    """No driver compiles these: they come compiled with vkmoe."""
    need_cpu()
    load(device="cpu")
    assert not compared and not memory.exists()


DAMAGED = (b"", b"{", b'{"kernels": 3}', b"\xff" * 99, b"[" * 99_999)


@pytest.mark.parametrize("data", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_file_is_written_anew(
    data: bytes, one_device: None, canary: None, memory: Path, compared: list[str]
) -> None:
    memory.write_bytes(data)
    load()
    n_compared = len(compared)
    load()
    assert n_compared > 20 and len(compared) == n_compared
    assert len(json.loads(memory.read_bytes())["kernels"]) >= n_compared


def test_a_file_that_cannot_be_written_costs_time_alone(
    one_device: None, canary: None, memory: Path, compared: list[str]
) -> None:
    memory.mkdir()  # a folder is in its place
    load()
    n_compared = len(compared)
    load()
    assert len(compared) == 2 * n_compared > 40


def test_another_driver_is_compared_anew(one_device: None, lend_device: Lend, memory: Path) -> None:
    with lend_device() as device, open_model(model_path(MODEL)) as model:
        made = passing(
            device,
            model,
            choose_tuning(device.info),
            lambda tuning: decide(EngineConfig(), model, device.info, tuning),
        )
        state = state_of(device.info, model, made)
        assert state.n_passed == state.n_kernels > 20
        info = device.info
        for other in (replace(info, driver_info="99.9"), replace(info, name="another card")):
            assert state_of(other, model, made).n_passed == 0


def test_models_may_load_at_the_same_time(
    one_device: None, canary: None, memory: Path, lend_device: Lend
) -> None:
    """Both remember what has passed, in one file."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(load, (MODEL, OTHER)))
    with lend_device() as device:
        for name in (MODEL, OTHER):
            with open_model(model_path(name)) as model:
                state = state_of(device.info, model, decide(EngineConfig(), model, device.info))
                assert state.n_passed == state.n_kernels


# ----- kernels that are wrong -----


def test_a_device_is_refused_with_what_to_do(
    one_device: None, canary: None, memory: Path, modules: Modules, lend_device: Lend
) -> None:
    """There is no other kernel that joins the largest logits."""
    load()
    variant = "candidates_merge"
    with lend_device() as device, modules.planted(variant, fault_in(variant, F_SUB)):
        with pytest.raises(MiscompiledError) as caught:
            LLM(model_path(MODEL))
        info = device.info
        assert variant in str(caught.value) and info.name in str(caught.value)
        assert info.driver in str(caught.value)
        for words in ("--device", "update the driver", "--no-canary", "selftest"):
            assert words in caught.value.hint
        load(canary=False)  # all the same
    load()  # the sound kernel is still known to be


def test_a_command_writes_one_error_and_no_text(
    one_device: None,
    canary: None,
    memory: Path,
    modules: Modules,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with modules.planted("embed.q8_0", fault_in("embed.q8_0", F_MUL)):
        code = main(["generate", "-p", "def", "-n", "3"])
    done = capsys.readouterr()
    assert code == 1 and not done.out and "Traceback" not in done.err
    assert "computes wrongly with the driver" in done.err and "embed.q8_0" in done.err
    assert "hint: update the driver" in done.err


def test_a_kernel_is_replaced_by_a_plainer_one(
    one_device: None,
    canary: None,
    memory: Path,
    modules: Modules,
    compared: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The text is that of the plainer tuning; later the wrong kernel alone is compared again."""
    own, _ = run()
    wrong = f"matvec.f32{own.dot_suffix}"
    with modules.planted(wrong, fault_in(wrong, F_MUL)), caplog.at_level(logging.WARNING, "vkmoe"):
        used, logits = run()
        (record,) = caplog.records
        assert wrong in record.getMessage() and "plainer" in record.getMessage()
        compared.clear()
        assert load() == used != own
        assert set(compared) == {wrong}
    assert run(used) == (used, logits)


class Judged(NamedTuple):
    """A probe whose result is known; nothing runs."""

    error: GpuError | None = None
    is_right: bool = True

    def run(self, runner: Runner) -> Checks:
        if self.error is not None:
            raise self.error
        checks = Checks()
        checks.equal("words", np.array([1]), np.array([1 if self.is_right else 2]))
        return checks


def judge(patch: pytest.MonkeyPatch, probe: Judged, wrong: Callable[[Pipeline], bool]) -> None:
    """Let all comparisons pass but those of pipelines that are `wrong`, whose probe this is."""

    def judged(model: ModelFile, decision: Decision) -> list[Comparison]:
        return [
            each._replace(probe=probe if any(map(wrong, each.kernels.values())) else Judged())
            for each in comparisons(model, decision)
        ]

    patch.setattr(check, "comparisons", judged)


def test_a_kernel_that_does_not_compile_is_wrong(
    one_device: None, canary: None, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = GpuError("vkCreateComputePipelines failed", "", "VK_ERROR_UNKNOWN")
    judge(monkeypatch, Judged(error), lambda each: "+blocks64" in each.variant)
    assert load().mapping == "lanes"


def test_a_device_that_hangs_is_refused(
    one_device: None, canary: None, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = DeviceLostError("the GPU did not finish in time")
    judge(monkeypatch, Judged(error), lambda each: each.variant == "router_topk")
    with pytest.raises(MiscompiledError, match="router_topk: the GPU did not finish"):
        load()


GPU = Tuning(
    *("lanes", 64, 4, True),
    subgroup_size=8,
    required_subgroup_size=8,
    own_tile=Tile(128, 128, 8, 4),
    half_tiles=True,
    launches=((KernelClass("matvec", "F32", "few", "short"), Launch(32, 2, 8)),),
)


@pytest.mark.parametrize(
    ("wrong", "kept"),
    [
        (lambda each: "+half" in each.variant, {"half_tiles": False}),
        (lambda each: each.variant == "attention+subgroup", {"subgroup_size": 0}),
        (
            lambda each: each.variant.startswith("matvec.") and each.constants[3] > 1,
            {"most_columns": 1},
        ),
        (lambda each: each.variant == "matvec.f32+subgroup" and each.constants[0] == 32,
         {"launches": ()}),
        (
            lambda each: each.variant.startswith("expert_down."),
            {"subgroup": False, "subgroup_size": 0, "required_subgroup_size": 0},
        ),
        (lambda each: "expert_matmul" in each.variant and each.constants[0] == 128,
         {"own_tile": None}),
    ],
)  # fmt: skip
def test_no_more_is_replaced_than_helps(
    wrong: Callable[[Pipeline], bool],
    kept: dict[str, Any],
    lend_device: Lend,
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels of other families stay what they are, and so do all that are as fast as can be."""
    if "subgroup" in kept:  # one that is right where nothing uses subgroups
        judge(monkeypatch, Judged(None, False), lambda x: wrong(x) and "+subgroup" in x.variant)
    else:
        judge(monkeypatch, Judged(None, False), wrong)
    with lend_device() as device, open_model(model_path(MODEL)) as model:
        config = EngineConfig(parallel=4)
        found = passing(
            device, model, GPU, lambda tuning: decide(config, model, device.info, tuning)
        )
    assert found.tuning == replace(GPU, **kept)


def test_a_device_that_computes_nothing_is_refused_at_once(
    lend_device: Lend, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge(monkeypatch, Judged(None, False), lambda each: True)
    tried: list[Tuning] = []

    def decided(tuning: Tuning) -> Decision:
        tried.append(tuning)
        return decide(EngineConfig(), model, device.info, tuning)

    refused = pytest.raises(MiscompiledError, match=r"; and \d+ more; no plainer kernels")
    with lend_device() as device, open_model(model_path(MODEL)) as model, refused:
        passing(device, model, GPU, decided)
    assert tried == [GPU]


@pytest.mark.parametrize("tuning", TUNINGS, ids=str)
def test_each_change_leads_to_plainer_kernels(tuning: Tuning, lend_device: Lend) -> None:
    """Done one behind the other, they end with another mapping and no variant that has a suffix of
    its own; programs can be made with each."""
    changed, suffixes = tuning, set[str]()
    with lend_device() as device:
        for change in plainer(tuning):
            changed = change(changed)
            made = decision_of(device, changed)
            assert made.tuning == changed
            suffixes.add(changed.dot_suffix)
    assert changed.mapping != tuning.mapping and len(suffixes) >= 2
    assert not changed.half_tiles and not changed.launches and not changed.subgroup_size
