"""This module measures what submits and dispatches cost.

Two parts of `vkmoe bench transfer`: `submit` (an empty submit, the ways to wait for one, and how
late each wakes up), and `dispatch` (a workgroup with and without a barrier).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from vkmoe.bench.clock import MIB, check_or_raise, timed_in_turns
from vkmoe.bench.measure import Row, percentile, summarise
from vkmoe.gpu.backend import Recording
from vkmoe.gpu.device import Device, translate_errors
from vkmoe.gpu.program import Program
from vkmoe.gpu.runner import Runner, time_recording
from vkmoe.kernels.logits.cases import EMPTIEST

if TYPE_CHECKING:
    from vkmoe.bench.transfer import Settings

POLL_NS = 1  # an expected time that is over at once: the wait polls from the start
BUSY_SECONDS = 0.003
BUSY_SUBMITS = 20  # per repeat: enough for a p99 that is not one accident
BUSY_BYTES = 4 * MIB


# ----- submit -----


class _Submit(NamedTuple):
    """Holds seconds of a submit."""

    call: float  # until it returns
    whole: float  # until the wait is over


def measure_submits(device: Device, settings: Settings) -> dict[str, Any]:
    """Measure microseconds of empty submits by way of waiting, then how late each wakes up."""
    empty = device.native.recorder().finish()
    median = percentile([each.whole for each in _submits(device, empty, 50, 0)], 50)
    ways = {"block": 0, "sleep then poll": max(int(1e9 * median), 2), "poll": POLL_NS}
    taken: dict[str, list[_Submit]] = {way: [] for way in ways}
    for _ in range(settings.repeats):  # in turns, so that a slow second hits every way
        for way, expected_ns in ways.items():
            n_submits = max(1, settings.submits // settings.repeats)
            taken[way] += _submits(device, empty, n_submits, expected_ns)
    rows = [
        _row(f"empty submit + wait: {way}", [each.whole for each in submits])
        for way, submits in taken.items()
    ]
    calls = [each.call for each in taken["block"]]
    rows.append(_row("the submit call alone", calls, "of it, until submit returns"))
    timed = device.native.has_timestamps()
    return {"rows": rows + (_wake_ups(device, settings) if timed else [])}


def _submits(device: Device, recording: Recording, count: int, expected_ns: int) -> list[_Submit]:
    taken = []
    with translate_errors("submitting"):
        for _ in range(count):
            started = time.perf_counter()
            submission = device.native.submit(recording)
            returned = time.perf_counter()
            submission.wait(expected_ns)
            taken.append(_Submit(returned - started, time.perf_counter() - started))
    return taken


def _wake_ups(device: Device, settings: Settings) -> list[Row]:
    """Measure how much later than the device the host goes on, after about BUSY_SECONDS."""
    busy, seconds = _busy(device)
    ways = {"block": 0, "sleep then poll": int(seconds * 1e9)}
    late: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(settings.repeats):
        for way, expected_ns in ways.items():
            for _ in range(BUSY_SUBMITS):
                ((_, wall),) = _submits(device, busy, 1, expected_ns)
                start, end = busy.timestamps()
                late[way].append(wall - (end - start) / 1e9)
    label = f"wall minus device time of a {seconds * 1e3:.1f} ms submit"
    return [_row(f"{label}: {way}", values) for way, values in late.items()]


def _busy(device: Device) -> tuple[Recording, float]:
    """Record fills that take about BUSY_SECONDS on the device."""
    buffer = device.allocate("device", BUSY_BYTES, "busy")

    def record(n_fills: int) -> Recording:
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
        seconds = percentile(time_recording(device, recording, 3).device, 50)
        if seconds >= BUSY_SECONDS / 2 or n_fills >= 4096:
            return recording, seconds
        n_fills *= 2


def _row(what: str, seconds: list[float], note: str = "") -> Row:
    micros = [1e6 * value for value in seconds]
    spread = f"p50 {percentile(micros, 50):.1f} p99 {percentile(micros, 99):.1f}"
    return Row(what, summarise(micros), "us", "wall", f"{spread} {note}".strip())


# ----- dispatch -----


def measure_dispatches(device: Device, settings: Settings) -> dict[str, Any]:
    """Measure microseconds per dispatch, less those of an empty recording."""
    n, repeats, timed = settings.dispatches, settings.repeats, device.native.has_timestamps()
    with Runner(device) as runner:
        check_or_raise(runner, EMPTIEST.run, "finish, one word")
        program = Program("dispatches", runner.programs[-1].commands * n)
        recordings = {
            "nothing": runner.record(Program("empty"), timed),
            "without barriers": runner.record(program, timed, [False] * n),
            "with a barrier before each": runner.record(program, timed, [True] * n),
        }
        nothing, *taken = timed_in_turns(device, [*recordings.values()], repeats)
    rows = []
    for name, times in zip([*recordings][1:], taken, strict=True):
        what, note = f"a dispatch of one workgroup, {name}", f"{n} dispatches"
        walls = _per_dispatch(times.wall, nothing.wall, n)
        rows.append(Row(what, summarise(walls), "us", "wall", note))
        if timed:
            on_device = _per_dispatch(times.device, nothing.device, n)
            rows.append(Row(what, summarise(on_device), "us", "gpu_timestamp", note))
    return {"rows": rows}


def _per_dispatch(seconds: list[float], nothing: list[float], count: int) -> list[float]:
    """Return microseconds per dispatch, less the median empty recording."""
    idle = percentile(nothing, 50)
    return [1e6 * (took - idle) / count for took in seconds]
