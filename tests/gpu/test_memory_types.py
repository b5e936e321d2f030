"""The choice of memory types on devices that are not here."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu.invented import (
    AMD,
    APU,
    DEVICES,
    DISCRETE_12,
    LAVAPIPE,
    NO_WINDOW,
    NOT_COHERENT,
    SMALL_WINDOW,
)
from vkmoe.facts import DeviceInfo, MemoryType
from vkmoe.gpu.device import EXCLUDED, Intent, memory_type_candidates

FACTS = Path(__file__).resolve().parent.parent.parent / "vkmoe" / "gpu" / "native" / "facts.cpp"
INTENTS: list[Intent] = ["device", "host", "readback", "bar"]
BEST = [
    (SMALL_WINDOW, {"device": 1, "host": 2, "readback": 3, "bar": 4}),
    (DISCRETE_12, {"device": 0, "host": 1, "readback": 2, "bar": 3}),
    (AMD, {"device": 5, "host": 6, "readback": 7, "bar": 8}),
    (NO_WINDOW, {"device": 0, "host": 1, "readback": 2, "bar": 0}),
    (APU, {"device": 4, "host": 4, "readback": 3, "bar": 2}),
    (LAVAPIPE, {"device": 0, "host": 0, "readback": 0, "bar": 0}),
    (NOT_COHERENT, {"device": 1, "host": 1, "readback": 0, "bar": 1}),
]


@pytest.mark.parametrize(("info", "best"), BEST, ids=lambda item: getattr(item, "name", ""))
def test_the_best_type(info: DeviceInfo, best: dict[Intent, int]) -> None:
    assert {intent: memory_type_candidates(info, intent)[0] for intent in INTENTS} == best


@pytest.mark.parametrize("info", DEVICES, ids=lambda info: info.name)
@pytest.mark.parametrize("intent", INTENTS)
def test_every_candidate_serves_its_intent(info: DeviceInfo, intent: Intent) -> None:
    """None is excluded, none twice; what the CPU touches is mapped, what it writes is coherent."""
    candidates = memory_type_candidates(info, intent)
    assert candidates and len(set(candidates)) == len(candidates)
    for index in candidates:
        flags = info.memory_types[index].flags
        assert not flags & EXCLUDED
        if intent in ("device", "bar"):
            assert info.is_uma or "DEVICE_LOCAL" in flags
        if intent in ("host", "readback"):
            assert "HOST_VISIBLE" in flags
        if intent != "readback":  # the one that is invalidated by hand
            assert "HOST_COHERENT" in flags or "HOST_VISIBLE" not in flags


def test_weights_keep_out_of_the_window() -> None:
    """The mapped window of a card is the last place for weights, never the first."""
    assert memory_type_candidates(SMALL_WINDOW, "device") == [1, 4]


def test_tables_are_in_the_window_and_else_in_unmapped_device_memory() -> None:
    """Never in host memory on a card, not even when all else is refused."""
    assert memory_type_candidates(SMALL_WINDOW, "bar") == [4, 1]
    assert memory_type_candidates(DISCRETE_12, "bar") == [3, 0]
    assert memory_type_candidates(AMD, "bar") == [8, 5]
    assert memory_type_candidates(NO_WINDOW, "bar") == [0]


def test_tables_need_no_flush() -> None:
    """A window that is not coherent is passed over: tables are written without a flush."""
    stale = MemoryType(0, frozenset({"DEVICE_LOCAL", "HOST_VISIBLE"}))
    info = replace(NO_WINDOW, memory_types=(stale, *NO_WINDOW.memory_types))
    assert memory_type_candidates(info, "bar") == [1]


def test_homes_are_in_host_memory_on_cards() -> None:
    for info in (SMALL_WINDOW, DISCRETE_12, AMD):
        first = memory_type_candidates(info, "host")[0]
        assert not info.heaps[info.memory_types[first].heap].device_local


def test_excluded_flags_are_names_the_extension_uses() -> None:
    """A flag spelled otherwise would exclude nothing."""
    names = set(re.findall(r'VK_MEMORY_PROPERTY_\w+, "(\w+)"', FACTS.read_text()))
    assert "HOST_VISIBLE" in names and names >= EXCLUDED
