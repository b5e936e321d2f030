"""The link is measured where misses cross one, and a slow one is told of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.engine.tiny import model_path
from vkmoe.batch import BatchKind
from vkmoe.cli import main
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.execute.segments import (
    SHARED_BYTES_PER_SECOND,
    TARGET_S,
    part_bytes,
    submit_speed,
)
from vkmoe.facts import Heap
from vkmoe.gpu import _native as native
from vkmoe.gpu.device import Device
from vkmoe.gpu.link_speed import LinkSpeed
from vkmoe.modes import Cache
from vkmoe.placement.forecast.measured import link_of_misses

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.mark.parametrize(
    ("kind", "measured"), [("discrete", True), ("cpu", False), ("integrated", False)]
)
def test_only_a_link_that_there_is_is_measured(
    kind: str, measured: bool, nothing_left: None
) -> None:
    with Device() as device:
        device.info = replace(device.info, type=kind)
        link = link_of_misses(device)
    assert (link is not None) == measured
    assert link is None or min(link) > 0


@pytest.mark.parametrize("mebibytes", [32, 64, 192, 4096])
def test_measuring_takes_a_small_part_of_the_smallest_heap(mebibytes: int) -> None:
    with Device() as device:
        heaps = (Heap(64 << 30, device_local=False), Heap(mebibytes << 20, device_local=True))
        device.info = replace(device.info, type="discrete", heaps=heaps)
        link = link_of_misses(device)
        assert (link is not None) == (mebibytes >= 64)
        assert link is None or min(link) > 0, "read, copied and gathered"
        limit = min(mebibytes << 17, 64 << 20)  # an eighth: host and device memory
        assert sum(device.native.memory_peak_bytes()) <= limit + (1 << 20)
        assert sum(device.native.memory_bytes()) == 0


def test_a_failed_measurement_stops_nothing(
    nothing_left: None, caplog: pytest.LogCaptureFixture
) -> None:
    with Device() as device:
        device.info = replace(device.info, type="discrete")
        native.inject_failure("vkAllocateMemory")
        assert link_of_misses(device) is None
    assert "could not be measured" in caplog.text


@pytest.mark.parametrize(("read", "told"), [(4e9, True), (11e9, False)])
def test_a_gpu_that_reads_slowly_is_told_of(
    read: float, told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vkmoe.engine.link_of_misses", lambda device: LinkSpeed(read, 12e9))
    assert main(["generate", "-p", "x", "-n", "1", "--expert-slots", "8"]) == 0
    assert ("4.0 GB/s" in capsys.readouterr().err) == told


READ, GATHER = 4e9, 9e9


@pytest.mark.parametrize(
    ("kind", "link", "way", "speed"),
    [
        ("discrete", LinkSpeed(READ, 12e9, GATHER), "read", READ),
        ("discrete", LinkSpeed(READ, 12e9, GATHER), "gather", GATHER),
        ("discrete", LinkSpeed(READ, 12e9), "gather", READ),  # gathering was not measured
        ("discrete", None, "read", None),
        ("integrated", None, "read", SHARED_BYTES_PER_SECOND),
        ("cpu", None, "read", None),  # no watchdog
    ],
)
def test_submits_are_bounded_by_the_speed_at_which_misses_are_served(
    kind: Any, link: LinkSpeed | None, way: Any, speed: float | None
) -> None:
    with Device() as device:
        info = replace(device.info, type=kind)
    assert submit_speed(info, link, Cache(way)) == speed


@pytest.mark.parametrize("miss", ["read", "gather"])
def test_the_programs_are_cut_by_that_speed(miss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that reads too slowly for one submit, and gathers fast enough."""
    link = LinkSpeed(1e3, 12e9, 12e9)
    monkeypatch.setattr("vkmoe.engine.link_of_misses", lambda device: link)
    config = EngineConfig(ctx_size=32, expert_slots=2, miss=miss)
    with Engine(model_path("moe_plain"), config) as engine:
        n_submits = len(engine._programs.recorded[BatchKind("decode", 1, 1)].segments)
        assert (n_submits == 1) == (miss == "gather")


@pytest.mark.usefixtures("own_device")
def test_the_work_of_an_integrated_gpu_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """By all weights: a fake one, whose memory is as slow as a token takes two submits."""
    real = Device.__init__

    def integrated(self: Device, *arguments: Any, **named: Any) -> None:
        real(self, *arguments, **named)
        self.info = replace(self.info, type="integrated")

    monkeypatch.setattr(Device, "__init__", integrated)
    path, config = model_path("moe_plain"), EngineConfig(ctx_size=32)
    with Engine(path, config) as engine:
        assert len(engine._programs.recorded[BatchKind("decode", 1, 1)].segments) == 1
        wanted = engine.run_token(3, 0)
        weights = engine._programs._recorder.decoder.weights
        n_bytes = sum(part_bytes(weights, 1, [0] * engine.spec.n_layers))
    monkeypatch.setattr("vkmoe.execute.segments.SHARED_BYTES_PER_SECOND", n_bytes / TARGET_S)
    with Engine(path, config) as engine:
        assert len(engine._programs.recorded[BatchKind("decode", 1, 1)].segments) > 1
        found = engine.run_token(3, 0)
    assert found is not None and wanted is not None
    assert found.logits.tobytes() == wanted.logits.tobytes()
