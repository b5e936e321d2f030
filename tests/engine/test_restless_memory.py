"""Memory of experts that comes, goes and is refused before any run changes no bit of a logit."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.engine.test_context import (
    CTX_SIZE,
    N_REGIONS,
    grow_in_steps,
    logits_of,
    replies_with_drafts,
)
from tests.engine.tiny import lengthened
from vkmoe.config import EngineConfig
from vkmoe.cpu.device import CpuDevice
from vkmoe.engine import Engine
from vkmoe.errors import OutOfMemoryError
from vkmoe.experts.store.memory_watch import Moves
from vkmoe.gpu.device import Device
from vkmoe.llm import LLM, demo_model_path

pytestmark = pytest.mark.usefixtures("one_device")
CHUNK = 1 << 18  # bytes: five experts


class Restless:
    """Before each run others take memory of the device or of the host, or leave some.

    `n_seen` counts what that came to. Allocations are refused at random where `refuses`.
    """

    def __init__(self, patch: pytest.MonkeyPatch, seed: int, refuses: bool) -> None:
        self._random, self._refuses, self.n_seen = random.Random(seed), refuses, Counter[str]()
        self._reads = False  # the file, where experts exchange places as long as memory holds all
        for kind in (Device, CpuDevice):
            patch.setattr(kind, "allocate", self._refusing(kind.allocate))
        patch.setattr("vkmoe.gpu.arena.SLOT_CHUNK", CHUNK)
        patch.setattr(Engine, "watch_memory", lambda engine: self._move(engine))

    def _refusing(self, allocate: Callable[..., Any]) -> Callable[..., Any]:
        def refusing(device: Any, intent: Any, size: int, name: str) -> Any:
            if self._refuses and self.n_seen["runs"] and self._random.random() < 0.2:
                self.n_seen[f"refused {name}"] += 1
                raise OutOfMemoryError(f"out of GPU memory for {name}", "")
            return allocate(device, intent, size, name)

        return refusing

    def _move(self, engine: Engine) -> bool:
        self.n_seen["runs"] += 1
        cache = engine.cache
        if engine.plan.exchanges and cache is not None and cache.reads_file != self._reads:
            self._reads = cache.reads_file
            self.n_seen["reads the file" if self._reads else "exchanges again"] += 1
        if self._reads and self._random.random() < 0.25:  # all others have ended
            for name, of_host in (("slots taken", False), ("places taken", True)) * 9:
                _, n_moved = engine.experts.take_back(1 << 30, of_host)  # some is refused
                self.n_seen[name] += n_moved > 0
            return True
        if cache is None or self._random.random() < 0.5:
            return False
        n_bytes = self._random.randrange(1, 4 * CHUNK)
        ways: dict[str, Moves] = {"slots taken": engine.experts.take_back}
        if not engine.plan.mode.by_cpu:
            ways["slots given"] = engine.experts.give_back
        if cache.pool is not None:
            ways["places given"] = engine.experts.give_back_places
            ways["places taken"] = partial(engine.experts.take_back, of_host=True)
        name = self._random.choice([*ways])
        _, n_moved = ways[name](n_bytes)
        self.n_seen[name] += n_moved > 0
        cache.check_integrity()
        return True


MOVING = {"expert_slots": 14, "promote_on_read": True, "expert_copies": "overlap"}
GIVES, PLACES = {"slots given", "slots taken"}, {"places given", "places taken"}
GROWTH, SHRINKS = {"refused KV cache"}, {"reads the file", "exchanges again"}
WAYS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "read at home": (MOVING, {*GIVES, *GROWTH, "refused expert slots"}),
    "from the file": (
        {**MOVING, "host_pool": "12MiB", "miss": "gather"},
        {*GIVES, *PLACES, *GROWTH, "refused expert pool"},
    ),
    "exchanging": ({**MOVING, "host_pool": "17MiB"}, {*GIVES, *PLACES, *GROWTH, *SHRINKS}),
    "stepped": ({**MOVING, "executor": "stepped", "host_pool": "12MiB"}, {*GIVES, *PLACES}),
    "hybrid": ({"expert_mode": "hybrid", "expert_slots": 8}, GROWTH),
    "cpu": ({"device": "cpu"}, GROWTH),
}


@pytest.mark.usefixtures("cpu_native")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.sample(2)
def test_rows_of_several_texts(way: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options, expected = WAYS[way]
    config = EngineConfig(ctx_size=CTX_SIZE, parallel=N_REGIONS, ubatch_size=40, **options)
    with Engine(lengthened(demo_model_path(), CTX_SIZE), config) as engine:
        wanted, _ = logits_of(engine, seed)
    grow_in_steps(monkeypatch)
    restless = Restless(monkeypatch, seed, refuses=True)
    with Engine(lengthened(demo_model_path(), CTX_SIZE), config, checks=True) as engine:
        found, sizes = logits_of(engine, seed)
    assert [one.tobytes() for one in found] == [one.tobytes() for one in wanted]
    assert len(set(sizes)) > 2 and expected <= {name for name, n in restless.n_seen.items() if n}


def test_two_replies_with_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, _ = replies_with_drafts()
    grow_in_steps(monkeypatch)
    restless = Restless(monkeypatch, 1, refuses=False)
    found, _ = replies_with_drafts(**MOVING, host_pool="12MiB", miss="gather")
    assert found == wanted and all(restless.n_seen[name] for name in (*GIVES, *PLACES))


@pytest.mark.parametrize("way", ["from the file", "exchanging"])
def test_what_moves_is_silent_under_synchronisation_validation(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts move to other slots while the caches grow, and chunks are freed and taken back."""
    grow_in_steps(monkeypatch)
    restless = Restless(monkeypatch, 2, refuses=False)
    options, expected = WAYS[way]
    with LLM(demo_model_path(), validation=True, ctx_size=96, **options) as llm:
        for n_tokens in (40, 4):
            llm.generate([*range(1, n_tokens)], max_tokens=40, temp=0, ignore_eos=True)
            llm.forget()
            llm.engine.settle()
        assert llm.engine.device.validation_messages() == []
    happened = {name for name, n in restless.n_seen.items() if n}
    assert {name for name in expected if "refused" not in name} <= happened
