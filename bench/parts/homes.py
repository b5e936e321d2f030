"""Part `homes`: does a submit cost more when more host memory is allocated and referenced? (B 4)

It must be flat (under 10 us per GiB), else the host pool must shrink. The recording always has the
same number of tiny dispatches, whose addresses are spread over all that is allocated.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.measure import Row, percentile, summarise
from bench.parts.common import MIB, CheckError, Settings
from vkmoe.errors import OutOfMemoryError
from vkmoe.gpu.arena import chunk_cap
from vkmoe.gpu.backend import Backend
from vkmoe.gpu.device import Device
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.transfer import Transfer
from vkmoe.ops.context import OpContext
from vkmoe.ops.matvec import Matrix, matvec
from vkmoe.ops.tuning import choose_tuning
from vkmoe.placement.memory import available_bytes

if TYPE_CHECKING:
    from vkmoe.gpu import _native

__all__ = ["measure"]

GIB = 1 << 30
PAGE_BYTES = 4096
N_REFERENCES = 16  # dispatches per submit, each reading one row of a home
N_COLUMNS = 32
BASE_GIB = MIB / GIB  # next to nothing
SHARE = 0.5  # of the heap and of the available memory that may be taken
SUBMITS_PER_REPEAT = 40
FLAT_US_PER_GIB = 10.0


def measure(device: Device, settings: Settings) -> dict[str, Any]:
    """Rows of microseconds per submit by GiB of homes, and the slope between first and last."""
    chunks: list[_native.Buffer] = []
    rows: list[Row] = []
    medians: dict[float, float] = {}
    skipped = ""
    limit = _limit(device)
    try:
        for gib in (BASE_GIB, *sorted(settings.homes_gib)):
            if gib * GIB > limit:
                skipped = f"{gib:g} GiB is more than {SHARE:.0%} of heap or memory"
                break
            _grow(device, chunks, int(gib * GIB))
            if not rows:
                _submit_seconds(device, chunks, settings.repeats)  # warms up
            seconds = _submit_seconds(device, chunks, settings.repeats)
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
    """Microseconds per GiB from the least to the most, and how far noise alone could move it."""
    if len(medians) < 2:
        return {}
    first, last = min(medians), max(medians)
    slope = 1e6 * (medians[last] - medians[first]) / (last - first)
    noise = max(abs(row.value.high - row.value.low) for row in rows) / (last - first)
    verdict = "flat" if slope < FLAT_US_PER_GIB else "not flat"
    if max(noise, abs(slope) if slope < 0 else 0) > FLAT_US_PER_GIB:
        verdict = "unclear: the noise is larger than the limit"
    return {"us_per_gib": slope, "noise_us_per_gib": noise, "verdict": verdict}


def _limit(device: Device) -> float:
    heaps = {device.info.memory_types[index].heap for index in _host_types(device)}
    largest = max(device.info.heaps[heap].size for heap in heaps)
    return SHARE * min(largest, available_bytes())


def _host_types(device: Device) -> list[int]:
    from vkmoe.gpu.device import memory_type_candidates

    return memory_type_candidates(device.info, "host")[:1]


def _grow(device: Device, chunks: list[_native.Buffer], n_bytes: int) -> None:
    """Allocate until there are `n_bytes`; commit each page, and put ones at each chunk's head."""
    cap = min(GIB, chunk_cap(device.info))
    while (missing := n_bytes - sum(chunk.size for chunk in chunks)) > 0:
        chunk = device.allocate("host", min(max(missing, MIB), cap), "homes")
        chunks.append(chunk)
        view = chunk.view()
        view[::PAGE_BYTES] = 0
        view[: 4 * N_COLUMNS].view(np.float32)[:] = 1.0


def _submit_seconds(device: Device, chunks: list[_native.Buffer], repeats: int) -> list[float]:
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
        raise CheckError(f"a row of ones in a home summed to {last}")
    seconds = []
    for _ in range(repeats * SUBMITS_PER_REPEAT):
        started = time.perf_counter()
        backend.run(recording)
        seconds.append(time.perf_counter() - started)
    return seconds
