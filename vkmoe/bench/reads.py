"""This module measures how fast kernels of the GPU read each kind of memory.

A part of `vkmoe bench transfer`: the matvec of Q4_K and Q6_K with its matrix in each distinct
memory type in turn, beside a plain copy from there to device memory. It is the self-test's case,
compared with the twin before anything is timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.bench.clock import MIB, Memory, check_or_raise, timed_in_turns
from vkmoe.bench.measure import Mode, Row, summarise
from vkmoe.facts import DeviceInfo
from vkmoe.gpu.backend import Buffer, Recording
from vkmoe.gpu.device import EXCLUDED, Device, translate_errors, vulkan_errors
from vkmoe.gpu.runner import Flush, Runner, Times, time_recording
from vkmoe.kernels.matvec.cases import MatvecCase
from vkmoe.kernels.tuning import Tuning, choose_tuning
from vkmoe.quants import device_row_bytes

if TYPE_CHECKING:
    from vkmoe.bench.transfer import Settings

# No room, or a type that holds no storage buffers.
REFUSED = (
    "VK_ERROR_OUT_OF_DEVICE_MEMORY",
    "VK_ERROR_OUT_OF_HOST_MEMORY",
    "VK_ERROR_FEATURE_NOT_PRESENT",
)
READ_TYPES = ("Q4_K", "Q6_K")
N_COLUMNS = 2048


class MemoryKind(NamedTuple):
    """Holds a memory type that stands for all of equal heap and flags."""

    memory_type: int
    heap: int
    flags: frozenset[str]

    @property
    def label(self) -> str:
        flags = "|".join(sorted(self.flags)) or "no flags"
        return f"type {self.memory_type} (heap {self.heap}: {flags})"


def distinct_types(info: DeviceInfo) -> list[MemoryKind]:
    """List a kind for each pair of heap and flags, without those vkmoe never uses."""
    kinds: dict[tuple[int, frozenset[str]], MemoryKind] = {}
    for index, item in enumerate(info.memory_types):
        if not item.flags & EXCLUDED:
            kinds.setdefault((item.heap, item.flags), MemoryKind(index, item.heap, item.flags))
    return list(kinds.values())


class _RefusedError(Exception):
    """Ends the try of a memory type."""


class _TypedRunner(Runner):
    """Places arrays in one memory type. Raises _RefusedError where it takes none so large."""

    def __init__(self, device: Device, kind: MemoryKind) -> None:
        super().__init__(device)
        self._kind = kind

    def allocate(self, n_bytes: int) -> Buffer:
        try:
            return self.device.native.buffer(n_bytes, self._kind.memory_type, self._kind.label)
        except vulkan_errors() as error:
            if error.result not in REFUSED:
                raise
            raise _RefusedError from error

    def place(self, data: NDArray[np.generic]) -> int:
        with translate_errors("placing weights"):
            address = super().place(data)
            buffer, _ = self.find(address, data.nbytes)
            if buffer.mapped:
                buffer.flush(0, buffer.size)
        return address


class _Arm(NamedTuple):
    """Holds one thing to time."""

    what: str
    n_bytes: int  # that cross the memory which the roofline is of, as it counts them
    recording: Recording
    note: str = ""


def measure_reads(device: Device, settings: Settings) -> dict[str, Any]:
    """Measure GB/s by type of weights, memory type and size, by device and by wall clock."""
    tuning = choose_tuning(device.info)
    rows: list[Row] = []
    left_out: list[str] = []
    for type_name, mib in product(READ_TYPES, settings.read_mib):
        with Flush(device, Memory.of(device.info).flush_bytes) as flush, ExitStack() as stack:
            arms = [*_arms(device, _case(tuning, type_name, mib), stack, left_out)]
            recordings = [arm.recording for arm in arms]
            taken = timed_in_turns(device, recordings, settings.repeats, flush.recording)
            for arm, times in zip(arms, taken, strict=True):
                rows += _rows(arm, times)
    return {"rows": rows, "left_out": left_out, "tuning": str(tuning)}


def measure_in_place(device: Device, mib: float, repeats: int) -> Iterator[Row]:
    """Measure GB/s at which the matvec reads matrices of `mib` MiB where experts are at home."""
    timed = device.native.has_timestamps()
    for type_name in READ_TYPES:
        with Runner(device, "host") as runner:
            case = _case(choose_tuning(device.info), type_name, mib)
            what = f"a matvec of {type_name} that reads host memory in place"
            read = _Arm(what, *_checked(runner, case, "host memory"))
            yield _rows(read, time_recording(device, read.recording, repeats, timed))[0]


def _case(tuning: Tuning, type_name: str, mib: float) -> MatvecCase:
    n_rows = max(1, int(mib * MIB) // device_row_bytes(type_name, N_COLUMNS))
    return MatvecCase(tuning, ((type_name, n_rows),), N_COLUMNS)


def _checked(runner: Runner, case: MatvecCase, label: str) -> tuple[int, Recording]:
    """Compare a case with its twin; return the bytes of the matrix, and what reads it.

    The result starts as a NaN: no dispatch passes idly.
    """
    ((kind, n_rows),) = case.segments
    check_or_raise(runner, case.run, f"the {kind} matvec with weights in {label}")
    read = runner.record(runner.programs[-1], runner.device.native.has_timestamps())
    return n_rows * device_row_bytes(kind, N_COLUMNS), read


def _arms(
    device: Device, case: MatvecCase, stack: ExitStack, left_out: list[str]
) -> Iterator[_Arm]:
    """Place the matrix in every memory type, check each; then each is read, and copied."""
    ((kind_of_weights, n_rows),) = case.segments
    n_bytes = n_rows * device_row_bytes(kind_of_weights, N_COLUMNS)
    local = device.allocate("device", n_bytes, "copied weights")
    stack.callback(local.close)
    for kind in distinct_types(device.info):
        runner = stack.enter_context(_TypedRunner(device, kind))
        try:
            _, read = _checked(runner, case, kind.label)
        except _RefusedError:
            left_out.append(f"{n_bytes / MIB:.0f} MiB of {kind.label}")
            continue
        size = f"{n_bytes / MIB:.1f} MiB in memory type {kind.memory_type}"
        yield _Arm(f"{kind_of_weights} matvec, {size}", n_bytes, read)
        copied = _copy(runner, local)
        if device.info.heaps[kind.heap].device_local:  # as the roofline's copy, it reads and writes
            yield _Arm(f"copy to device, {size}", 2 * n_bytes, copied, "read + write")
        else:
            yield _Arm(f"copy to device, {size}", n_bytes, copied)


def _copy(runner: Runner, local: Buffer) -> Recording:
    """Record the copy of the matrix that a runner has read."""
    (dispatch,) = runner.programs[-1].dispatches()
    timed = runner.device.native.has_timestamps()
    source, offset = runner.find(dispatch.reads[-1].start, local.size)
    recorder = runner.device.native.recorder(n_timestamps=2 if timed else 0)
    if timed:
        recorder.timestamp(0)
    recorder.copy(source, offset, local, 0, local.size)
    if timed:
        recorder.timestamp(1)
    return recorder.finish()


def _rows(arm: _Arm, times: Times) -> list[Row]:
    clocks: dict[Mode, list[float]] = {"gpu_timestamp": times.device, "wall": times.wall}
    speeds = {
        clock: [arm.n_bytes / took / 1e9 for took in seconds if took > 0]
        for clock, seconds in clocks.items()
    }
    return [
        Row(arm.what, summarise(found), "GB/s", clock, arm.note)
        for clock, found in speeds.items()
        if found
    ]
