"""The plan's arithmetic against real arenas, and heaps by memory type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.gpu.invented import AMD, APU, DISCRETE_12, NO_WINDOW, SMALL_WINDOW
from vkmoe.facts import DeviceInfo
from vkmoe.gpu.arena import Arena, lay_out_spans
from vkmoe.gpu.device import Device, Intent
from vkmoe.placement.memory import (
    GRANULARITY,
    allocated,
    allocation,
    is_mapped,
    layout_bytes,
)

CAP = 64 << 10
SPANS = {
    "one": [100],
    "alike": [5000] * 60,
    "two sizes in turn": [5000, 9000] * 20,
    "large behind small": [300] * 200 + [60_000] * 3,
    "nothing fits the tail": [40_000] * 5,
    "ragged": [1, 255, 256, 257, 0, 65_000, 3],
}


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with Device() as opened:
        yield opened


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_an_arena_takes_what_was_computed(
    device: Device, monkeypatch: pytest.MonkeyPatch, spans: list[int]
) -> None:
    """Buffer by buffer, and within the rounding of each, on a device that allocates little."""
    limits = replace(device.info.limits, max_memory_allocation_size=CAP, max_buffer_size=CAP)
    monkeypatch.setattr(device, "info", replace(device.info, limits=limits))
    layout = lay_out_spans(device.info, spans)
    arena = Arena(device, "device", "test", layout)
    for span in spans:
        arena.place(span)
    taken = [chunk.size for chunk in arena.chunks]
    arena.close()
    assert taken == list(layout.buffers)
    assert sum(taken) <= layout_bytes([layout]) < sum(taken) + len(taken) * GRANULARITY


def test_no_spans_take_nothing() -> None:
    assert layout_bytes([lay_out_spans(DISCRETE_12, [])]) == 0


def test_allocations_are_rounded_up() -> None:
    assert allocated(1) == allocated(GRANULARITY) == GRANULARITY
    assert allocated(GRANULARITY + 1) == 2 * GRANULARITY


@pytest.mark.parametrize(
    ("info", "heaps"),
    [
        (SMALL_WINDOW, {"device": 0, "host": 1, "readback": 1, "bar": 2}),
        (DISCRETE_12, {"device": 0, "host": 1, "readback": 1, "bar": 0}),
        (AMD, {"device": 0, "host": 1, "readback": 1, "bar": 0}),
        (NO_WINDOW, {"device": 0, "host": 1, "readback": 1, "bar": 0}),
    ],
    ids=lambda item: getattr(item, "name", None),
)
def test_intents_have_heaps(info: DeviceInfo, heaps: dict[Intent, int]) -> None:
    lines = {intent: allocation(info, "item", intent, "reason") for intent in heaps}
    assert {intent: line.heap for intent, line in lines.items()} == heaps
    assert allocation(info, "item", "device", "reason", "tensors").heap == 0


def test_memory_that_is_not_mapped() -> None:
    assert not is_mapped(DISCRETE_12, "device") and is_mapped(DISCRETE_12, "bar")
    assert not is_mapped(NO_WINDOW, "bar")
    assert is_mapped(APU, "device") and is_mapped(AMD, "host")
