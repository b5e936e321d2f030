"""What is planned is what is taken: bytes counted in the binding, per heap, after every token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.tiny import mixed_model, model_path
from tests.live import live_objects
from vkmoe.gpu import _native as native
from vkmoe.llm import LLM
from vkmoe.placement import plan
from vkmoe.placement.allocations import GRANULARITY
from vkmoe.placement.span_reader import READING_BYTES

N_TOKENS = 12
CHOICES: dict[str, dict[str, Any]] = {
    "default": {},
    "one slot": {"expert_slots": 1},
    "some slots": {"expert_slots": 12, "expert_allocation": "global"},
    "bytes": {"expert_cache": "7MiB"},
    "small pool": {"host_pool": "8MiB"},
    "small pool, slots and landing": {"host_pool": "4MiB", "expert_slots": 8, "miss": "gather",
                                      "promote_on_read": True, "expert_copies": "overlap",
                                      "expert_predictor": "correlation"},
    "stepped, gathered, overlapped": {"executor": "stepped", "expert_slots": 8, "miss": "gather",
                                      "promote_on_read": False, "expert_copies": "overlap"},
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("nothing_left")


def check(llm: LLM) -> None:
    """Now, and at any moment since the device was opened."""
    device, planned = llm.engine.device.native, llm.plan.heap_totals()
    for counted in (device.memory_bytes(), device.memory_peak_bytes()):
        for heap, n_bytes in enumerate(counted):
            assert n_bytes <= planned.get(heap, 0), f"heap {heap}"


def check_tightness(llm: LLM, n_allocations: int) -> None:
    """The plan adds what each allocation may be rounded by; a line too many would be more.

    What reading from the file takes is not the device's, nor what a predictor remembers.
    """
    counted = sum(llm.engine.device.native.memory_bytes())
    counted += READING_BYTES * bool(llm.plan.host_places)
    counted += sum(line.n_bytes for line in llm.plan.lines if "predictor" in line.item)
    assert sum(llm.plan.heap_totals().values()) - counted <= n_allocations * GRANULARITY


def generate(llm: LLM) -> None:
    """Sampling from all logits, so that reading those back counts too."""
    check(llm)
    pieces = llm.stream("import os", max_tokens=N_TOKENS, ignore_eos=True, top_k=0, seed=1)
    for _ in pieces:
        check(llm)
    assert llm.last_statistics is not None
    assert llm.last_statistics.n_generated_tokens == N_TOKENS


def check_work(llm: LLM) -> None:
    """Experts did move: what was measured is not an engine at rest."""
    cache = llm.engine.cache
    assert (cache is None) == (llm.plan.mode.experts_in == "device")
    if cache is not None and llm.plan.expert_slots:
        assert cache.counters.n_uploads + cache.counters.n_landed > 0
    if cache is not None and cache.pool is not None:
        assert cache.pool.counters.n_reads > sum(llm.plan.host_places)  # more than at the start


@pytest.mark.parametrize("options", CHOICES.values(), ids=CHOICES)
def test_no_heap_holds_more_than_planned(options: dict[str, Any]) -> None:
    n_before = live_objects().get("memory", 0)
    with LLM(ctx_size=64, **options) as llm:
        assert (llm.plan.mode.experts_in == "cache") == bool(
            {"expert_slots", "expert_cache"} & {*options}
        )
        assert bool(llm.plan.host_places) == ("host_pool" in options)
        check_tightness(llm, native.live_objects()["memory"] - n_before)
        generate(llm)
        check_work(llm)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixed_model(tmp_path_factory.mktemp("plan") / "mixed.gguf")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"miss": "gather", "promote_on_read": True},
        {"miss": "gather", "promote_on_read": False},
        {"miss": "read", "promote_on_read": True, "expert_copies": "overlap"},
        {"miss": "gather", "promote_on_read": True, "host_pool": "200KiB"},
    ],
    ids=["copied", "gathered and kept", "gathered", "kept", "small pool"],
)
def test_slots_of_several_sizes_are_planned(mixed: Path, options: dict[str, Any]) -> None:
    """Layers whose experts differ in type have arenas of their own; scratch is for the largest."""
    with LLM(mixed, ctx_size=32, expert_slots=2, **options) as llm:
        assert llm.plan.mode.experts_in == "cache"
        assert bool(llm.plan.landing_slots) == options.get("promote_on_read", False)
        assert bool(llm.plan.gather_places) == (options.get("miss") == "gather")
        assert bool(llm.plan.host_places) == ("host_pool" in options)
        check(llm)
        for position in range(N_TOKENS):
            llm.engine.run_token(1 + 11 * position % 60, position)
            check(llm)
        check_work(llm)


@pytest.mark.parametrize("name", ["qwen2moe_plain", "gptoss_odd", "deepseek2_v3"])
def test_every_kind_of_model_takes_what_is_planned(name: str) -> None:
    """Shared experts, biases, one cache of compressed rows, and the tensors these need."""
    n_before = live_objects().get("memory", 0)
    with LLM(model_path(name), ctx_size=64, expert_slots=2) as llm:
        check_tightness(llm, native.live_objects()["memory"] - n_before)
        for position in range(N_TOKENS):
            llm.engine.run_token(1 + 11 * position % 60, position)
            check(llm)
        check_work(llm)


def test_staging_is_planned_where_device_memory_is_not_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two lanes to load through, two for the table; without that line this check would fail."""
    monkeypatch.setattr(native.Buffer, "mapped", property(lambda buffer: False))
    monkeypatch.setattr(plan, "is_mapped", lambda device, intent: False)
    with LLM(ctx_size=64, expert_slots=4) as llm:
        (staging,) = (line for line in llm.plan.lines if line.item == "staging")
        peak = sum(llm.engine.device.native.memory_peak_bytes())
        assert peak > sum(llm.plan.heap_totals().values()) - staging.n_bytes
        generate(llm)
