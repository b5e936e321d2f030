"""Which layers' experts the CPU computes beside a GPU, in their order."""

from __future__ import annotations

import pytest

from vkmoe.execute.cpu_worker import CpuWorker


def listed_turns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list to which every MoE layer is added whose experts the CPU begins to compute."""
    turns: list[int] = []
    compute = CpuWorker.compute

    def listed(self: CpuWorker, layer: int) -> None:
        turns.append(layer)
        compute(self, layer)

    monkeypatch.setattr(CpuWorker, "compute", listed)
    return turns
