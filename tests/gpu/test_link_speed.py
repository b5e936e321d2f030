"""The speed of the link: what the user is told, and that measuring it leaves nothing behind."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.live import live_objects
from tests.samples import sampled
from vkmoe.errors import GpuError, OutOfMemoryError
from vkmoe.facts import Heap
from vkmoe.gpu import _native as native
from vkmoe.gpu import link_speed
from vkmoe.gpu.device import Device
from vkmoe.gpu.link_speed import LinkSpeed, best_of, measure_link
from vkmoe.placement.forecast.measured import measure_gather

# What an open device keeps: the commands that the next upload takes, and the fences of submits, of
# which two may be under way.
KEPT = Counter(
    ("instance", "device", "command_pool", "command_buffer", "query_pool", "fence", "fence")
)


@pytest.fixture
def device() -> Iterator[Device]:
    """Nothing that was made from it may be left at the end."""
    before = Counter(live_objects())
    with Device(os.environ.get("VKMOE_DEVICE")) as opened:
        yield opened
        native.clear_injections()
        gc.collect()
        assert Counter(native.live_objects()) - before <= KEPT
        assert sum(opened.native.memory_bytes()) == 0
    assert native.live_objects() == before


def test_slow_reads_are_told_with_both_figures() -> None:
    slow = LinkSpeed(4.06e9, 11.94e9)
    assert slow.note() == (
        "this GPU reads host memory at 4.1 GB/s but copies at 11.9: "
        "misses are expensive; a larger --expert-cache helps"
    )


@pytest.mark.parametrize("read", [6e9, 9e9, 12e9, 40e9])
def test_reads_at_half_the_copy_speed_or_more_are_not_worth_a_note(read: float) -> None:
    speed = LinkSpeed(read, 12e9)
    assert speed.note() is None


def test_a_faster_way_to_fetch_is_what_counts() -> None:
    gathered = LinkSpeed(4.06e9, 11.94e9, 9.8e9)
    assert gathered.note() is None
    assert gathered.miss_bytes_per_second == 9.8e9
    assert "at 4.9 GB/s" in str(LinkSpeed(4.06e9, 11.94e9, 4.9e9).note())


def test_this_device_gathers_at_a_speed(device: Device) -> None:
    assert 1e6 < measure_gather(device) < 1e13


def test_this_device_has_a_speed(device: Device) -> None:
    speed = measure_link(device)
    assert 1e6 < speed.read_bytes_per_second < 1e13
    assert 1e6 < speed.copy_bytes_per_second < 1e13


def test_a_small_heap_beside_that_of_the_device_is_no_bound(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window of 256 MiB that the host can write: a sixteenth of that would fit into caches."""
    taken, allocate = [], device.allocate

    def noted(intent: Any, n_bytes: int, name: Any) -> Any:
        taken.append(n_bytes)
        return allocate(intent, n_bytes, name)

    monkeypatch.setattr(device, "allocate", noted)
    assert link_speed.measure_memory(device) > 0
    window = Heap(size=1 << 20, device_local=True)
    monkeypatch.setattr(device, "info", replace(device.info, heaps=(*device.info.heaps, window)))
    assert link_speed.measure_memory(device) > 0
    assert taken[0] == taken[1] >= 64 << 20


def test_the_best_of_the_repeats_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Invented:
        def __init__(self, *speeds: float) -> None:
            self._speeds = iter(speeds)

        def bytes_per_second(self) -> float:
            return next(self._speeds)

    monkeypatch.setattr(link_speed, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(link_speed, "MIN_ROUNDS", 4)
    reads: list[Any] = [Invented(2e9, 5e9), Invented(3e9, 1e9)]  # taken in turns
    copy: Any = Invented(7e9, 8e9, 9e9, 6e9)
    assert best_of(reads, [copy]) == [5e9, 9e9]


def test_without_timestamps_the_wall_clock_counts(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Extension:
        """The device without timestamps."""

        def has_timestamps(self, queue: str = "compute") -> bool:
            return False

        def __getattr__(self, name: str) -> Any:
            return getattr(extension, name)

    extension = device.native
    monkeypatch.setattr(device, "native", Extension())
    speed = measure_link(device)
    monkeypatch.undo()
    assert speed.read_bytes_per_second > 1e6 and speed.copy_bytes_per_second > 1e6


def test_a_counter_that_starts_again_is_not_believed(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native.Submission, "interval", lambda submission: None)
    speed = measure_link(device)
    assert 1e6 < speed.copy_bytes_per_second < 1e13


@pytest.mark.parametrize(
    "call",
    sampled(["vkAllocateMemory", "vkQueueSubmit", "vkCreateQueryPool"], "vkQueueSubmit".__eq__),
)
def test_a_failure_leaves_nothing(device: Device, call: str) -> None:
    """At the first, second, ... such call; the fixture looks at what is left."""
    for after, measure in ((a, m) for a in range(3) for m in (measure_link, measure_gather)):
        if measure is measure_gather and call == "vkCreateQueryPool" and after:
            continue  # it has only one
        native.inject_failure(call, after)
        with pytest.raises(GpuError) as caught:
            measure(device)
        assert isinstance(caught.value, OutOfMemoryError) and caught.value.result
        del caught
        gc.collect()
        assert sum(device.native.memory_bytes()) == 0
