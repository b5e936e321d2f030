"""The plan's arithmetic against real arenas, and heaps by memory type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.gpu.invented import AMD, APU, DISCRETE_12, NO_WINDOW, SMALL_WINDOW
from vkmoe.facts import READ_IN_PLACE, DeviceInfo, ExpertMode
from vkmoe.gpu.arena import Arena, lay_out_spans
from vkmoe.gpu.device import Device, Intent
from vkmoe.placement.allocations import (
    GRANULARITY,
    allocated,
    arena_bytes,
    heap_of,
    is_mapped,
    layout_bytes,
    tensor_heap,
)
from vkmoe.placement.misses import N_LANDING
from vkmoe.placement.pools import SlotLayout, split_slots

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
    assert arena_bytes(DISCRETE_12, []) == 0


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
    assert {intent: heap_of(info, intent) for intent in heaps} == heaps
    assert tensor_heap(info) == 0


def test_memory_that_is_not_mapped() -> None:
    assert not is_mapped(DISCRETE_12, "device") and is_mapped(DISCRETE_12, "bar")
    assert not is_mapped(NO_WINDOW, "bar")
    assert is_mapped(APU, "device") and is_mapped(AMD, "host")


# ----- slots -----


@pytest.mark.parametrize(
    ("n_bytes", "slots"),
    [(-1, (0, 0)), (0, (0, 0)), (3 * 256 - 1, (0, 0)), (3 * 256, (1, 1)), (4 * 256, (2, 1)),
     (5 * 256, (2, 1)), (6 * 256, (2, 2)), (30 * 256, (8, 8))],
)  # fmt: skip
def test_bytes_are_split_evenly(n_bytes: int, slots: tuple[int, ...]) -> None:
    """A layer of 256 and one of 512 bytes per slot, 8 experts."""
    assert split_slots(n_bytes, (256, 512), 8) == slots


def test_a_rest_may_be_enough_for_a_later_layer_only() -> None:
    assert split_slots(2 * 768 + 256, (512, 256), 8) == (2, 3)


PROMOTE, GATHER = ExpertMode("cache", promote=True), ExpertMode("cache", "gather")
MODES = {"read": READ_IN_PLACE, "promote": PROMOTE, "gather": GATHER}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("n_bytes", [0, 10_000, 600_000, 5_000_000, 5_065_536, 1 << 30, 3 << 30])
def test_the_largest_slots_fit_and_one_more_would_not(n_bytes: int, mode: ExpertMode) -> None:
    """With the slots that each layer has to land in."""
    layout = SlotLayout(DISCRETE_12, (50_176, 100_096, 50_176), 10**6, 8, mode)
    slots = layout.largest(n_bytes)
    if not any(slots):
        assert layout.n_bytes((1, 1, 1)) > n_bytes
        return
    assert layout.n_bytes(slots) <= n_bytes
    assert layout.n_bytes(tuple(n + 1 for n in slots)) > n_bytes


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("n_slots", [1, 5, 21_399, 21_400])
def test_landing_slots_are_of_the_same_arenas(n_slots: int, mode: ExpertMode) -> None:
    """Their bytes are what the arenas take more; layers without slots have nowhere to land."""
    layout = SlotLayout(DISCRETE_12, (50_176, 100_096, 50_176), 10**6, 8, mode)
    own, landing = layout.own_bytes((n_slots,) * 3), layout.landing_bytes((n_slots,) * 3)
    n_landing = N_LANDING if mode.promote else 0
    assert own + landing == layout.n_bytes((n_slots,) * 3)
    without = replace(layout, mode=READ_IN_PLACE)
    assert own + landing == without.own_bytes((n_slots + n_landing,) * 3)
    assert layout.n_bytes((0, 0, 0)) == 0


def test_gathered_experts_have_room_for_the_largest() -> None:
    for mode in MODES.values():
        layout = SlotLayout(DISCRETE_12, (50_176, 100_096, 50_176), 10**6, 8, mode)
        assert layout.n_gathered == (8 if mode.gathers else 0)
        assert layout.gather_bytes == arena_bytes(DISCRETE_12, [100_096] * layout.n_gathered)
