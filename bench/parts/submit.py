"""Part `submit`: what an empty submit costs, and what the ways to wait for one cost (B 1).

A submit of known length shows how late each way of waiting wakes up: wall clock minus the device's
own time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bench.measure import Row, percentile, summarise
from bench.parts.common import MIB, Settings
from vkmoe.gpu.device import Device, translate_errors

if TYPE_CHECKING:
    from vkmoe.gpu import _native

__all__ = ["measure"]

POLL_NS = 1  # an expected time that is over at once: the wait polls from the start
BUSY_SECONDS = 0.003
BUSY_SUBMITS = 20  # per repeat: enough for a p99 that is not one accident
BUSY_BYTES = 4 * MIB


def measure(device: Device, settings: Settings) -> dict[str, Any]:
    """Rows of microseconds: empty submits by way of waiting, then wake-up delays."""
    empty = device.native.recorder().finish()
    median_ns = int(1e9 * _median(_submits(device, empty, 50, 0)))
    ways = {"block": 0, "sleep then poll": max(median_ns, 2), "poll": POLL_NS}
    taken: dict[str, list[float]] = {way: [] for way in ways}
    alone: list[float] = []
    per_turn = max(1, settings.submits // settings.repeats)
    for _ in range(settings.repeats):  # in turns, so that a slow second hits every way
        for way, expected_ns in ways.items():
            taken[way] += _submits(device, empty, per_turn, expected_ns)
        alone += _submit_calls(device, empty, max(1, per_turn // 4))
    rows = [_row(f"empty submit + wait: {way}", values) for way, values in taken.items()]
    rows.append(_row("the submit call alone", alone, "of it, until submit returns"))
    return {"rows": rows + _wake_ups(device, settings)}


def _submits(
    device: Device, recording: _native.Recording, count: int, expected_ns: int
) -> list[float]:
    seconds = []
    with translate_errors("submitting"):
        for _ in range(count):
            started = time.perf_counter()
            device.native.submit(recording).wait(expected_ns)
            seconds.append(time.perf_counter() - started)
    return seconds


def _submit_calls(device: Device, recording: _native.Recording, count: int) -> list[float]:
    seconds = []
    with translate_errors("submitting"):
        for _ in range(count):
            started = time.perf_counter()
            submission = device.native.submit(recording)
            seconds.append(time.perf_counter() - started)
            submission.wait()
    return seconds


def _wake_ups(device: Device, settings: Settings) -> list[Row]:
    """How much later than the device the host goes on, with a submit of about BUSY_SECONDS."""
    busy, seconds = _busy(device)
    ways: dict[str, Callable[[], int]] = {
        "block": lambda: 0,
        "sleep then poll": lambda: int(seconds * 1e9),
    }
    late: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(settings.repeats):
        for way, expected_ns in ways.items():
            for _ in range(BUSY_SUBMITS):
                wall = _submits(device, busy, 1, expected_ns())[0]
                start, end = busy.timestamps()
                late[way].append(wall - (end - start) / 1e9)
    label = f"wall minus device time of a {seconds * 1e3:.1f} ms submit"
    return [_row(f"{label}: {way}", values) for way, values in late.items()]


def _busy(device: Device) -> tuple[_native.Recording, float]:
    """A recording of fills that takes about BUSY_SECONDS on the device."""
    buffer = device.allocate("device", BUSY_BYTES, "busy")

    def record(n_fills: int) -> _native.Recording:
        recorder = device.native.recorder(n_timestamps=2)
        recorder.timestamp(0)
        for _ in range(n_fills):
            recorder.barrier()
            recorder.fill(buffer, 0, BUSY_BYTES, 0)
        recorder.timestamp(1)
        return recorder.finish()

    n_fills = 1
    while True:
        recording = record(n_fills)
        seconds = []
        for _ in range(3):
            _submits(device, recording, 1, 0)
            start, end = recording.timestamps()
            seconds.append((end - start) / 1e9)
        if _median(seconds) >= BUSY_SECONDS / 2 or n_fills >= 4096:
            return recording, _median(seconds)
        n_fills *= 2


def _row(what: str, seconds: list[float], note: str = "") -> Row:
    micros = [1e6 * value for value in seconds]
    spread = f"p50 {percentile(micros, 50):.1f} p99 {percentile(micros, 99):.1f}"
    return Row(what, summarise(micros), "us", "wall", f"{spread} {note}".strip())


def _median(values: list[float]) -> float:
    return percentile(values, 50)
