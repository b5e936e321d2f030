"""The link is measured where misses cross one, and a slow one is told of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vkmoe.cli import main
from vkmoe.facts import Heap, MemoryPlan, PlanLine
from vkmoe.gpu import _native as native
from vkmoe.gpu.device import Device
from vkmoe.gpu.link_speed import LinkSpeed
from vkmoe.placement.link import link_of_misses


def planned(experts_in: Any, n_bytes: int = 64 << 20) -> MemoryPlan:
    return MemoryPlan(64, "f16", experts_in, (PlanLine("all", "device", n_bytes, "invented"),))


@pytest.mark.parametrize(
    ("kind", "experts_in", "measured"),
    [("discrete", "cache", True), ("discrete", "host", True), ("discrete", "device", False),
     ("cpu", "cache", False), ("integrated", "cache", False)],
)  # fmt: skip
def test_only_a_link_that_misses_cross_is_measured(
    kind: str, experts_in: str, measured: bool, nothing_left: None
) -> None:
    with Device() as device:
        device.info = replace(device.info, type=kind)
        link = link_of_misses(device, planned(experts_in))
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
        assert link_of_misses(device, planned("cache")) is None
    assert "could not be measured" in caplog.text


@pytest.mark.parametrize(("read", "told"), [(4e9, True), (11e9, False)])
def test_a_gpu_that_reads_slowly_is_told_of(
    read: float, told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vkmoe.engine.link_of_misses", lambda device, plan: LinkSpeed(read, 12e9))
    assert main(["generate", "-p", "x", "-n", "1", "--expert-slots", "8"]) == 0
    assert ("4.0 GB/s" in capsys.readouterr().err) == told
