"""This module times recordings on a device, and measures the roofline that other figures stand by.

It owns the clock: the device's own timestamps, or where it has none the wall time of a submit less
that of an empty submit; on a CPU the wall time of its threads. A fill of more memory than caches
hold goes before each dispatch. A GPU's roofline is a copy, a CPU's what its threads read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vkmoe.bench.measure import Mode, Output, Row, Summary, percentile, summarise
from vkmoe.closing import Closing
from vkmoe.cpu.device import cache_bytes
from vkmoe.cpu.reads import host_bytes, host_reads
from vkmoe.errors import VkmoeError
from vkmoe.facts import DeviceInfo
from vkmoe.gpu.backend import Recording
from vkmoe.gpu.device import Device
from vkmoe.gpu.link_speed import measure_link
from vkmoe.gpu.program import Dispatch, Program
from vkmoe.gpu.runner import Flush, Runner, Times, time_recording
from vkmoe.gpu.transfer import Transfer
from vkmoe.kernels.comparison import Check, Checks
from vkmoe.kernels.logits.cases import EMPTIEST

MIB = 1 << 20
MIN_SECONDS = 1e-8  # of what noise or a coarse clock makes nothing
N_SUBMITS = 20  # in each repeat
HINT = "nothing wrong is timed; `vkmoe selftest` says what else this device computes wrongly"


class WrongResultError(VkmoeError):
    """Refuses to time what computed or brought something wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(message, HINT)


# ----- timing a recording -----


def timed_in_turns(
    device: Device, recordings: Sequence[Recording], repeats: int, before: Recording | None = None
) -> list[Times]:
    """Submit all `repeats` times in turns, so that a slow second hits every one."""
    taken = [Times([], []) for _ in recordings]
    timed = device.native.has_timestamps()
    for _ in range(repeats):
        for recording, times in zip(recordings, taken, strict=True):
            once = time_recording(device, recording, 1, timed, before=before)
            times.wall.extend(once.wall)
            times.device.extend(once.device)
    return taken


def clock_of(device: Device, queue: str = "compute") -> Mode:
    """Name the clock that times what runs on a queue: its own, or the wall's."""
    owns_one = device.info.is_vulkan and device.native.has_timestamps(queue)
    return "gpu_timestamp" if owns_one else "wall"


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
    """Says how much a clock fills before each repeat, and copies or reads for the bandwidth."""

    flush_bytes: int
    roof_bytes: int

    @classmethod
    def of(cls, info: DeviceInfo, tiny: bool = False) -> Memory:
        """Choose more than the caches of its kind of device; `tiny` only tries whether it runs."""
        if tiny:
            return cls(MIB, 4 * MIB)
        if not info.is_vulkan:
            return cls(max(32 * MIB, 2 * cache_bytes()), host_bytes())
        if info.is_cpu:
            return cls(32 * MIB, 64 * MIB)
        sizes = (heap.size for heap in info.heaps if heap.device_local)
        room = max(sizes, default=8 * MIB) // 8
        return cls(min(256 * MIB, room), min(512 * MIB, room))


class Clock(Closing):
    """Times dispatches on one device. Use it as a context manager."""

    def __init__(self, device: Device, repeats: int, memory: Memory) -> None:
        self.device, self._repeats, self._memory = device, repeats, memory
        self._flush = Flush(device, memory.flush_bytes)
        self.mode = clock_of(device)
        self._timed = device.native.has_timestamps()  # a CPU reads the wall's clock for them
        self._empty_submit = 0.0
        if not self._timed:
            nothing = device.native.recorder().finish()
            self._empty_submit = percentile(self._seconds(nothing), 50)

    @property
    def explanation(self) -> str:
        """Name the clock that runs, in words."""
        if self.mode == "gpu_timestamp":
            return "gpu_timestamp: the device's own clock, before and behind one dispatch"
        if self._timed:
            return "wall: from where the threads begin with one dispatch to where all are done"
        return f"wall: submit and wait, less an empty submit ({1e6 * self._empty_submit:.1f} us)"

    def close(self) -> None:
        self._flush.close()

    def dispatch_us(self, runner: Runner, dispatch: Dispatch) -> Summary:
        """Time a dispatch that a runner has run, alone, in microseconds."""
        alone = Program(dispatch.variant, [dispatch])
        seconds = self._seconds(runner.record(alone, self._timed))
        return summarise([1e6 * took for took in seconds])

    def roofline(self) -> Roofline:
        """Measure what nothing is faster than.

        It is checked like all else: the word must be stored, every byte must arrive.
        """
        with Runner(self.device) as runner:
            check_or_raise(runner, EMPTIEST.run, "finish, one word")
            took = self.dispatch_us(runner, last_dispatch(runner, "finish"))
        empty = Row("empty dispatch", took, "us", self.mode, "one workgroup stores a word")
        submit = Row("empty submit and wait", self._submit_us(), "us", "wall")
        if self.device.n_threads is not None:
            memory = self._thread_reads(self.device.n_threads)
            return Roofline(self.mode, self.explanation, memory, empty, submit)
        copies = Row(
            "copy within device memory", self._copy_speed(), "GB/s", self.mode, "read + write"
        )
        return Roofline(self.mode, self.explanation, copies, empty, submit, self._link_speeds())

    def _thread_reads(self, n_threads: int) -> Row:
        """Measure GB/s of all threads together; nothing can be wrong that is only read."""
        speeds = host_reads(n_threads, self._repeats, self._memory.roof_bytes)
        what = f"memory read by {n_threads} thread{'s' * (n_threads > 1)}"
        return Row(what, summarise([speed / 1e9 for speed in speeds]), "GB/s", "wall", "read only")

    def _link_speeds(self) -> LinkRows:
        """Measure GB/s of host memory that kernels read in place, and of copies of it."""
        uploads = clock_of(self.device, "upload")
        reads, copies = [], []
        for _ in range(self._repeats):
            speed = measure_link(self.device)
            reads.append(speed.read_bytes_per_second / 1e9)
            copies.append(speed.copy_bytes_per_second / 1e9)
        return LinkRows(
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
        n_bytes = self._memory.roof_bytes
        source = self.device.allocate("device", n_bytes, "copy source")
        target = self.device.allocate("device", n_bytes, "copy target")
        pattern = np.random.default_rng(0).integers(0, 256, n_bytes, np.uint8)
        recorder = self.device.native.recorder(n_timestamps=2 * self._timed)
        if self._timed:
            recorder.timestamp(0)
        recorder.copy(source, 0, target, 0, n_bytes)
        if self._timed:
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
        timed, n_times = self._timed, 1 + self._repeats
        times = time_recording(self.device, recording, n_times, timed, before=self._flush.recording)
        overhead, found = (0.0, times.device) if timed else (self._empty_submit, times.wall)
        return [max(took - overhead, MIN_SECONDS) for took in found[1:]]


class LinkRows(NamedTuple):
    """Holds how fast host memory is reached, in GB/s."""

    reads: Row
    copies: Row


@dataclass(frozen=True)
class Roofline:
    """Holds what no kernel and no token of this device can be faster than."""

    latency_mode: Mode
    explanation: str
    memory: Row  # GB/s: a GPU copies, bytes read plus bytes written; the threads of a CPU read
    empty_dispatch: Row  # us, `finish`: one workgroup that stores a word
    submit: Row  # us
    link: LinkRows | None = None  # None: the device's memory is the host's, as on a CPU

    @property
    def rows(self) -> list[Row]:
        return [self.memory, self.empty_dispatch, self.submit, *(self.link or ())]

    @property
    def gb_per_s(self) -> float:
        return self.memory.value.median

    def least_us(self, n_bytes: int) -> float:
        """Return the microseconds that reading so many bytes takes at the speed of memory."""
        return n_bytes / self.gb_per_s / 1e3

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
