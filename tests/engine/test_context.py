"""The KV cache grows and shrinks with the texts: no bit of a logit depends on when it does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine.tiny import ONE_OF_EACH, RECURRENT, WINDOWED, lengthened, model_path
from vkmoe.batch import TokenBatch
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.errors import OutOfMemoryError
from vkmoe.execute import context_memory
from vkmoe.facts import Heap
from vkmoe.generate.loop import Generation
from vkmoe.gpu import arena
from vkmoe.gpu.device import Device
from vkmoe.kernels.tuning import choose_tuning
from vkmoe.llm import LLM, demo_model_path
from vkmoe.models.kv_caches import growth_bytes
from vkmoe.placement import experts, plan

pytestmark = pytest.mark.usefixtures("one_device")
CTX_SIZE, N_REGIONS, FIRST = 200, 3, 8


def grow_in_steps(patch: pytest.MonkeyPatch, first: int = FIRST, step: int = 16) -> None:
    patch.setattr(plan, "FIRST_POSITIONS", first)
    patch.setattr(plan, "sure_context", lambda config, spec: first)
    for module in (plan, context_memory):
        patch.setattr(module, "CONTEXT_STEP", step)


class Rows(NamedTuple):
    """What a script asks of an engine: rows of a region, behind `position`."""

    region: int
    position: int
    tokens: tuple[int, ...]
    decodes: bool


def script(n_vocab: int, seed: int) -> Iterator[Rows | tuple[int, int, int] | None]:
    """Rows of three texts, in turns: they grow, go back and are copied; at times all begin anew."""
    random_ = random.Random(seed)
    ends = [0] * N_REGIONS
    for _ in range(50):
        region = random_.randrange(N_REGIONS)
        way = random_.random()
        if way < 0.1:
            ends[region] = random_.choice((0, ends[region] // 2))
        elif way < 0.2 and ends[region] > 1:
            target = (region + 1) % N_REGIONS
            ends[target] = random_.randrange(1, ends[region])
            yield region, target, ends[target]
        elif way < 0.25:
            ends = [0] * N_REGIONS
            yield None
        decodes = random_.random() < 0.7
        n_rows = 1 if decodes else random_.randrange(2, 40)
        if ends[region] + n_rows > CTX_SIZE:
            ends[region] = 0
        tokens = tuple(random_.randrange(n_vocab) for _ in range(n_rows))
        yield Rows(region, ends[region], tokens, decodes)
        ends[region] += n_rows


def logits_of(engine: Engine, seed: int) -> tuple[list[NDArray[np.float32]], list[int]]:
    """The logits behind each rows of a script, and the positions that there was room for."""
    logits, sizes = [], []
    for asked in script(engine.n_vocab, seed):
        if asked is None:
            for region in range(N_REGIONS):
                engine.rewind(region, 0)
            engine.settle()
        elif not isinstance(asked, Rows):
            engine.copy_region(*asked)
        else:
            n_rows = len(asked.tokens)
            positions = tuple(range(asked.position, asked.position + n_rows))
            wants = (False,) * (n_rows - 1) + (True,)
            regions, phase = (asked.region,) * n_rows, "decode" if asked.decodes else "prompt"
            batch = TokenBatch(asked.tokens, positions, regions, wants, phase)  # type: ignore[arg-type]
            while True:
                try:
                    engine.run(batch)
                    break
                except OutOfMemoryError as error:  # which may be over
                    assert "no memory is left for a context of" in str(error)
            logits.append(engine.full_logits().copy())
        sizes.append(engine._caches.n_positions)
    return logits, sizes


WAYS: dict[str, dict[str, Any]] = {
    "resident": {},
    "kept as they are read": {"expert_slots": 4, "promote_on_read": True},
    "from the file": {"expert_slots": 4, "host_pool": "8MiB", "miss": "gather"},
    "q8_0": {"cache_type_k": "q8_0", "cache_type_v": "q8_0"},
    "q4_0, q5_1": {"cache_type_k": "q4_0", "cache_type_v": "q5_1"},
    "cpu": {"device": "cpu"},
    "hybrid": {"expert_mode": "hybrid", "expert_slots": 8},
}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        # Others go back by other rules: test_going_back.py.
        *((name, "resident") for name in ONE_OF_EACH if name not in (*RECURRENT, *WINDOWED)),
        *(("demo", way) for way in WAYS),
    ],
)
@pytest.mark.sample(3)
def test_growing_and_shrinking_change_no_bit(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path: Path = demo_model_path() if name == "demo" else model_path(name)
    config = EngineConfig(ctx_size=CTX_SIZE, parallel=N_REGIONS, ubatch_size=40, **WAYS[way])
    with Engine(lengthened(path, CTX_SIZE), config) as engine:
        wanted, sizes = logits_of(engine, seed=len(name))
        assert set(sizes) == {CTX_SIZE}
    grow_in_steps(monkeypatch)
    with Engine(lengthened(path, CTX_SIZE), config, checks=True) as engine:
        found, sizes = logits_of(engine, seed=len(name))
        assert len(set(sizes)) > 2 and sizes != sorted(sizes), "it grows and shrinks"
    assert [one.tobytes() for one in found] == [one.tobytes() for one in wanted]


@pytest.mark.parametrize("name", ["gemma4_odd", "qwen35moe_odd", "deepseek2_lite"])
def test_growing_takes_the_bytes_that_are_counted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of layers that are not alike, all of them, and the largest in two places for a moment."""
    grow_in_steps(monkeypatch)
    config = EngineConfig(ctx_size=96, parallel=2)
    with Engine(model_path(name), config) as engine:
        caches, info, (spec, made) = engine._caches, engine.device.info, (engine.spec, engine.plan)
        before, counted = caches.n_bytes, caches.bytes_to_resize(96)
        assert growth_bytes(info, spec, made, 96) == counted
        caches.resize(96, [0, 0])
        sizes = [held.n_bytes for held in caches._layers]
        largest = max(*sizes, *(held.n_bytes for held in caches._ropes.values()))
        assert caches.n_bytes - before + largest == counted > largest


def replies_with_drafts(**options: Any) -> tuple[list[list[int]], int]:
    """The tokens of two replies with guesses, and the positions that there was room for at last."""
    texts = ([5, 6, 7] * 8, [9, 8] * 20)
    with LLM(demo_model_path(), ctx_size=CTX_SIZE, parallel=2, draft="lookup", **options) as llm:
        asked = [llm.request(text, max_tokens=50, temp=0, ignore_eos=True) for text in texts]
        found = [Generation(each, llm.tokenizer, llm.engine.ctx_size) for each in asked]
        for each in found:
            llm.scheduler.submit(each)
        while llm.scheduler.has_work:
            llm.scheduler.step()
        assert sum(each.statistics(0.0).n_drafted_tokens for each in found) > 0
        return [each.tokens for each in found], llm.engine._caches.n_positions


def test_replies_with_drafts_are_those_of_a_cache_that_never_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guesses that were wrong are taken back, beside another text, while the caches grow."""
    wanted, n_fixed = replies_with_drafts()
    grow_in_steps(monkeypatch)
    found, n_grown = replies_with_drafts()
    assert found == wanted and FIRST < n_grown < n_fixed == CTX_SIZE


def test_memory_that_is_refused_while_it_grows_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At whichever layer: what is there stays, and the same row runs once there is memory."""
    grow_in_steps(monkeypatch)
    allocate, n_left = Device.allocate, [10**9]

    def refusing(device: Device, intent: Any, size: int, name: str) -> Any:
        n_left[0] -= name == "KV cache"
        if n_left[0] < 0:
            raise OutOfMemoryError("out of GPU memory for KV cache", "")
        return allocate(device, intent, size, name)

    monkeypatch.setattr(Device, "allocate", refusing)
    config = EngineConfig(ctx_size=CTX_SIZE)
    with Engine(lengthened(model_path("moe_odd"), CTX_SIZE), config) as engine:
        for position in range(FIRST):
            engine.run_token(5, position)
        n_parts = len(engine.spec.layers) + len(engine.spec.ropes)
        for n_allowed in [0, *[1] * (n_parts - 1)]:  # one part more moves each time
            n_left[0] = n_allowed
            with pytest.raises(OutOfMemoryError, match="a context of 9 tokens; 8 fit now"):
                engine.run_token(5, FIRST)
            engine.run_token(5, FIRST - 1)  # what is there can be used
        n_left[0] = 1
        engine.run_token(5, FIRST)
        found = engine.full_logits().tobytes()
    n_left[0] = 10**9
    with Engine(lengthened(model_path("moe_odd"), CTX_SIZE), config) as engine:
        for position in range(FIRST + 1):
            engine.run_token(5, position)
        assert engine.full_logits().tobytes() == found


@pytest.fixture
def small_card(own_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lavapipe as a card whose memory holds half of the demo model's experts."""
    init = Device.__init__

    def opened(device: Device, *args: Any) -> None:
        init(device, *args)
        size = 526 << 20
        heaps = tuple(replace(heap, size=size, budget=None) for heap in device.info.heaps)
        device.info = replace(device.info, type="discrete", heaps=(*heaps, Heap(8 << 30, False)))

    monkeypatch.setattr(Device, "__init__", opened)
    monkeypatch.setattr("vkmoe.engine.link_of_misses", lambda device: None)
    # Kernels of a GPU take this driver ten times as long.
    own = partial(replace, type="cpu")
    monkeypatch.setattr("vkmoe.engine.tuning_for", lambda info, _: choose_tuning(own(info)))
    for module in (arena, experts):
        monkeypatch.setattr(module, "SLOT_CHUNK", 1 << 20)


def test_slots_give_memory_while_a_text_is_long_and_get_it_back(
    small_card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default: nothing is asked for. The text is the one of a card that holds everything."""
    n_most = 72
    tokens = [(7 * i * i + 3 * i) % 900 + 5 for i in range(n_most)]

    def run(engine: Engine, n_tokens: int) -> bytes:
        engine.run_prompt(tokens[: n_tokens - 4])
        for position in range(n_tokens - 4, n_tokens):
            engine.run_token(tokens[position], position)
        return engine.full_logits().tobytes()

    with Engine(lengthened(demo_model_path(), 20_000), EngineConfig(ctx_size=n_most)) as engine:
        wanted, short = run(engine, n_most), run(engine, FIRST)
    grow_in_steps(monkeypatch)
    with Engine(lengthened(demo_model_path(), 20_000), EngineConfig(), checks=True) as engine:
        assert engine.cache is not None and engine.plan.gives_slots
        locations, cache_memory = engine.cache.residency.locations, engine.cache._memory
        before = locations.capacities.sum()
        engine._context._spare = 0  # the card is full
        assert run(engine, n_most) == wanted
        assert locations.capacities.sum() < before
        assert run(engine, FIRST) == short
        engine.settle()
        # All but what the last chunk of a layer's slots holds, for which the caches keep a part.
        of_chunk = arena.SLOT_CHUNK // cache_memory.span_bytes[0]
        assert locations.capacities.sum() >= before - of_chunk
        assert engine._caches.n_positions < n_most
        assert run(engine, n_most) == wanted
