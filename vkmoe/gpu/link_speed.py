"""This module measures how fast a GPU reads host memory in place, and copies from there.

Owns the kernel read_words.comp (twin: kernels/memory/twins.py), which does nothing but load.
How fast kernels copy is measured in placement/forecast/measured.py. Decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, NamedTuple

from vkmoe.gpu.backend import Backend
from vkmoe.gpu.device import Device, memory_type_candidates, translate_errors
from vkmoe.gpu.kernels import kernel
from vkmoe.gpu.program import Program, TensorRef, memory_range

if TYPE_CHECKING:
    from vkmoe.gpu import _native

READ_WORDS = kernel("read_words", "w:sums", "address:source", "workgroup_size")
WORKGROUP_SIZE = 64
UNITS_PER_LANE, UNIT_BYTES = 16, 16
GROUP_BYTES = WORKGROUP_SIZE * UNITS_PER_LANE * UNIT_BYTES

SLOW_SHARE = 0.5  # of the copy speed: below it a miss costs more than twice its copy
# Each read takes the next slice, and a copy of all of them follows: no cache helps twice.
N_SLICES = 4
SLICE_BYTES, SLICE_BYTES_CPU = 8 << 20, 2 << 20
MEMORY_SLICE_BYTES = 128 << 20  # of device memory: in turns, more than today's caches hold
MIN_ROUNDS, MIN_SECONDS = 3, 0.03  # an idle link needs milliseconds to come up to speed


class LinkSpeed(NamedTuple):
    """Says what crosses from host memory to this GPU, in bytes per second."""

    read_bytes_per_second: float  # by a kernel, in place
    copy_bytes_per_second: float  # to device memory, on the upload queue
    gather_bytes_per_second: float = 0.0  # to device memory, by a kernel; 0: not measured

    @property
    def miss_bytes_per_second(self) -> float:
        """Return the speed of the faster way in which kernels reach host memory."""
        return max(self.read_bytes_per_second, self.gather_bytes_per_second)

    def note(self) -> str | None:
        """Return one line for the user where host reads are slow, else None."""
        if self.miss_bytes_per_second >= SLOW_SHARE * self.copy_bytes_per_second:
            return None
        return (
            f"this GPU reads host memory at {self.miss_bytes_per_second / 1e9:.1f} GB/s but copies "
            f"at {self.copy_bytes_per_second / 1e9:.1f}: misses are expensive; "
            "a larger --expert-cache helps"
        )


def read_words(program: Program, address: int, n_bytes: int, sums: TensorRef) -> None:
    """Read whole workgroups' bytes at a 16-byte aligned address; `sums` gets a word per lane."""
    assert n_bytes % GROUP_BYTES == 0 and address % UNIT_BYTES == 0, (n_bytes, address)
    program.append(
        READ_WORDS.dispatch(
            "read_words",
            {"workgroup_size": WORKGROUP_SIZE, "source": address},
            {"sums": sums.part(0, sums_words(n_bytes))},
            (n_bytes // GROUP_BYTES, 1, 1),
            "read words",
            reads=(memory_range(address, n_bytes),),
        )
    )


def sums_words(n_bytes: int) -> int:
    """Count the words of `sums` that a read of `n_bytes` writes."""
    return n_bytes // (UNITS_PER_LANE * UNIT_BYTES)


def measure_link(device: Device, slice_bytes: int | None = None) -> LinkSpeed:
    """Time kernel reads of host memory, and copies of it to the device; the best of some repeats.

    Takes some ten milliseconds, and N_SLICES slices of host and of device memory meanwhile;
    `slice_bytes` is a multiple of GROUP_BYTES. Times are the device's where the queue has
    timestamps, else the wall's, with the cost of a submit. Raises GpuErrors.
    """
    slice_bytes = slice_bytes or default_slice_bytes(device)
    with link_memory(device, N_SLICES * slice_bytes) as (source, target):
        reads = _reads(device, source, slice_bytes)
        return LinkSpeed(*best_of(reads, [_copy(device, source, target)]))


def measure_memory(device: Device) -> float:
    """Time kernel reads of device memory, more than caches hold: the best bytes per second.

    Takes up to 512 MiB, or a sixteenth of the heap that they are in. Raises GpuErrors.
    """
    info = device.info
    kind = info.memory_types[memory_type_candidates(info, "device")[0]]
    room = info.heaps[kind.heap].size // 16 // N_SLICES
    slice_bytes = max(GROUP_BYTES, min(MEMORY_SLICE_BYTES, room) // GROUP_BYTES * GROUP_BYTES)
    if device.info.is_cpu:
        slice_bytes = min(slice_bytes, MEMORY_SLICE_BYTES // 4)
    with closing(device.allocate("device", N_SLICES * slice_bytes, "link target")) as memory:
        with translate_errors("measuring memory"):
            recorder = device.native.recorder()
            recorder.fill(memory, 0, memory.size, 1)
            device.native.submit(recorder.finish()).wait()
        (best,) = best_of(_reads(device, memory, slice_bytes))
        return best


@contextmanager
def link_memory(device: Device, n_bytes: int) -> Iterator[tuple[_native.Buffer, _native.Buffer]]:
    """Allocate `n_bytes` of written host memory and as much device memory for a `with`."""
    with closing(device.allocate("host", n_bytes, "link source")) as source:
        source.view()[:] = 1  # pages never written may all be the same one
        with closing(device.allocate("device", n_bytes, "link target")) as target:
            yield source, target


def default_slice_bytes(device: Device) -> int:
    """Choose the bytes that take a link long enough to be timed."""
    return SLICE_BYTES_CPU if device.info.is_cpu else SLICE_BYTES


class Timed(NamedTuple):
    """Holds a recording that can be timed again and again."""

    device: Device
    recording: _native.Recording
    n_bytes: int  # that it moves
    queue: str = "compute"

    def bytes_per_second(self) -> float:
        with translate_errors("measuring the link"):
            started = time.perf_counter()
            submission = self.device.native.submit(self.recording, self.queue)
            submission.wait()
            elapsed = time.perf_counter() - started
            first, last = submission.interval() or (0, 0)
            if last > first:
                elapsed = (last - first) / 1e9
        return self.n_bytes / elapsed


def best_of(*turns: Sequence[Timed]) -> list[float]:
    """Find the most bytes per second of each of `turns`; in a round one member of each runs."""
    best, n_rounds, started = [0.0] * len(turns), 0, time.perf_counter()
    while n_rounds < MIN_ROUNDS or time.perf_counter() - started < MIN_SECONDS:
        speeds = [members[n_rounds % len(members)].bytes_per_second() for members in turns]
        best = [max(pair) for pair in zip(best, speeds, strict=True)]
        n_rounds += 1
    return best


def _reads(device: Device, source: _native.Buffer, slice_bytes: int) -> list[Timed]:
    """Record a read of each slice; all leave their sums in the same tensor."""
    backend, sums = Backend(device), TensorRef("sums", sums_words(slice_bytes))
    reads = []
    for index in range(N_SLICES):
        program = Program(f"read slice {index}")
        read_words(program, source.address + index * slice_bytes, slice_bytes, sums)
        reads.append(Timed(device, backend.record(program, timed=True), slice_bytes))
    return reads


def _copy(device: Device, source: _native.Buffer, target: _native.Buffer) -> Timed:
    is_timed = device.native.has_timestamps("upload")
    with translate_errors("measuring the link"):
        recorder = device.native.recorder(n_timestamps=2 * is_timed, queue="upload")
        if is_timed:
            recorder.timestamp(0)
        recorder.copy(source, 0, target, 0, source.size)
        if is_timed:
            recorder.timestamp(1)
        return Timed(device, recorder.finish(), source.size, "upload")
