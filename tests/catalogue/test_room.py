"""Whether a model has room beside others, by the plans that it would have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.gpu.invented import DISCRETE_12
from vkmoe.catalogue.choose import _heaps, has_room
from vkmoe.config import EngineConfig
from vkmoe.facts import Allocation, Heap, MemoryPlan
from vkmoe.kv_types import both
from vkmoe.llm import demo_model_path
from vkmoe.modes import Resident

GIB = 1 << 30
OTHER = MemoryPlan(256, both("f16"), Resident(), (Allocation("weights", "device", 8 * GIB, "big"),))


@pytest.mark.parametrize(
    ("free", "others", "fits"), [(8 * GIB, [OTHER], True), (1 << 22, [OTHER], False)]
)
def test_a_model_has_room_where_its_plan_has(
    monkeypatch: pytest.MonkeyPatch, free: int, others: list[MemoryPlan], fits: bool
) -> None:
    monkeypatch.setattr("vkmoe.catalogue.choose.available_bytes", lambda: free)
    config = EngineConfig(device="cpu", ctx_size=256)
    assert has_room(demo_model_path(), config, [OTHER]) is fits


def test_what_others_take_counts_once_where_the_driver_reports_it() -> None:
    local = Heap(12 * GIB, True)
    silent = replace(DISCRETE_12, heaps=(local, Heap(32 * GIB, False)))
    with_them, without = _heaps(silent, 8 * GIB)
    assert (with_them.heaps[0].size, without.heaps[0].size) == (4 * GIB, 12 * GIB)
    assert with_them.heaps[1] == without.heaps[1] == silent.heaps[1]
    told = replace(DISCRETE_12, heaps=(replace(local, budget=11 * GIB, usage=9 * GIB),))
    with_them, without = _heaps(told, 8 * GIB)
    assert with_them == told and without.heaps[0].usage == GIB
