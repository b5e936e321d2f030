"""Part `reads`: how fast the GPU reads weights from each memory type (B 5, without experts).

The production matvec of Q4_K and Q6_K reads a matrix that lies in each distinct memory type in
turn; beside it, a plain copy from there to device memory. Every row of the result is compared with
the twin before anything is timed; caches are flushed by a fill ahead of each repeat.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.measure import Row, summarise
from bench.parts.common import MIB, CheckError, Settings, Times, time_recording
from bench.parts.memory import TypedMemory, distinct_types
from tools.quantise import random_weights
from vkmoe.gpu.backend import Backend
from vkmoe.gpu.device import Device
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.runner import SENTINEL
from vkmoe.gpu.transfer import Transfer
from vkmoe.ops.context import OpContext
from vkmoe.ops.matvec import Matrix, matvec
from vkmoe.ops.tuning import Tuning, choose_tuning
from vkmoe.quants import decode, device_row_bytes, to_device
from vkmoe.reference.matvec import matvec as matvec_twin

if TYPE_CHECKING:
    from vkmoe.gpu import _native

__all__ = ["measure"]

N_COLUMNS = 2048
PATTERN_ROWS = 512  # random rows, repeated down the matrix
TOLERANCE = 1e-5  # of sum |w x|, as the kernels' tests allow
MAX_GROUPS = 65535
FLUSH_MIB_CPU, FLUSH_MIB_GPU = 32, 256  # more than any last-level cache of the kind


class _Weights(NamedTuple):
    """A matrix in host memory, and what multiplying it must give."""

    type: str
    laid_out: NDArray[np.uint8]  # [n_rows * row_bytes]
    n_rows: int
    row_bytes: int
    x: NDArray[np.float32]  # [N_COLUMNS]
    wanted: NDArray[np.float64]  # [PATTERN_ROWS]
    magnitude: NDArray[np.float64]  # [PATTERN_ROWS], sum |w x|


class _Arm(NamedTuple):
    """One thing to time."""

    what: str
    n_bytes: int
    recording: _native.Recording


def measure(device: Device, settings: Settings) -> dict[str, Any]:
    """Rows of GB/s by type of weights, memory type and size, by device and by wall clock."""
    tuning = choose_tuning(device.info)
    flush_bytes = (FLUSH_MIB_CPU if device.info.is_cpu else FLUSH_MIB_GPU) * MIB
    scratch = device.allocate("device", flush_bytes, "flush")
    recorder = device.native.recorder()
    recorder.fill(scratch, 0, flush_bytes, 0)
    flush = recorder.finish()
    rows: list[Row] = []
    left_out: list[str] = []
    for type_name in ("Q4_K", "Q6_K"):
        for mib in settings.read_mib:
            weights = _make_weights(type_name, mib, tuning)
            _measure_weights(device, tuning, weights, flush, settings.repeats, rows, left_out)
    scratch.close()
    return {"rows": rows, "left_out": left_out, "tuning": str(tuning)}


def _make_weights(type_name: str, mib: float, tuning: Tuning) -> _Weights:
    rng = np.random.default_rng(0)
    row_bytes = device_row_bytes(type_name, N_COLUMNS)
    n_rows = min(int(mib * MIB) // row_bytes, MAX_GROUPS * tuning.rows)
    n_rows = max(n_rows // PATTERN_ROWS, 1) * PATTERN_ROWS
    raw = random_weights(type_name, PATTERN_ROWS, N_COLUMNS, rng, N_COLUMNS**-0.5)
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
    flush: _native.Recording,
    repeats: int,
    rows: list[Row],
    left_out: list[str],
) -> None:
    """Place the matrix in every memory type, check each, then time all in turns."""
    backend = Backend(device)
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
        size = f"{weights.laid_out.size / MIB:.1f} MiB in {kind.label}"
        read = backend.record(program, timed=True)
        arms.append(_Arm(f"{weights.type} matvec, {size}", weights.laid_out.size, read))
        arms.append(
            _Arm(f"copy to device, {size}", weights.laid_out.size, _copy(device, memory, local))
        )
    taken = {arm.what: Times([], []) for arm in arms}
    for _ in range(repeats):
        for arm in arms:
            times = time_recording(device, arm.recording, 1, before=flush)
            taken[arm.what].wall.extend(times.wall)
            taken[arm.what].device.extend(times.device)
    for arm in arms:
        rows += _rows(arm, taken[arm.what])
    for memory in placed:
        memory.close()
    local.close()


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
    """Every row against the twin; the result starts as a NaN, so that no dispatch passes idly."""
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
        raise CheckError(f"the {weights.type} matvec is wrong with weights in {label}")


def _copy(device: Device, memory: TypedMemory, local: _native.Buffer) -> _native.Recording:
    recorder = device.native.recorder(n_timestamps=2)
    recorder.timestamp(0)
    recorder.copy(memory.buffer, memory.offset, local, 0, local.size)
    recorder.timestamp(1)
    return recorder.finish()


def _rows(arm: _Arm, times: Times) -> list[Row]:
    def speed(seconds: list[float]) -> list[float]:
        return [arm.n_bytes / took / 1e9 for took in seconds if took > 0]

    rows = [Row(arm.what, summarise(speed(times.wall)), "GB/s", "wall")]
    if speed(times.device):
        rows.insert(0, Row(arm.what, summarise(speed(times.device)), "GB/s", "gpu_timestamp"))
    return rows
