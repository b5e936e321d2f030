"""Part `dispatch`: what a dispatch of one workgroup costs, with and without a barrier (B 2).

The kernel is `finish`, which stores one word. The time of an empty recording is subtracted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.measure import Row, percentile, summarise
from bench.parts.common import CheckError, Settings, Times, time_recording
from vkmoe.batch import TokenBatch
from vkmoe.gpu.backend import Backend
from vkmoe.gpu.device import Device
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.token_io import PARAM_WORDS, pack_params
from vkmoe.gpu.transfer import Transfer
from vkmoe.ops.candidates import finish

__all__ = ["measure"]

SERIAL = 0x5EED


def measure(device: Device, settings: Settings) -> dict[str, Any]:
    """Rows of microseconds per dispatch."""
    backend = Backend(device)
    params, log = TensorRef("params", PARAM_WORDS), TensorRef("log", 4)
    program = Program("dispatches")
    finish(program, params, log)
    program.commands *= settings.dispatches
    _check(device, backend, program, params, log)
    n_commands = len(program.commands)
    empty = backend.record(Program("empty"), timed=True)
    recordings = {
        "without barriers": backend.record(program, [False] * n_commands, timed=True),
        "with a barrier before each": backend.record(program, [True] * n_commands, timed=True),
    }
    taken = {name: Times([], []) for name in recordings}
    nothing = Times([], [])
    for _ in range(settings.repeats):
        _add(nothing, time_recording(device, empty, 1))
        for name, recording in recordings.items():
            _add(taken[name], time_recording(device, recording, 1))
    rows = []
    for name, times in taken.items():
        what = f"a dispatch of one workgroup, {name}"
        note = f"{n_commands} dispatches"
        walls = _per_dispatch(times.wall, nothing.wall, n_commands)
        on_device = _per_dispatch(times.device, nothing.device, n_commands)
        rows.append(Row(what, summarise(walls), "us", "wall", note))
        rows.append(Row(what, summarise(on_device), "us", "gpu_timestamp", note))
    return {"rows": rows}


def _check(
    device: Device, backend: Backend, program: Program, params: TensorRef, log: TensorRef
) -> None:
    """The dispatch must do its work before it is timed."""
    words = np.zeros(PARAM_WORDS, np.uint32)
    pack_params(words.data, TokenBatch.one(0, 0), 0, SERIAL)
    with Transfer(device) as transfer:
        transfer.write(backend.tensor(params), 0, words.view(np.uint8))
        transfer.flush()
        backend.run(backend.record(program))
        written = int(transfer.read(backend.tensor(log), 0, 4).view(np.uint32)[0])
    if written != SERIAL:
        raise CheckError(f"finish wrote {written:#x} instead of {SERIAL:#x}")


def _add(to: Times, more: Times) -> None:
    to.wall.extend(more.wall)
    to.device.extend(more.device)


def _per_dispatch(seconds: list[float], nothing: list[float], count: int) -> list[float]:
    """Microseconds per dispatch, less the median empty recording."""
    idle = percentile(nothing, 50)
    return [1e6 * (took - idle) / count for took in seconds]
