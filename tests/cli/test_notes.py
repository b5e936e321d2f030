"""What stderr tells about the CPU, the validation layer and idle options of the expert cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from vkmoe.cli.notes import cache_notes, prompt_progress
from vkmoe.config import EngineConfig
from vkmoe.errors import PromptError
from vkmoe.experts.decide.settings import size_cache
from vkmoe.facts import Allocation, DeviceInfo, MemoryPlan
from vkmoe.kv_types import both
from vkmoe.modes import AtHome, Cache, Resident

from .conftest import DEVICE, FakeLLM, Run

GPU = replace(DEVICE, index=1, name="Real GPU", type="discrete",
              features=frozenset({"buffer_device_address"}))  # fmt: skip
CPU = replace(DEVICE, features=GPU.features)
NO_GPU = "no GPU found: running on the CPU"
MESSAGES = ("SYNC-HAZARD-READ-AFTER-WRITE:\n  of a buffer", "VUID-1: wrong")


def machine(monkeypatch: pytest.MonkeyPatch, devices: list[DeviceInfo], blocked: list[str]) -> None:
    monkeypatch.setattr("vkmoe.gpu.device.list_devices", lambda: devices)
    monkeypatch.setattr("vkmoe.gpu.device.blocked_render_nodes", lambda: blocked)


@pytest.mark.parametrize("command", [("generate", "-p", "x"), ("chat",), ("devices",)])
def test_no_gpu(
    run: Run, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    machine(monkeypatch, [CPU], [])
    done = run(*command)
    assert done.code == 0 and NO_GPU in done.err
    assert "render" not in done.err


def test_a_cpu_beside_a_gpu_is_a_choice(
    run: Run, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, [CPU, GPU], [])
    for command in (("generate", "-p", "x", "--device", "0"), ("devices", "--device", "0")):
        done = run(*command)
        assert "running on the CPU, not on Real GPU" in done.err
        assert NO_GPU not in done.err
    assert "running on the CPU" not in run("devices").err, "the GPU is chosen"


@pytest.mark.parametrize("wanted", ["cpu", "invented"])
@pytest.mark.parametrize("command", [("generate", "-p", "x"), ("devices",)])
def test_who_asks_for_the_cpu_misses_no_gpu(
    run: Run,
    fake: type[FakeLLM],
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    wanted: str,
) -> None:
    """Neither by its own name nor by that of a driver that runs shaders there."""
    machine(monkeypatch, [CPU], ["/dev/dri/renderD128"])
    done = run(*command, "--device", wanted)
    assert done.code == 0
    assert "no GPU" not in done.err and "render" not in done.err


@pytest.mark.parametrize("command", [("generate", "-p", "x"), ("devices",)])
def test_a_blocked_gpu_is_named(
    run: Run, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """The driver of a GPU that may not be opened lists nothing; only the CPU's is left."""
    machine(monkeypatch, [CPU], ["/dev/dri/renderD128", "/dev/dri/renderD129"])
    done = run(*command)
    assert NO_GPU in done.err
    assert "no permission to open /dev/dri/renderD128, /dev/dri/renderD129" in done.err
    assert "`render` group" in done.err


def test_quiet_says_nothing_of_the_cpu(
    run: Run, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, [CPU], ["/dev/dri/renderD128"])
    assert run("generate", "-p", "x", "-q").err == ""


def test_a_silent_validation_layer_is_said_so(run: Run, fake: type[FakeLLM]) -> None:
    done = run("generate", "-p", "x", "--validation")
    assert done.code == 0 and "validation: no messages\n" in done.err
    assert run("generate", "-p", "x", "--validation", "-q").err == ""
    assert "validation" not in run("generate", "-p", "x").err


@pytest.mark.parametrize("command", [("generate", "-p", "x"), ("chat",)])
@pytest.mark.parametrize("more", [(), ("-q",)])
def test_validation_messages_are_shown_and_fail(
    run: Run, fake: type[FakeLLM], command: tuple[str, ...], more: tuple[str, ...]
) -> None:
    """Each on one line, whatever was asked to be quiet; the text is not held back."""
    fake.validation_messages = MESSAGES
    done = run(*command, "--validation", *more)
    assert done.code == 1
    assert "validation: SYNC-HAZARD-READ-AFTER-WRITE: of a buffer\n" in done.err
    assert "validation: VUID-1: wrong\n" in done.err
    assert "error: the validation layer reported 2 messages\nhint: " in done.err
    assert fake.calls[-1] == {"closed": True}
    assert done.out == ("one two thrée!\n" if command[0] == "generate" else "")


def test_validation_messages_are_shown_before_an_error(run: Run, fake: type[FakeLLM]) -> None:
    fake.validation_messages = MESSAGES[1:]
    fake.fail_after = (1, PromptError("it does not fit", "shorten it"))
    done = run("generate", "-p", "x", "--validation")
    assert done.code == 1
    assert done.err.endswith(
        "validation: VUID-1: wrong\nerror: it does not fit\nhint: shorten it\n"
    )


# ----- the expert cache -----

CACHED = MemoryPlan(64, both("f16"), Cache(), (), (9, 8), size_cache((9, 8), (1, 1), 32, 4))
RESIDENT = replace(CACHED, mode=Resident(), expert_slots=())
AT_HOME = replace(CACHED, mode=AtHome(), expert_slots=())
DENSE = replace(RESIDENT, sizing=None)


def notes(plan: MemoryPlan, **asked: Any) -> list[str]:
    return cache_notes(EngineConfig(**asked), plan)


@pytest.mark.parametrize("plan", [CACHED, RESIDENT, AT_HOME, DENSE])
def test_defaults_need_no_note(plan: MemoryPlan) -> None:
    assert notes(plan) == []
    assert notes(plan, expert_policy="forecast", expert_stats="s.txt", ctx_size=9) == []


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"expert_policy": "lru"}, "--expert-policy has no effect"),
        ({"moe_warmpin": 0, "expert_policy": "lru"}, "--expert-policy and --moe-warmpin have"),
        (
            {"expert_allocation": "global", "moe_warmpin": 1, "expert_resident_ids": "1"},
            "--expert-allocation, --moe-warmpin and --expert-resident-ids have no effect",
        ),
        (
            {"promote_on_read": True, "miss": "gather"},
            "--miss and --promote-on-read have no effect",
        ),
        (
            {"moe_predict_prefetch": False, "expert_copies": "wait"},
            "--no-moe-predict-prefetch and --expert-copies have no effect",
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
    assert notes(plan, expert_policy="lru") == notes(plan, moe_predict_prefetch=True) == [said]
    assert notes(plan, miss="gather")[1] == "no expert has a slot: --miss has no effect"


def test_one_queue_cannot_copy_beside_a_token() -> None:
    asked = EngineConfig(expert_copies="overlap")
    assert "take turns" in cache_notes(asked, CACHED, one_queue=True)[0]
    assert cache_notes(asked, CACHED) == cache_notes(EngineConfig(), CACHED, one_queue=True) == []


def test_only_a_model_without_experts_has_no_router_to_stop_at() -> None:
    assert notes(DENSE, executor="stepped")[0].endswith(": --executor has no effect")
    assert not any(notes(plan, executor="stepped") for plan in (RESIDENT, CACHED, AT_HOME))


def test_choices_for_what_moves_need_no_note() -> None:
    assert notes(CACHED, expert_policy="lru", moe_warmpin=2) == []


def test_where_nobody_is_pinned_there_is_no_time_for_it() -> None:
    assert notes(CACHED, moe_warmpin=0, moe_warmpin_after=5) == [
        "with --moe-warmpin 0: --moe-warmpin-after has no effect",
    ]
    assert notes(CACHED, moe_warmpin_after=5) == notes(CACHED, moe_warmpin=0) == []


def test_residents_in_all_slots_of_a_layer() -> None:
    (line,) = notes(CACHED, expert_resident_ids="1,2,3,4,5,6,7,8")
    assert line.startswith("--expert-resident-ids takes all 8 slots of a layer")
    assert line.endswith("no slot is left to follow the text")


def test_named_experts_may_leave_a_slot() -> None:
    ids = "1,2,3,4,5,6,7,8"
    assert notes(replace(CACHED, expert_slots=(9, 9)), expert_resident_ids=ids) == []


def test_residents_that_leave_a_slot() -> None:
    for n_resident, n_notes in ((7, 0), (8, 1)):
        asked: Any = {"expert_resident_ids": ",".join(map(str, range(n_resident)))}
        assert len(notes(CACHED, **asked)) == n_notes
        assert notes(CACHED, expert_allocation="global", **asked) == [], "9 and 8 shared by two"


def test_a_start_says_it_unless_quiet(run: Run, fake: type[FakeLLM]) -> None:
    line = "the model has no experts: --moe-warmpin has no effect"
    assert run("generate", "-p", "x", "--moe-warmpin", "2").err.splitlines().count(line) == 1
    assert run("generate", "-p", "x", "--moe-warmpin", "2", "--quiet").err == ""


@pytest.mark.parametrize(("seconds", "drawn"), [(0.0, [(2, 9), (5, 9)]), (60.0, [])])
def test_a_bar_shows_that_a_long_prompt_is_read(
    monkeypatch: pytest.MonkeyPatch, seconds: float, drawn: list[tuple[int, int]]
) -> None:
    """It goes when the reply begins."""
    seen: list[Any] = []

    @contextmanager
    def counting(label: str, shown: bool) -> Iterator[Callable[[int, int], None]]:
        assert (label, shown) == ("prompt", True)
        yield lambda done, total: seen.append((done, total))
        seen.append("gone")

    monkeypatch.setattr("vkmoe.cli.notes.counting", counting)
    monkeypatch.setattr("vkmoe.cli.notes._LONG_PROMPT", seconds)
    with prompt_progress() as progress:
        progress(2, 9)
        progress(5, 9)
        progress(9, 9)
        assert seen == [*drawn, *["gone"] * bool(drawn)]
