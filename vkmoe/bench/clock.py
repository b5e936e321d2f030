"""This module times recordings on a device, and measures the roofline that other figures stand by.

It owns the clock: the device's own timestamps, or where it has none the wall time of a submit less
that of an empty submit. A fill of more memory than caches hold goes before each dispatch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vkmoe.bench.measure import Mode, Output, Row, Summary, percentile, summarise
from vkmoe.closing import Closing
from vkmoe.errors import VkmoeError
from vkmoe.facts import DeviceInfo
from vkmoe.gpu.backend import Recording
from vkmoe.gpu.device import Device, translate_errors
from vkmoe.gpu.link_speed import measure_link
from vkmoe.gpu.program import Dispatch, Program
from vkmoe.gpu.runner import Runner
from vkmoe.gpu.transfer import Transfer
from vkmoe.selftest.comparison import Check, Checks
from vkmoe.selftest.logits import FinishCase

__all__ = [
    "EMPTIEST",
    "MIB",
    "Clock",
    "Memory",
    "Roofline",
    "Times",
    "WrongResultError",
    "check_or_raise",
    "clock_of",
    "host_bytes_per_second",
    "last_dispatch",
    "time_recording",
]

MIB = 1 << 20
HOST_BYTES, N_PASSES = 128 * MIB, 5
MIN_SECONDS = 1e-8  # of what noise or a coarse clock makes nothing
EMPTIEST = FinishCase((1,))  # one workgroup, which stores one word
N_SUBMITS = 20  # in each repeat
HINT = "nothing wrong is timed; `vkmoe selftest` says what else this device computes wrongly"


class WrongResultError(VkmoeError):
    """Refuses to time what computed or brought something wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(message, HINT)


# ----- timing a recording -----


class Times(NamedTuple):
    """Holds the seconds of each repeat: wall from submit to the end of the wait, and on the GPU."""

    wall: list[float]
    device: list[float]  # empty where the recording has no timestamps


def time_recording(
    device: Device,
    recording: Recording,
    repeats: int,
    timed: bool = True,
    queue: str = "compute",
    before: Recording | None = None,
) -> Times:
    """Submit `repeats` times. `before` is run, unmeasured, ahead of each (to flush caches)."""
    times = Times([], [])
    with translate_errors("timing a recording"):
        for _ in range(repeats):
            if before is not None:
                device.native.submit(before).wait()
            started = time.perf_counter()
            device.native.submit(recording, queue).wait()
            times.wall.append(time.perf_counter() - started)
            if timed:
                first, last = recording.timestamps()
                times.device.append((last - first) / 1e9)
    return times


def clock_of(device: Device, queue: str = "compute") -> Mode:
    """Name the clock that times what runs on a queue: its own, or the wall's."""
    return "gpu_timestamp" if device.native.has_timestamps(queue) else "wall"


def last_dispatch(runner: Runner, variant: str) -> Dispatch:
    """Find the last dispatch of a variant that a runner has run."""
    *_, found = (
        command
        for program in runner.programs
        for command in program.dispatches()
        if command.variant == variant
    )
    return found


@dataclass(frozen=True)
class Memory:
    """Says how much a clock fills before each repeat, and copies for the bandwidth."""

    flush_bytes: int
    copy_bytes: int

    @classmethod
    def of(cls, info: DeviceInfo, tiny: bool = False) -> Memory:
        """Choose more than the caches of its kind of device; `tiny` only tries whether it runs."""
        if tiny:
            return cls(MIB, 4 * MIB)
        if info.is_cpu:
            return cls(32 * MIB, 64 * MIB)
        sizes = (heap.size for heap in info.heaps if heap.device_local)
        room = max(sizes, default=8 * MIB) // 8
        return cls(min(256 * MIB, room), min(512 * MIB, room))


class Clock(Closing):
    """Times dispatches on one device. Use it as a context manager."""

    def __init__(self, device: Device, repeats: int, memory: Memory) -> None:
        self.device, self._repeats, self._memory = device, repeats, memory
        self._scratch = device.allocate("device", memory.flush_bytes, "flush")
        recorder = device.native.recorder()
        recorder.fill(self._scratch, 0, self._scratch.size, 0)
        self._flush = recorder.finish()
        self.mode = clock_of(device)
        self._empty_submit = 0.0
        if self.mode == "wall":
            nothing = device.native.recorder().finish()
            self._empty_submit = percentile(self._seconds(nothing), 50)

    @property
    def explanation(self) -> str:
        """Name the clock that runs, in words."""
        if self.mode == "gpu_timestamp":
            return "gpu_timestamp: the device's own clock, before and behind one dispatch"
        return f"wall: submit and wait, less an empty submit ({1e6 * self._empty_submit:.1f} us)"

    def close(self) -> None:
        self._scratch.close()

    def dispatch_us(self, runner: Runner, dispatch: Dispatch) -> Summary:
        """Time a dispatch that a runner has run, alone, in microseconds."""
        alone = Program(dispatch.variant, [dispatch])
        seconds = self._seconds(runner.record(alone, timed=self.mode == "gpu_timestamp"))
        return summarise([1e6 * took for took in seconds])

    def roofline(self) -> Roofline:
        """Measure what nothing is faster than.

        It is checked like all else: the word must be stored, every byte must arrive.
        """
        with Runner(self.device) as runner:
            check_or_raise(runner, EMPTIEST.run, "finish, one word")
            empty = self.dispatch_us(runner, last_dispatch(runner, "finish"))
        uploads = clock_of(self.device, "upload")
        reads, copies = [], []
        for _ in range(self._repeats):
            speed = measure_link(self.device)
            reads.append(speed.read_bytes_per_second / 1e9)
            copies.append(speed.copy_bytes_per_second / 1e9)
        return Roofline(
            self.mode,
            self.explanation,
            Row("copy within device memory", self._copy_speed(), "GB/s", self.mode, "read + write"),
            Row("empty dispatch", empty, "us", self.mode, "one workgroup stores a word"),
            Row("empty submit and wait", self._submit_us(), "us", "wall"),
            Row("GPU reads host memory", summarise(reads), "GB/s", self.mode, "in place"),
            Row("copy host -> device", summarise(copies), "GB/s", uploads, "upload queue"),
        )

    def _submit_us(self) -> Summary:
        nothing = self.device.native.recorder().finish()
        n_submits = self._repeats * N_SUBMITS
        times = time_recording(self.device, nothing, n_submits, timed=False)
        return summarise([1e6 * took for took in times.wall])

    def _copy_speed(self) -> Summary:
        """Measure GB/s of a copy within device memory, both directions counted."""
        n_bytes = self._memory.copy_bytes
        source = self.device.allocate("device", n_bytes, "copy source")
        target = self.device.allocate("device", n_bytes, "copy target")
        pattern = np.random.default_rng(0).integers(0, 256, n_bytes, np.uint8)
        timed = self.mode == "gpu_timestamp"
        recorder = self.device.native.recorder(n_timestamps=2 if timed else 0)
        if timed:
            recorder.timestamp(0)
        recorder.copy(source, 0, target, 0, n_bytes)
        if timed:
            recorder.timestamp(1)
        with Transfer(self.device) as transfer:
            transfer.write(source, 0, pattern)
            transfer.flush()
            seconds = self._seconds(recorder.finish())
            arrived = transfer.read(target, 0, n_bytes)
        source.close()
        target.close()
        if not np.array_equal(arrived, pattern):
            raise WrongResultError("a copy within device memory brought other bytes")
        return summarise([2 * n_bytes / took / 1e9 for took in seconds])

    def _seconds(self, recording: Recording) -> list[float]:
        """Take the repeats, after a run that warms up."""
        timed = self.mode == "gpu_timestamp"
        times = time_recording(self.device, recording, 1 + self._repeats, timed, before=self._flush)
        overhead, found = (0.0, times.device) if timed else (self._empty_submit, times.wall)
        return [max(took - overhead, MIN_SECONDS) for took in found[1:]]


@dataclass(frozen=True)
class Roofline:
    """Holds what no kernel and no token of this device can be faster than."""

    latency_mode: Mode
    explanation: str
    copy: Row  # GB/s, bytes read plus bytes written
    empty_dispatch: Row  # us, `finish`: one workgroup that stores a word
    submit: Row  # us
    host_reads: Row  # GB/s
    host_copies: Row  # GB/s

    @property
    def rows(self) -> list[Row]:
        return [self.copy, self.empty_dispatch, self.submit, self.host_reads, self.host_copies]

    @property
    def copy_gb_per_s(self) -> float:
        return self.copy.value.median

    def least_us(self, n_bytes: int) -> float:
        """Return the microseconds that reading so many bytes takes at the copy's speed."""
        return n_bytes / self.copy_gb_per_s / 1e3

    def show(self, output: Output) -> None:
        """Write it with the clock that measured it."""
        output.say(f"latency mode: {self.explanation}")
        output.say("roofline: what nothing here can be faster than, measured first")
        for row in self.rows:
            output.say(str(row))
        output.say("")

    def document(self) -> dict[str, object]:
        """Make its part of the document."""
        return {"latency_mode": self.latency_mode, "rows": self.rows}


def host_bytes_per_second(n_threads: int) -> float:
    """Measure how fast the CPU reads memory, with so many threads: the best of a few passes."""
    words = np.zeros(HOST_BYTES // 8, np.uint64)
    parts = np.array_split(words, n_threads)
    best = 0.0
    with ThreadPoolExecutor(n_threads) as threads:
        for _ in range(N_PASSES):
            began = time.perf_counter()
            list(threads.map(np.max, parts))  # without the GIL, in whole vectors
            best = max(best, HOST_BYTES / (time.perf_counter() - began))
    return best


def check_or_raise(runner: Runner, check: Callable[[Runner], Checks], what: str) -> Check:
    """Return the worst comparison of a case; WrongResultError if one failed.

    What a wrong kernel leaves may be anything; the comparison must still come to its end.
    """
    with np.errstate(all="ignore"):
        worst = check(runner).worst
    if not worst.ok:
        raise WrongResultError(
            f"{what}: {worst.what} is wrong: error {worst.error:.2e}, allowed "
            f"{worst.limit:.2e}{worst.where}"
        )
    return worst
