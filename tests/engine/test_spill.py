"""Memory that a device refuses while a model is loaded costs slots, then layers; what others take
while it runs, slots: never the run."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.live import live_objects
from tests.samples import sampled
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.errors import OutOfMemoryError
from vkmoe.experts.store import memory_watch
from vkmoe.experts.store.memory_watch import KEPT_FREE_BYTES
from vkmoe.facts import DeviceInfo, Heap
from vkmoe.gpu import _native as native
from vkmoe.gpu.device import Device
from vkmoe.kernels.tuning import choose_tuning
from vkmoe.llm import demo_model_path
from vkmoe.placement.decide import MOST_ATTEMPTS
from vkmoe.placement.memory import device_budget, margin_for

TOKENS = [3, 7, 1, 9, 4, 2, 8, 5]
REFUSED = "VK_ERROR_OUT_OF_DEVICE_MEMORY"
GIB = 1 << 30


def logits_of(**asked: Any) -> tuple[bytes, Engine]:
    with Engine(demo_model_path(), EngineConfig(ctx_size=64, **asked), checks=True) as engine:
        engine.run_tokens(TOKENS, 0)
        return engine.full_logits().tobytes(), engine


class Full:
    """A device that has `n_bytes` for experts, whatever it says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
        allocate, self.refused = Device.allocate, list[int]()

        def refusing(device: Device, intent: Any, size: int, name: str) -> native.Buffer:
            if intent == "device" and name in ("experts", "expert slots") and size > n_bytes:
                self.refused.append(size)
                raise OutOfMemoryError(f"out of GPU memory for {name}", "close others", REFUSED)
            return allocate(device, intent, size, name)

        monkeypatch.setattr(Device, "allocate", refusing)


@pytest.fixture
def discrete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lavapipe says that its memory is its own: what does not fit is read over a bus."""
    init = Device.__init__

    def opened(device: Device, *args: Any) -> None:
        init(device, *args)
        heaps = tuple(replace(heap, size=2 * GIB, budget=None) for heap in device.info.heaps)
        device.info = replace(device.info, type="discrete", heaps=(*heaps, Heap(8 * GIB, False)))

    monkeypatch.setattr(Device, "__init__", opened)
    monkeypatch.setattr("vkmoe.engine.link_of_misses", lambda device: None)
    # Kernels of a GPU take this driver ten times as long.
    own = partial(replace, type="cpu")
    monkeypatch.setattr("vkmoe.engine.tuning_for", lambda info, _: choose_tuning(own(info)))


@pytest.mark.parametrize("mebibytes", [20, 8, 2])
@pytest.mark.sample(1)
def test_experts_that_are_refused_get_fewer_slots(
    mebibytes: int,
    discrete: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Or none; the text is the same to the bit."""
    before = live_objects()
    wanted, _ = logits_of()
    caplog.set_level(logging.WARNING)
    full = Full(monkeypatch, mebibytes << 20)
    found, engine = logits_of()
    assert found == wanted and full.refused
    assert engine.plan.mode.experts_in in ("cache", "host")
    assert engine.plan.sizing is not None
    buffers = [n for layout in engine.plan.layouts("expert slots") for n in layout.buffers]
    assert max(buffers, default=0) <= mebibytes << 20
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == len(full.refused)
    assert all("loading again with less on the device" in text for text in texts)
    assert live_objects() == before


def test_behind_the_experts_layers_go_to_the_host(
    discrete: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted, whole = logits_of()
    most = sum(n for layout in whole.plan.layouts("weights") for n in layout.buffers) * 2 // 3
    allocate = Device.allocate

    def refusing(device: Device, intent: Any, size: int, name: str) -> native.Buffer:
        if intent == "device" and name == "weights" and size > most:
            raise OutOfMemoryError("out of GPU memory for weights", "close others", REFUSED)
        return allocate(device, intent, size, name)

    monkeypatch.setattr(Device, "allocate", refusing)
    caplog.clear()
    found, engine = logits_of()
    assert found == wanted and 0 < engine.plan.host_layers < engine.spec.n_layers
    assert any("in host memory" in note for note in engine.plan.notes)
    assert "loading again with less on the device" in caplog.text


def test_where_memory_is_shared_experts_go_to_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in ("vkmoe.engine", "vkmoe.placement.decide"):  # which other tests' processes share
        monkeypatch.setattr(f"{module}.available_bytes", lambda: 4 * GIB)
    wanted, _ = logits_of()
    Full(monkeypatch, 1 << 20)
    found, engine = logits_of()
    assert found == wanted and engine.plan.mode.experts_in == "host"
    assert "loading again" in caplog.text


def test_hybrid_ends_with_all_experts_on_the_cpu(
    discrete: None, monkeypatch: pytest.MonkeyPatch, cpu_native: None
) -> None:
    Full(monkeypatch, 1 << 16)
    _, engine = logits_of(expert_mode="hybrid")
    assert engine.plan.mode.name == "cpu" and not engine.plan.expert_slots


@pytest.mark.parametrize(
    "asked", [{"expert_slots": 8}, {"expert_cache": "6MiB"}, {"expert_mode": "resident"}]
)
def test_what_was_asked_for_is_refused_with_it(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Full(monkeypatch, 1000)
    with pytest.raises(OutOfMemoryError, match="out of GPU memory for expert"):
        logits_of(**asked)
    assert len(full.refused) == 1


def test_other_memory_and_other_errors_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    n_opened = 0
    init = Device.__init__

    def counting(device: Device, *args: Any) -> None:
        nonlocal n_opened
        n_opened += 1
        init(device, *args)

    monkeypatch.setattr(Device, "__init__", counting)
    native.inject_failure("vkAllocateMemory", 2, "VK_ERROR_OUT_OF_HOST_MEMORY")
    with pytest.raises(OutOfMemoryError):
        logits_of()
    native.clear_injections()
    assert n_opened == 1


def test_a_device_that_refuses_again_and_again_is_one_error(
    discrete: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After the last attempt the first error comes up."""
    allocate = Device.allocate

    def refusing(device: Device, intent: Any, size: int, name: str) -> native.Buffer:
        if name == "expert table":
            raise OutOfMemoryError("out of GPU memory for the table", "close others", REFUSED)
        return allocate(device, intent, size, name)

    monkeypatch.setattr(Device, "allocate", refusing)
    with pytest.raises(OutOfMemoryError, match="for the table"):
        logits_of()
    texts = [record.getMessage() for record in caplog.records]
    assert 4 < len([text for text in texts if "loading again" in text]) <= MOST_ATTEMPTS


@pytest.mark.parametrize("kind", ["discrete", "cpu"])
@pytest.mark.parametrize(("budget", "usage"), [(None, None), (10, 1), (6, 0), (24, 23)])
def test_a_margin_for_some_bytes_leaves_as_many(
    kind: str, budget: int | None, usage: int | None
) -> None:
    """Or all there are, whatever a driver says of what others use."""
    sizes = [n * GIB if n is not None else None for n in (budget, usage)]
    info = DeviceInfo(
        0, "invented", kind, 0, "", "", (1, 3, 0), 32, True, frozenset(),
        (Heap(12 * GIB, True, *sizes), Heap(20 * GIB, False)), (), limits=None,  # type: ignore[arg-type]
    )  # fmt: skip
    most = device_budget(info, 30 * GIB, 1)
    for n_bytes in (GIB, 5 * GIB, 40 * GIB):
        found = device_budget(info, 30 * GIB, margin_for(info, 30 * GIB, n_bytes))
        assert min(n_bytes, most) - 2 <= found <= n_bytes


# ----- while it runs -----


def allocated(device: Device) -> int:
    return sum(device.native.memory_bytes())


class Crowded:
    """The device's memory: `n_over` bytes more are used than the driver grants, until freed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n_over, self.first = 0, -1
        init, heaps = Device.__init__, Device.heaps

        def opened(device: Device, *args: Any) -> None:
            init(device, *args)
            known = tuple(replace(heap, budget=GIB) for heap in device.info.heaps)
            device.info = replace(device.info, heaps=known)

        def now(device: Device) -> tuple[Heap, ...]:
            live = allocated(device)
            self.first = live if self.first < 0 else self.first
            used = GIB + self.n_over - (self.first - live)
            return tuple(replace(heap, budget=GIB, usage=used) for heap in heaps(device))

        monkeypatch.setattr(Device, "__init__", opened)
        monkeypatch.setattr(Device, "heaps", now)
        monkeypatch.setattr("vkmoe.gpu.arena.SLOT_CHUNK", 1 << 19)
        monkeypatch.setattr("vkmoe.experts.store.memory_watch.WATCH_SECONDS", 0.0)


def walk(engine: Engine, crowded: Crowded | None = None) -> list[bytes]:
    """Logits after each of some tokens; in the middle of them others take memory."""
    logits = []
    for position, token in enumerate(TOKENS * 2):
        if crowded is not None and position == 6:
            crowded.n_over = 3 << 19
        engine.run_token(token, position)
        logits.append(engine.full_logits().tobytes())
    return logits


def test_slots_are_given_back_where_others_take_memory(
    discrete: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And come back. The text stays the same; the driver's budget is kept to; with one line."""
    path = demo_model_path()
    with Engine(path, EngineConfig(ctx_size=64)) as engine:
        expected = walk(engine)
    crowded = Crowded(monkeypatch)
    config = EngineConfig(ctx_size=64, expert_slots=16, promote_on_read=True)
    with Engine(path, config, checks=True) as engine:
        before = allocated(engine.device)
        assert walk(engine, crowded) == expected
        freed = before - allocated(engine.device)
        assert 3 << 19 <= freed < 5 << 19
        assert engine.cache is not None
        n_slots = int(engine.cache.residency.locations.capacities.sum())
        crowded.n_over = freed - KEPT_FREE_BYTES  # as much is free as is to stay so
        engine.run_tokens(TOKENS, engine.rewind(0, 0))
        assert allocated(engine.device) == before - freed
        crowded.n_over -= freed
        engine.rewind(0, 0)
        assert walk(engine) == expected and allocated(engine.device) == before
        assert engine.cache.residency.locations.capacities.sum() == 6 * 16
    (message,) = (text for text in caplog.messages if "given back" in text)
    assert n_slots < 6 * 16 and f"{6 * 16 - n_slots} experts fewer have a slot" in message


@pytest.mark.usefixtures("cpu_native")
@pytest.mark.parametrize("way", sampled(["hybrid", "resident"], "hybrid".__eq__))
def test_what_may_not_be_given_back_is_a_warning(
    way: str, discrete: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Which experts are the CPU's may not depend on other programs."""
    crowded = Crowded(monkeypatch)
    asked: dict[str, Any] = {"expert_slots": 16} if way == "hybrid" else {}
    config = EngineConfig(ctx_size=64, expert_mode=way, **asked)  # type: ignore[arg-type]
    with Engine(demo_model_path(), config) as engine:
        before = allocated(engine.device)
        walk(engine, crowded)
        assert allocated(engine.device) >= before
    (message,) = (text for text in caplog.messages if "other programs" in text)
    assert "close them, or start again" in message


@pytest.mark.parametrize("exchanges", [False, True])
def test_places_in_host_memory_are_given_back_where_others_take_it(
    exchanges: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And come back. Their experts are read from the file meanwhile; the text stays the same."""
    free = 4 * GIB
    monkeypatch.setattr(memory_watch, "available_bytes", lambda: free)
    monkeypatch.setattr(memory_watch, "WATCH_SECONDS", 0.0)
    monkeypatch.setattr("vkmoe.gpu.arena.SLOT_CHUNK", 1 << 19)
    caplog.set_level(logging.INFO, "vkmoe")
    with Engine(demo_model_path(), EngineConfig(ctx_size=64)) as engine:
        expected = walk(engine)
    config = EngineConfig(ctx_size=64, expert_mode="cache", host_pool="16MiB")
    config = replace(config, expert_slots=14) if exchanges else config
    with Engine(demo_model_path(), config, checks=True) as engine:
        assert engine.cache is not None and engine.cache.pool is not None
        assert engine.plan.exchanges == exchanges
        places, before = engine.cache.pool.locations, allocated(engine.device)
        n_places = int(places.capacities.sum())
        for n_free, n_left in ((GIB, 2 * 32), (4 * GIB, n_places)):
            assert walk(engine) == expected
            engine.rewind(0, 0)
            free = n_free
            assert walk(engine) == expected
            engine.rewind(0, 0)
            assert n_left <= places.capacities.sum() < n_left + 24  # chunks have ten
            assert engine.cache.reads_file == (not exchanges or n_free == GIB)
            engine.cache.check_integrity()
        assert allocated(engine.device) == before
    texts = [text for text in caplog.messages if "host memory" in text and "MiB were" in text]
    assert [" ".join(text.split()[:2]) for text in texts] == ["other programs", "host memory"]
