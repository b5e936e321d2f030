"""This module measures how fast each kind of memory is read: by kernels of the GPU, and by the CPU.

Two parts of `vkmoe bench transfer`. `reads`: the matvec of Q4_K and Q6_K with its matrix in each
distinct memory type in turn, beside a plain copy from there to device memory; every row is compared
with the twin before anything is timed. `mapped`: CPU reads of write-combined or mapped device
memory are tens to hundreds of times slower than those of HOST_CACHED memory, which is why results
are read from `readback` memory only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.bench.clock import MIB, Memory, Times, WrongResultError, time_recording
from vkmoe.bench.measure import Mode, Row, summarise
from vkmoe.facts import DeviceInfo
from vkmoe.gpu.backend import Backend, Buffer, Recording
from vkmoe.gpu.device import EXCLUDED, Device, translate_errors, vulkan_errors
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.runner import SENTINEL
from vkmoe.gpu.transfer import Transfer
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.inputs import random_rows
from vkmoe.kernels.matvec.operations import Matrix, matvec
from vkmoe.kernels.matvec.twins import matvec as matvec_twin
from vkmoe.kernels.tuning import Tuning, choose_tuning
from vkmoe.quants import decode, device_row_bytes, to_device

if TYPE_CHECKING:
    from vkmoe.bench.transfer import Settings

__all__ = ["distinct_types", "measure_in_place", "measure_mapped", "measure_reads"]

ALIGNMENT = 256
MAPPED_BYTES = 4 * MIB
# No room, or a type that holds no storage buffers.
REFUSED = (
    "VK_ERROR_OUT_OF_DEVICE_MEMORY",
    "VK_ERROR_OUT_OF_HOST_MEMORY",
    "VK_ERROR_FEATURE_NOT_PRESENT",
)
Bytes = NDArray[np.uint8]

READ_TYPES = ("Q4_K", "Q6_K")
N_COLUMNS = 2048
PATTERN_ROWS = 512  # random rows, repeated down the matrix
TOLERANCE = 1e-5  # of sum |w x|, as the kernels' tests allow


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


@dataclass(frozen=True)
class TypedMemory:
    """Owns bytes of one memory type, from a 256-byte aligned address on."""

    buffer: Buffer
    n_bytes: int

    @classmethod
    def allocate(cls, device: Device, kind: MemoryKind, n_bytes: int) -> TypedMemory | None:
        """Return None when this type has no room, or cannot hold storage buffers."""
        try:
            return cls(
                device.native.buffer(n_bytes + ALIGNMENT, kind.memory_type, kind.label), n_bytes
            )
        except vulkan_errors() as error:
            if error.result not in REFUSED:
                raise
            return None

    @property
    def offset(self) -> int:
        return -self.buffer.address % ALIGNMENT

    @property
    def address(self) -> int:
        return self.buffer.address + self.offset

    def fill(self, device: Device, data: Bytes) -> None:
        """Write the bytes, directly or through staging."""
        with translate_errors("placing weights"), Transfer(device) as transfer:
            transfer.write(self.buffer, self.offset, data)
            transfer.flush()
            self._flush_host_writes()

    def _flush_host_writes(self) -> None:
        if self.buffer.mapped:
            self.buffer.flush(0, self.buffer.size)

    def close(self) -> None:
        self.buffer.close()


# ----- reads -----


class _Weights(NamedTuple):
    """Holds a matrix in host memory, and what multiplying it must give."""

    type: str
    laid_out: NDArray[np.uint8]  # [n_rows * row_bytes]
    n_rows: int
    row_bytes: int
    x: NDArray[np.float32]  # [N_COLUMNS]
    wanted: NDArray[np.float64]  # [PATTERN_ROWS]
    magnitude: NDArray[np.float64]  # [PATTERN_ROWS], sum |w x|


class _Arm(NamedTuple):
    """Holds one thing to time."""

    what: str
    n_bytes: int  # that cross the memory which the roofline is of, as it counts them
    recording: Recording
    note: str = ""


def measure_reads(device: Device, settings: Settings) -> dict[str, Any]:
    """Measure GB/s by type of weights, memory type and size, by device and by wall clock."""
    tuning = choose_tuning(device.info)
    flush_bytes = Memory.of(device.info).flush_bytes
    scratch = device.allocate("device", flush_bytes, "flush")
    recorder = device.native.recorder()
    recorder.fill(scratch, 0, flush_bytes, 0)
    flush = recorder.finish()
    rows: list[Row] = []
    left_out: list[str] = []
    for type_name in READ_TYPES:
        for mib in settings.read_mib:
            weights = _make_weights(type_name, mib)
            _measure_weights(device, tuning, weights, flush, settings.repeats, rows, left_out)
    scratch.close()
    return {"rows": rows, "left_out": left_out, "tuning": str(tuning)}


def measure_in_place(device: Device, mib: float, repeats: int) -> Iterator[Row]:
    """Measure GB/s at which the matvec reads matrices of `mib` MiB where experts are at home."""
    tuning, timed = choose_tuning(device.info), device.native.has_timestamps()
    for type_name in READ_TYPES:
        weights, backend = _make_weights(type_name, mib), Backend(device)
        home = device.allocate("host", weights.laid_out.size + ALIGNMENT, "expert's home")
        memory = TypedMemory(home, weights.laid_out.size)
        try:
            memory.fill(device, weights.laid_out)
            program = _program(tuning, weights, memory.address)
            _check(device, backend, program, weights, "host memory")
            read = backend.record(program, timed=timed)
            what = f"a matvec of {type_name} that reads host memory in place"
            arm = _Arm(what, weights.laid_out.size, read)
            times = time_recording(device, read, repeats, timed)
            yield _rows(arm, times)[0]
        finally:
            memory.close()


def _make_weights(type_name: str, mib: float) -> _Weights:
    rng = np.random.default_rng(0)
    row_bytes = device_row_bytes(type_name, N_COLUMNS)
    n_rows = max(int(mib * MIB) // row_bytes // PATTERN_ROWS, 1) * PATTERN_ROWS
    raw = random_rows(type_name, PATTERN_ROWS, N_COLUMNS, rng)
    values = decode(type_name, raw.reshape(-1), PATTERN_ROWS * N_COLUMNS)
    values = values.reshape(PATTERN_ROWS, N_COLUMNS)
    x = rng.standard_normal(N_COLUMNS).astype(np.float32)
    return _Weights(
        type_name,
        np.tile(to_device(type_name, raw, N_COLUMNS).reshape(-1), n_rows // PATTERN_ROWS),
        n_rows,
        row_bytes,
        x,
        matvec_twin(values, x),
        matvec_twin(np.abs(values), np.abs(x)),
    )


def _measure_weights(
    device: Device,
    tuning: Tuning,
    weights: _Weights,
    flush: Recording,
    repeats: int,
    rows: list[Row],
    left_out: list[str],
) -> None:
    """Place the matrix in every memory type, check each, then time all in turns."""
    backend, timed = Backend(device), device.native.has_timestamps()
    local = device.allocate("device", weights.laid_out.size, "copied weights")
    placed: list[TypedMemory] = []
    arms: list[_Arm] = []
    for kind in distinct_types(device.info):
        memory = TypedMemory.allocate(device, kind, weights.laid_out.size)
        if memory is None:
            left_out.append(f"{weights.laid_out.size / MIB:.0f} MiB of {kind.label}")
            continue
        placed.append(memory)
        memory.fill(device, weights.laid_out)
        program = _program(tuning, weights, memory.address)
        _check(device, backend, program, weights, kind.label)
        size = f"{weights.laid_out.size / MIB:.1f} MiB in memory type {kind.memory_type}"
        n_bytes, read = weights.laid_out.size, backend.record(program, timed=timed)
        arms.append(_Arm(f"{weights.type} matvec, {size}", n_bytes, read))
        copied = _copy(device, memory, local, timed)
        if device.info.heaps[kind.heap].device_local:  # as the roofline's copy, it reads and writes
            arms.append(_Arm(f"copy to device, {size}", 2 * n_bytes, copied, "read + write"))
        else:
            arms.append(_Arm(f"copy to device, {size}", n_bytes, copied))
    rows += _timed_in_turns(device, arms, flush, repeats)
    for memory in placed:
        memory.close()
    local.close()


def _timed_in_turns(
    device: Device, arms: list[_Arm], flush: Recording, repeats: int
) -> Iterator[Row]:
    taken = {arm.what: Times([], []) for arm in arms}
    timed = device.native.has_timestamps()
    for _ in range(repeats):
        for arm in arms:
            times = time_recording(device, arm.recording, 1, timed, before=flush)
            taken[arm.what].wall.extend(times.wall)
            taken[arm.what].device.extend(times.device)
    for arm in arms:
        yield from _rows(arm, taken[arm.what])


def _refs(weights: _Weights) -> tuple[TensorRef, TensorRef]:
    return TensorRef("x", N_COLUMNS), TensorRef("y", weights.n_rows)


def _program(tuning: Tuning, weights: _Weights, address: int) -> Program:
    x, y = _refs(weights)
    program = Program("read")
    matrix = Matrix(weights.type, address, weights.n_rows, N_COLUMNS, weights.row_bytes)
    matvec(OpContext(program, tuning, "matvec"), [matrix], x, y, scratch=x)
    return program


def _check(
    device: Device, backend: Backend, program: Program, weights: _Weights, label: str
) -> None:
    """Compare every row with the twin; the result starts as a NaN: no dispatch passes idly."""
    x_ref, y_ref = _refs(weights)
    with Transfer(device) as transfer:
        sentinel = np.full(weights.n_rows, SENTINEL, np.uint32)
        transfer.write(backend.tensor(x_ref), 0, weights.x.view(np.uint8))
        transfer.write(backend.tensor(y_ref), 0, sentinel.view(np.uint8))
        transfer.flush()
        backend.run(backend.record(program))
        found = transfer.read(backend.tensor(y_ref), 0, y_ref.n_bytes).view(np.float32)
    error = np.abs(found.reshape(-1, PATTERN_ROWS) - weights.wanted)
    if not (error <= TOLERANCE * weights.magnitude).all():  # a NaN fails too
        raise WrongResultError(f"the {weights.type} matvec is wrong with weights in {label}")


def _copy(device: Device, memory: TypedMemory, local: Buffer, timed: bool) -> Recording:
    recorder = device.native.recorder(n_timestamps=2 if timed else 0)
    if timed:
        recorder.timestamp(0)
    recorder.copy(memory.buffer, memory.offset, local, 0, local.size)
    if timed:
        recorder.timestamp(1)
    return recorder.finish()


def _rows(arm: _Arm, times: Times) -> list[Row]:
    def speed(seconds: list[float]) -> list[float]:
        return [arm.n_bytes / took / 1e9 for took in seconds if took > 0]

    clocks: dict[Mode, list[float]] = {
        "gpu_timestamp": speed(times.device), "wall": speed(times.wall)
    }  # fmt: skip
    return [
        Row(arm.what, summarise(speeds), "GB/s", clock, arm.note)
        for clock, speeds in clocks.items()
        if speeds
    ]


# ----- mapped -----


def measure_mapped(device: Device, settings: Settings) -> dict[str, Any]:
    """Measure GB/s of NumPy copies out of and into each mapped memory type."""
    rows: list[Row] = []
    scratch = np.zeros(MAPPED_BYTES, np.uint8)
    for kind in distinct_types(device.info):
        memory = TypedMemory.allocate(device, kind, MAPPED_BYTES)
        if memory is None or not memory.buffer.mapped:
            continue
        view = memory.buffer.view()[:MAPPED_BYTES]
        view[:] = 1
        reads, writes = [], []
        for _ in range(settings.repeats):
            writes.append(_gigabytes_per_second(view, scratch))
            memory.buffer.invalidate(0, MAPPED_BYTES)
            reads.append(_gigabytes_per_second(scratch, view))
        size = f"{MAPPED_BYTES / MIB:g} MiB of memory type {kind.memory_type}"
        rows.append(Row(f"CPU reads {size}", summarise(reads), "GB/s", "host_wall", "1 thread"))
        rows.append(Row(f"CPU writes {size}", summarise(writes), "GB/s", "host_wall", "1 thread"))
        del view
        memory.close()
    return {"rows": rows}


def _gigabytes_per_second(target: Bytes, source: Bytes) -> float:
    started = time.perf_counter()
    target[:] = source
    return target.size / (time.perf_counter() - started) / 1e9
