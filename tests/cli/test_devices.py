"""`vkmoe devices` on devices that are odd."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.gpu.invented import DISCRETE_12
from vkmoe.cli import main
from vkmoe.gpu import device


def test_a_device_without_memory_is_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Old drivers list cards they do not know like this."""
    bare = replace(DISCRETE_12, heaps=(), memory_types=())
    monkeypatch.setattr(device, "list_devices", lambda: [bare])
    assert main(["devices"]) == 0
    assert "12 GB discrete (discrete, no memory, Vulkan 1.3" in capsys.readouterr().out
