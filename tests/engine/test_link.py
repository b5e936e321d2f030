"""The link is measured where misses cross one, and a slow one is told of."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from vkmoe.cli import main
from vkmoe.engine import Engine
from vkmoe.gpu.device import Device
from vkmoe.gpu.link_speed import LinkSpeed


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
        engine: Any = SimpleNamespace(device=device, plan=SimpleNamespace(experts_in=experts_in))
        link = Engine._measure_link(engine)
    assert (link is not None) == measured
    assert link is None or min(link) > 0


@pytest.mark.parametrize(("read", "told"), [(4e9, True), (11e9, False)])
def test_a_gpu_that_reads_slowly_is_told_of(
    read: float, told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Engine, "_measure_link", lambda engine: LinkSpeed(read, 12e9))
    assert main(["generate", "-p", "x", "-n", "1", "--expert-slots", "8"]) == 0
    assert ("4.0 GB/s" in capsys.readouterr().err) == told
