"""This module measures what submits and dispatches cost, and whether host memory makes them dearer.

Three parts of `vkmoe bench transfer`: `submit` (an empty submit, the ways to wait for one, and how
late each wakes up), `dispatch` (a workgroup with and without a barrier), and `homes` (submits by
GiB of host memory that is allocated and referenced; it must be flat, else the host pool must
shrink).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from vkmoe.batch import TokenBatch
from vkmoe.bench.clock import MIB, Times, WrongResultError, time_recording
from vkmoe.bench.measure import Row, percentile, summarise
from vkmoe.cpu.host_memory import available_bytes
from vkmoe.errors import OutOfMemoryError
from vkmoe.gpu.arena import chunk_cap
from vkmoe.gpu.backend import Backend, Buffer, Recording
from vkmoe.gpu.device import Device, memory_type_candidates, translate_errors
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.token_io import pack_params, param_words
from vkmoe.gpu.transfer import Transfer
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.logits.operations import finish
from vkmoe.kernels.matvec.operations import Matrix, matvec
from vkmoe.kernels.tuning import choose_tuning

if TYPE_CHECKING:
    from vkmoe.bench.transfer import Settings

__all__ = ["measure_dispatches", "measure_homes", "measure_submits"]

POLL_NS = 1  # an expected time that is over at once: the wait polls from the start
BUSY_SECONDS = 0.003
BUSY_SUBMITS = 20  # per repeat: enough for a p99 that is not one accident
BUSY_BYTES = 4 * MIB

SERIAL = 0x5EED

GIB = 1 << 30
PAGE_BYTES = 4096
N_REFERENCES = 16  # dispatches per submit, each reading one row of a home
N_COLUMNS = 32
BASE_GIB = MIB / GIB  # next to nothing
SHARE = 0.5  # of the heap and of the available memory that may be taken
SUBMITS_PER_REPEAT = 40
FLAT_US_PER_GIB = 10.0


# ----- submit -----


def measure_submits(device: Device, settings: Settings) -> dict[str, Any]:
    """Measure microseconds of empty submits by way of waiting, then how late each wakes up."""
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
    timed = device.native.has_timestamps()
    return {"rows": rows + (_wake_ups(device, settings) if timed else [])}


def _submits(device: Device, recording: Recording, count: int, expected_ns: int) -> list[float]:
    seconds = []
    with translate_errors("submitting"):
        for _ in range(count):
            started = time.perf_counter()
            device.native.submit(recording).wait(expected_ns)
            seconds.append(time.perf_counter() - started)
    return seconds


def _submit_calls(device: Device, recording: Recording, count: int) -> list[float]:
    seconds = []
    with translate_errors("submitting"):
        for _ in range(count):
            started = time.perf_counter()
            submission = device.native.submit(recording)
            seconds.append(time.perf_counter() - started)
            submission.wait()
    return seconds


def _wake_ups(device: Device, settings: Settings) -> list[Row]:
    """Measure how much later than the device the host goes on, after about BUSY_SECONDS."""
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


# ----- dispatch -----


def measure_dispatches(device: Device, settings: Settings) -> dict[str, Any]:
    """Measure microseconds per dispatch, less those of an empty recording."""
    backend = Backend(device)
    params, log = TensorRef("params", param_words(1)), TensorRef("log", 4)
    program = Program("dispatches")
    finish(program, params, log)
    program.commands *= settings.dispatches
    _check_finish(device, backend, program, params, log)
    n_commands, timed = len(program.commands), device.native.has_timestamps()
    empty = backend.record(Program("empty"), timed=timed)
    recordings = {
        "without barriers": backend.record(program, [False] * n_commands, timed=timed),
        "with a barrier before each": backend.record(program, [True] * n_commands, timed=timed),
    }
    taken = {name: Times([], []) for name in recordings}
    nothing = Times([], [])
    for _ in range(settings.repeats):
        _add(nothing, time_recording(device, empty, 1, timed))
        for name, recording in recordings.items():
            _add(taken[name], time_recording(device, recording, 1, timed))
    rows = []
    for name, times in taken.items():
        what = f"a dispatch of one workgroup, {name}"
        note = f"{n_commands} dispatches"
        walls = _per_dispatch(times.wall, nothing.wall, n_commands)
        rows.append(Row(what, summarise(walls), "us", "wall", note))
        if timed:
            on_device = _per_dispatch(times.device, nothing.device, n_commands)
            rows.append(Row(what, summarise(on_device), "us", "gpu_timestamp", note))
    return {"rows": rows}


def _check_finish(
    device: Device, backend: Backend, program: Program, params: TensorRef, log: TensorRef
) -> None:
    """Raise WrongResultError unless the dispatch does its work."""
    words = np.zeros(params.n_words, np.uint32)
    pack_params(words.data, TokenBatch.one(0, 0), 0, SERIAL)
    with Transfer(device) as transfer:
        transfer.write(backend.tensor(params), 0, words.view(np.uint8))
        transfer.flush()
        backend.run(backend.record(program))
        written = int(transfer.read(backend.tensor(log), 0, 4).view(np.uint32)[0])
    if written != SERIAL:
        raise WrongResultError(f"finish wrote {written:#x} instead of {SERIAL:#x}")


def _add(to: Times, more: Times) -> None:
    to.wall.extend(more.wall)
    to.device.extend(more.device)


def _per_dispatch(seconds: list[float], nothing: list[float], count: int) -> list[float]:
    """Return microseconds per dispatch, less the median empty recording."""
    idle = percentile(nothing, 50)
    return [1e6 * (took - idle) / count for took in seconds]


# ----- homes -----


def measure_homes(device: Device, settings: Settings) -> dict[str, Any]:
    """Measure microseconds per submit by GiB of homes, and the slope between first and last.

    The recording always has as many tiny dispatches, whose addresses are spread over all homes.
    """
    chunks: list[Buffer] = []
    rows: list[Row] = []
    medians: dict[float, float] = {}
    skipped = ""
    limit = _homes_limit(device)
    try:
        for gib in (BASE_GIB, *sorted(settings.homes_gib)):
            if gib * GIB > limit:
                skipped = f"{gib:g} GiB is more than {SHARE:.0%} of heap or memory"
                break
            _grow(device, chunks, int(gib * GIB))
            if not rows:
                _referenced(device, chunks, settings.repeats)  # warms up
            seconds = _referenced(device, chunks, settings.repeats)
            medians[gib] = percentile(seconds, 50)
            micros = [1e6 * value for value in seconds]
            rows.append(
                Row(
                    f"submit + wait, {gib:.3g} GiB of homes referenced",
                    summarise(micros),
                    "us",
                    "wall",
                    f"p99 {percentile(micros, 99):.0f}",
                )
            )
    except OutOfMemoryError as error:
        skipped = str(error)
    finally:
        for chunk in chunks:
            chunk.close()
    return {"rows": rows, "left_out": skipped, **_slope(rows, medians)}


def _slope(rows: list[Row], medians: dict[float, float]) -> dict[str, Any]:
    """Return microseconds per GiB from least to most, and how far noise alone could move it."""
    if len(medians) < 2:
        return {}
    first, last = min(medians), max(medians)
    slope = 1e6 * (medians[last] - medians[first]) / (last - first)
    noise = max(abs(row.value.high - row.value.low) for row in rows) / (last - first)
    verdict = "flat" if slope < FLAT_US_PER_GIB else "not flat"
    if max(noise, abs(slope) if slope < 0 else 0) > FLAT_US_PER_GIB:
        verdict = "unclear: the noise is larger than the limit"
    return {"us_per_gib": slope, "noise_us_per_gib": noise, "verdict": verdict}


def _homes_limit(device: Device) -> float:
    host = memory_type_candidates(device.info, "host")[0]
    largest = device.info.heaps[device.info.memory_types[host].heap].size
    return SHARE * min(largest, available_bytes())


def _grow(device: Device, chunks: list[Buffer], n_bytes: int) -> None:
    """Allocate until there are `n_bytes`; commit each page, and put ones at each chunk's head."""
    cap = min(GIB, chunk_cap(device.info))
    while (missing := n_bytes - sum(chunk.size for chunk in chunks)) > 0:
        chunk = device.allocate("host", min(max(missing, MIB), cap), "homes")
        chunks.append(chunk)
        view = chunk.view()
        view[::PAGE_BYTES] = 0
        view[: 4 * N_COLUMNS].view(np.float32)[:] = 1.0


def _referenced(device: Device, chunks: list[Buffer], repeats: int) -> list[float]:
    backend = Backend(device)
    x, y = TensorRef("x", N_COLUMNS), TensorRef("y", N_REFERENCES)
    program = Program("homes")
    tuning = choose_tuning(device.info)
    for index in range(N_REFERENCES):
        target = TensorRef(f"y{index % 2}", 1)
        home = chunks[index * len(chunks) // N_REFERENCES]
        matrix = Matrix("F32", home.address, 1, N_COLUMNS, 4 * N_COLUMNS)
        matvec(OpContext(program, tuning, f"home {index}"), [matrix], x, target, scratch=y)
    with Transfer(device) as transfer:
        transfer.write(backend.tensor(x), 0, np.arange(N_COLUMNS, dtype=np.float32).view(np.uint8))
        transfer.flush()
        recording = backend.record(program, [False] * N_REFERENCES)
        backend.run(recording)
        last = transfer.read(backend.tensor(TensorRef("y1", 1)), 0, 4).view(np.float32)[0]
    if last != N_COLUMNS * (N_COLUMNS - 1) / 2:
        raise WrongResultError(f"a row of ones in a home summed to {last}")
    seconds = []
    for _ in range(repeats * SUBMITS_PER_REPEAT):
        started = time.perf_counter()
        backend.run(recording)
        seconds.append(time.perf_counter() - started)
    return seconds
