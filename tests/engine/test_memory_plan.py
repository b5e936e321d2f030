"""What is planned is what is taken: bytes counted in the binding, per heap, after every token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.tiny import mixed_model, model_path
from tests.needs import need_cpu
from tests.samples import sampled
from vkmoe.config import EngineConfig
from vkmoe.gpu import _native as native
from vkmoe.gpu.device import Device
from vkmoe.llm import LLM
from vkmoe.placement import plan
from vkmoe.placement.memory import allocated

N_TOKENS = 12
PLACEHOLDER = 4  # bytes of the tensor that kernels without tensors are given
CHOICES: dict[str, dict[str, Any]] = {
    "default": {},
    "one slot": {"expert_slots": 1},
    "some slots": {"expert_slots": 12, "expert_allocation": "global"},
    "bytes": {"expert_cache": "7MiB"},
    "small pool": {"host_pool": "8MiB"},
    "small pool, slots and landing": {"host_pool": "4MiB", "expert_slots": 8, "miss": "gather",
                                      "promote_on_read": True, "expert_copies": "overlap"},
    "exchange": {"host_pool": "15MiB", "expert_slots": 12, "promote_on_read": True},
    "four sequences": {"parallel": 4, "ubatch_size": 96},
    "two with drafts and slots": {"parallel": 2, "draft": "lookup", "expert_slots": 8},
    "drafts, small chunks": {"draft": "lookup", "ubatch_size": 8},
    "stepped, gathered, overlapped": {"executor": "stepped", "expert_slots": 8, "miss": "gather",
                                      "promote_on_read": False, "expert_copies": "overlap"},
    "layers in host memory": {"gpu_layers": 2, "expert_slots": 8},
    "all on the CPU": {"cpu_moe": True, "parallel": 2},
    "some layers on the CPU": {"n_cpu_moe": 2},
    "misses on the CPU": {"expert_mode": "hybrid", "expert_slots": 8, "expert_copies": "overlap"},
}  # fmt: skip
SAMPLE = (
    "small pool, slots and landing",
    "exchange",
    "two with drafts and slots",
    "layers in host memory",
    "misses on the CPU",
)
pytestmark = pytest.mark.usefixtures("nothing_left")


def check(llm: LLM) -> None:
    """Now, and at any moment since the device was opened."""
    device, planned = llm.engine.device.native, llm.plan.heap_totals()
    for counted in (device.memory_bytes(), device.memory_peak_bytes()):
        for heap, n_bytes in enumerate(counted):
            assert n_bytes <= planned.get(heap, 0), f"heap {heap}"


class Asked:
    """What is asked of devices while it is watched, as bytes by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.buffers: list[tuple[str, int, native.Buffer]] = []
        self.tensors: list[int] = []
        allocate, tensor = Device.allocate, native.Device.tensor

        def noted(device: Device, intent: Any, n_bytes: int, name: str) -> native.Buffer:
            made = allocate(device, intent, n_bytes, name)
            self.buffers.append((name, n_bytes, made))
            return made

        def noted_tensor(device: native.Device, n_words: int, name: str) -> native.Tensor:
            self.tensors.append(4 * n_words)
            return tensor(device, n_words, name)

        monkeypatch.setattr(Device, "allocate", noted)
        monkeypatch.setattr(native.Device, "tensor", noted_tensor)

    def of(self, name: str) -> list[int]:
        """Bytes of what there is by this name."""
        if name == "tensors":
            return sorted([*self.tensors, PLACEHOLDER])
        return sorted(n for other, n, buffer in self.buffers if other == name and buffer.size)

    def names(self) -> set[str]:
        return {name for name, _, _ in self.buffers if self.of(name)} | {"tensors"}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


def check_lines(llm: LLM, asked: Asked) -> None:
    """Every buffer is in the line of its name, every line's buffers are there, no byte differs.

    What lines without a name count is not the device's: a predictor, rows that are laid out.
    """
    plan = llm.plan
    planned = {line.name for line in plan.lines if line.layouts} - {"staging"}
    assert asked.names() - {"staging"} == planned
    for name in planned:
        assert name is not None
        buffers = sorted(n for layout in plan.layouts(name) for n in layout.buffers)
        assert asked.of(name) == buffers, name
        share = sum(line.n_bytes for line in plan.lines if line.name == name)
        assert share == sum(allocated(n) for n in buffers), name
    for line in plan.lines:
        if line.name is None:
            own = ("predictor", "reading", "converting", "addresses", "activations of the CPU")
            assert line.place == "file" or line.item.startswith(own), line


def generate(llm: LLM) -> None:
    """Sampling from all logits, so that reading those back counts too; as many as there is room."""
    check(llm)
    prompts: list[list[int]] = [[1 + i, *[5, 6, 7] * 14] for i in range(llm.engine.n_regions)]
    options: dict[str, Any] = {"max_tokens": N_TOKENS, "ignore_eos": True, "top_k": 0, "seed": 1}
    n_tokens = 0
    for _, piece in llm.stream_many(prompts, **options):
        check(llm)
        n_tokens += piece.token_id >= 0
    assert n_tokens == N_TOKENS * len(prompts)


def check_work(llm: LLM) -> None:
    """Experts did move: what was measured is not an engine at rest."""
    cache = llm.engine.cache
    assert (cache is None) == (llm.plan.mode.experts_in in ("device", "cpu"))
    if cache is not None and llm.plan.expert_slots:
        assert cache.counters.n_uploads + cache.counters.n_landed > 0
    if llm.plan.exchanges:
        assert cache is not None and cache.counters.n_written_back > 0
    elif cache is not None and cache.pool is not None:
        assert cache.pool.counters.n_reads > sum(llm.plan.host_slots)  # more than at the start


@pytest.mark.parametrize("choice", sampled(CHOICES, SAMPLE.__contains__))
@pytest.mark.sample(1)
def test_no_heap_holds_more_than_planned(choice: str, asked: Asked) -> None:
    options = CHOICES[choice]
    if EngineConfig(**options).mode in ("cpu", "hybrid"):
        need_cpu()
    with LLM(ctx_size=64, **options) as llm:
        assert (llm.plan.mode.experts_in == "cache") == bool(
            {"expert_slots", "expert_cache"} & {*options}
        )
        assert bool(llm.plan.host_slots) == ("host_pool" in options)
        check_lines(llm, asked)
        generate(llm)
        check_work(llm)
        check_lines(llm, asked)


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
        {"miss": "gather", "promote_on_read": True, "host_pool": "160KiB"},
    ],
    ids=["copied", "gathered and kept", "gathered", "kept", "small pool"],
)
@pytest.mark.sample(2)
def test_slots_of_several_sizes_are_planned(
    mixed: Path, options: dict[str, Any], asked: Asked
) -> None:
    """Layers whose experts differ in type have arenas of their own; scratch is for the largest."""
    with LLM(mixed, ctx_size=32, expert_slots=2, **options) as llm:
        assert llm.plan.mode.experts_in == "cache"
        assert bool(llm.plan.landing_slots) == options.get("promote_on_read", False)
        assert bool(llm.plan.layout("gathered experts").runs) == (options.get("miss") == "gather")
        assert bool(llm.plan.host_slots) == ("host_pool" in options)
        check(llm)
        check_lines(llm, asked)
        for position in range(N_TOKENS):
            llm.engine.run_token(1 + 11 * position % 60, position)
            check(llm)
        check_work(llm)


@pytest.mark.parametrize("name", ["qwen2moe_plain", "gptoss_odd", "deepseek2_v3"])
def test_every_kind_of_model_takes_what_is_planned(name: str, asked: Asked) -> None:
    """Shared experts, biases, one cache of compressed rows, and the tensors these need."""
    with LLM(model_path(name), ctx_size=64, expert_slots=2) as llm:
        check_lines(llm, asked)
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
