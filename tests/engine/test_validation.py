"""A whole generation under synchronisation validation is silent; a missing barrier is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_context import grow_in_steps
from tests.engine.tiny import ONE_OF_EACH, drafter_path, model_path
from vkmoe.batch import BatchKind, Phase, TokenBatch
from vkmoe.generate.loop import Generation
from vkmoe.gpu.device import Device
from vkmoe.gpu.hazards import plan_barriers
from vkmoe.gpu.program import MEMORY, Dispatch, Program
from vkmoe.llm import LLM, demo_model_path

PROMPT = "def add(a, b):\n"
pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module", params=["demo", "moe_yarn_top1", "moe_all_experts", *ONE_OF_EACH])
def llm(request: pytest.FixtureRequest, one_device: None) -> Iterator[LLM]:
    path: Path = demo_model_path() if request.param == "demo" else model_path(request.param)
    with LLM(path, validation=True, ctx_size=64) as opened:
        yield opened


def needed_by_bound_tensors(program: Program) -> list[int]:
    """Indices of dispatches that, with only their own barrier gone, read what the one before wrote.

    Only tensors count: what is reached by address is not seen by the layer.
    """
    found = []
    barriers = plan_barriers(program.commands)
    for index, (before, command) in enumerate(zip(program.commands, program.commands[1:],
                                                  strict=False), start=1):  # fmt: skip
        if not (isinstance(before, Dispatch) and isinstance(command, Dispatch)):
            continue
        written = [r for r in before.writes if r.resource != MEMORY]
        if barriers[index] and any(w.overlaps(r) for w in written for r in command.reads):
            found.append(index)
    return found


@pytest.mark.sample(12)
def test_a_generation_is_silent(llm: LLM) -> None:
    result = llm.generate(PROMPT, max_tokens=8, temp=0, ignore_eos=True)
    assert len(result.token_ids) == 8
    llm.engine.full_logits()
    llm.embed([PROMPT, "def f():"], pooling="mean")
    assert llm.engine.device.validation_messages() == []


@pytest.mark.parametrize("staged", [False, True], ids=["mapped", "staged"])
def test_a_generation_with_an_expert_cache_is_silent(
    staged: bool, request: pytest.FixtureRequest
) -> None:
    """Copies into slots and new versions of the table, between tokens."""
    if staged:
        request.getfixturevalue("everything_staged")
    with LLM(validation=True, ctx_size=64, expert_slots=4, moe_warmpin_after=4) as llm:
        result = llm.generate(PROMPT, max_tokens=8, temp=0, ignore_eos=True)
        assert len(result.token_ids) == 8
        cache = llm.engine.cache
        assert cache is not None
        assert cache.counters.n_evictions > 0 < cache.counters.n_table_writes
        assert llm.engine.device.validation_messages() == []


MOVING: dict[str, dict[str, Any]] = {
    "overlapped": {"expert_copies": "overlap", "promote_on_read": True},
    "gathered": {"expert_copies": "overlap", "promote_on_read": True, "miss": "gather"},
    "stepped": {"executor": "stepped", "expert_copies": "overlap"},
    "exchanging": {
        "expert_slots": 12,
        "host_pool": "15MiB",
        "promote_on_read": True,
        "expert_copies": "overlap",
    },
    "from the file": {"host_pool": "8MiB", "promote_on_read": True, "miss": "gather"},
}


@pytest.mark.parametrize("how", MOVING)
def test_a_generation_whose_experts_move_is_silent(how: str) -> None:
    """A thread copies beside tokens, kernels store into slots, and a token is many submits."""
    with LLM(validation=True, ctx_size=64, **{"expert_slots": 4, **MOVING[how]}) as llm:
        result = llm.generate(PROMPT, max_tokens=8, temp=0, ignore_eos=True)
        llm.engine.settle()
        cache = llm.engine.cache
        assert len(result.token_ids) == 8 and cache is not None
        assert cache.counters.n_uploads + cache.counters.n_landed > 0
        assert (cache.counters.n_written_back > 0) == (how == "exchanging")
        assert llm.engine.device.validation_messages() == []


@pytest.mark.parametrize("options", [{}, {"expert_slots": 4, "promote_on_read": True}])
def test_a_generation_whose_caches_grow_and_shrink_is_silent(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows move to other memory, and what was recorded for the old is recorded anew."""
    grow_in_steps(monkeypatch)
    with LLM(validation=True, ctx_size=96, **options) as llm:
        sizes = []
        for n_tokens in (40, 4):
            llm.generate([*range(1, n_tokens)], max_tokens=12, temp=0, ignore_eos=True)
            llm.engine.settle()
            sizes.append(llm.engine._caches.n_positions)
            llm.forget()
        assert sizes[0] > 16 and sizes[1] < sizes[0]
        assert llm.engine.device.validation_messages() == []


@pytest.mark.parametrize("name", ["demo", "gptoss_odd", "qwen35moe_odd"])
def test_prompts_that_leave_and_come_back_are_silent(name: str, tmp_path: Path) -> None:
    """To host memory, to a file, and back, beside states and windows."""
    path = demo_model_path() if name == "demo" else model_path(name)
    with LLM(path, validation=True, ctx_size=96, parallel=2, ubatch_size=16) as llm:
        sampling: dict[str, Any] = {"max_tokens": 2, "temp": 0, "ignore_eos": True}
        for turn in range(6):
            llm.generate([1 + turn % 3, *range(1, 60), *range(turn)], **sampling)
        assert llm.scheduler.regions.kept.n_restored > 100
        llm.save_state(tmp_path / "a.state")
        llm.restore_state(tmp_path / "a.state", region=1)
        llm.generate([*llm.scheduler.regions.tokens(1)[:60], 9], **sampling)
        assert llm.engine.device.validation_messages() == []


BESIDE: dict[str, dict[str, Any]] = {
    "all": {"cpu_moe": True},
    "some layers": {"n_cpu_moe": 2},
    "misses": {"expert_mode": "hybrid", "expert_slots": 8},
    "misses, overlapped": {"expert_mode": "hybrid", "expert_slots": 8, "expert_copies": "overlap"},
}


@pytest.mark.usefixtures("cpu_native")
@pytest.mark.parametrize("how", BESIDE)
def test_a_generation_beside_the_cpu_is_silent(how: str) -> None:
    """Chains that take turns with the host, of prompts too, and slots that are filled meanwhile."""
    with LLM(validation=True, ctx_size=96, **BESIDE[how]) as llm:
        result = llm.generate([*range(1, 70)], max_tokens=12, temp=0, ignore_eos=True)
        assert len(result.token_ids) == 12
        llm.engine.settle()
        assert llm.engine.device.validation_messages() == []


# Two sequences: one whose prompt takes several chunks, and one that is decoded with guesses.
MIXED: dict[str, tuple[str, dict[str, Any]]] = {
    "latent": ("deepseek2_lite", {}),
    "kept as they are read": ("moe_plain", {"expert_slots": 2, "promote_on_read": True}),
    "guessed by a layer": ("qwen35moe_odd", {"draft": "mtp", "draft_tokens": 2}),
    "guessed by a drafter": (
        "gemma4_wide",
        {
            "draft": "mtp",
            "draft_tokens": 2,
            "draft_model": str(drafter_path("gemma4_wide_assistant")),
        },
    ),
    "gathered": ("qwen2moe_plain", {"expert_slots": 2, "miss": "gather"}),
    "stepped": ("moe_plain", {"expert_slots": 2, "executor": "stepped"}),
    "in groups": ("moe_plain", {"expert_slots": 1, "host_pool": "100KiB", "miss": "gather"}),
}


@pytest.mark.parametrize("how", MIXED)
def test_a_mixed_run_is_silent(how: str) -> None:
    """Chunks of a prompt, rows that are decoded, and guesses that are verified, in turns."""
    name, options = MIXED[how]
    own: dict[str, Any] = {"parallel": 2, "ubatch_size": 40, "draft": "lookup", **options}
    with LLM(model_path(name), validation=True, ctx_size=128, **own) as llm:
        scheduler, batches = llm.scheduler, list[TokenBatch]()
        scheduler.after_run = lambda batch, result: batches.append(batch)
        sampling: dict[str, Any] = {"max_tokens": 30, "temp": 0, "ignore_eos": True}
        texts = [[5, 6, 7] * 14, [1 + i % 90 for i in range(90)]]
        replies = []
        for text in texts:
            request = llm.request(text, **sampling)
            replies.append(Generation(request, llm.tokenizer, llm.engine.ctx_size))
            scheduler.submit(replies[-1])
            while not replies[0].n_generated:
                scheduler.step()
        while scheduler.has_work:
            scheduler.step()
        first = next(i for i, batch in enumerate(batches) if batch.phase == "decode")
        assert {"prompt", "decode"} == {batch.phase for batch in batches[first:]}, "no mixed run"
        decoded = [batch for batch in batches if batch.phase == "decode"]
        if how != "in groups":  # whose pool holds the experts of one row
            assert any(len(set(batch.sequences)) == 2 for batch in decoded)
            assert any(len(set(batch.sequences)) < len(batch.tokens) for batch in decoded)
        assert all(generation.n_generated == 30 for generation in replies)
        assert llm.engine.device.validation_messages() == []


@pytest.mark.usefixtures("own_device")
@pytest.mark.parametrize("phase", ["decode", "prompt"])
@pytest.mark.parametrize("where", ["attention", "logits"])
def test_a_missing_barrier_is_reported(where: str, phase: Phase) -> None:
    """The positive control: without it, silence above would prove nothing."""
    with LLM(model_path("moe_plain"), validation=True, ctx_size=64) as llm:
        engine = llm.engine
        engine.run(TokenBatch((1,), (0,), (0,), (True,), phase))  # leaves what can be run again
        kind = BatchKind(phase, 32 if phase == "prompt" else 1, 1)
        program = engine._programs.recorded[kind].program
        barriers = plan_barriers(program.commands)
        engine._backend.run(engine._backend.record(program, barriers))
        assert engine.device.validation_messages() == [], "the plan as it is"
        labels = [command.label for command in program.commands]
        index = next(i for i in needed_by_bound_tensors(program) if where in labels[i])
        barriers[index] = False
        engine._backend.run(engine._backend.record(program, barriers))
        messages = engine.device.validation_messages()
        assert any("SYNC-HAZARD-READ-AFTER-WRITE" in message for message in messages)


@pytest.mark.usefixtures("own_device")
def test_closing_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    n_closed = 0

    def close(device: Device) -> None:
        nonlocal n_closed
        device.native.close()
        messages.extend(device.validation_messages())
        device._instance.close()
        n_closed += 1

    monkeypatch.setattr(Device, "close", close)
    with LLM(model_path("moe_odd"), validation=True, ctx_size=64) as llm:
        llm.generate(PROMPT, max_tokens=1)
    assert n_closed == 1
    assert messages == []
