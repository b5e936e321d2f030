"""This module measures copies between host and device by size, and the link as the engine sees it.

Two parts of `vkmoe bench transfer`: `copies` (both directions, each queue; speed and fixed cost
come from a straight line through all sizes, and the link is read while it is busy) and `link`
(plain loads of host memory in place beside copies of it, as vkmoe measures them to choose how
misses are served).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.bench.clock import MIB, WrongResultError, clock_of
from vkmoe.bench.environment import link_under_load
from vkmoe.bench.measure import MIN_REPEATS, Row, percentile, summarise
from vkmoe.bench.reads import measure_in_place
from vkmoe.gpu.backend import Buffer, Recording
from vkmoe.gpu.device import Device
from vkmoe.gpu.link_speed import measure_link
from vkmoe.gpu.runner import time_recording
from vkmoe.gpu.transfer import Transfer
from vkmoe.placement.forecast.measured import measure_gather

if TYPE_CHECKING:
    from vkmoe.bench.transfer import Settings

MATRIX_MIB = 16.0  # of a matvec: some experts at once, as a layer has them
PEAK_SHARE = 0.9  # the prefetch chunk is the smallest size that reaches this share of the peak


def measure_copies(device: Device, settings: Settings) -> dict[str, Any]:
    """Measure GB/s by direction, queue and size; fit a line to each direction and queue."""
    sizes = sorted(int(mib * MIB) for mib in settings.copy_mib)
    host = device.allocate("host", sizes[-1], "copy source")
    local = device.allocate("device", sizes[-1], "copy target")
    readback = device.allocate("readback", sizes[-1], "copy readback")
    pattern = np.random.default_rng(0).integers(0, 256, sizes[-1], np.uint8)
    host.view()[:] = pattern
    directions = {"host -> device, compute queue": (host, local, "compute")}
    if device.native.has_upload_queue:
        directions["host -> device, upload queue"] = (host, local, "upload")
    directions["device -> host, compute queue"] = (local, readback, "compute")
    rows: list[Row] = []
    lines: dict[str, Any] = {}
    for name, (source, target, queue) in directions.items():
        recordings = {size: _record(device, source, target, size, queue) for size in sizes}
        _check(device, recordings[sizes[-1]], target, pattern, queue)
        seconds: dict[int, list[float]] = {size: [] for size in sizes}
        for _ in range(settings.repeats):
            for size in sizes:
                times = time_recording(device, recordings[size], 1, timed=False, queue=queue)
                seconds[size] += times.wall
        rows += [_row(name, size, seconds[size]) for size in sizes]
        lines[name] = _line(seconds)
    largest = _record(device, host, local, sizes[-1], "compute")
    link = link_under_load(device.info, lambda: device.native.submit(largest).wait())
    for buffer in (host, local, readback):
        buffer.close()
    return {"rows": rows, "lines": lines, "link_under_load": link}


def _record(device: Device, source: Buffer, target: Buffer, size: int, queue: str) -> Recording:
    recorder = device.native.recorder(queue=queue)
    recorder.copy(source, 0, target, 0, size)
    return recorder.finish()


def _check(
    device: Device,
    recording: Recording,
    target: Buffer,
    pattern: NDArray[np.uint8],
    queue: str,
) -> None:
    """Raise WrongResultError unless all bytes arrive; the target starts as something else."""
    clear = device.native.recorder()
    clear.fill(target, 0, target.size, 0)
    device.native.submit(clear.finish()).wait()
    device.native.submit(recording, queue).wait()
    with Transfer(device) as transfer:
        arrived = transfer.read(target, 0, target.size)
    if not np.array_equal(arrived, pattern):
        raise WrongResultError(f"a copy on the {queue} queue brought other bytes")


def _row(name: str, size: int, seconds: list[float]) -> Row:
    note = f"{1e6 * percentile(seconds, 50):.0f} us"
    speeds = summarise([size / took / 1e9 for took in seconds])
    return Row(f"{name}, {size / MIB:g} MiB", speeds, "GB/s", "wall", note)


def _line(seconds: dict[int, list[float]]) -> dict[str, float | None]:
    """Return fixed cost and speed, and the smallest size near the best speed."""
    medians = {size: percentile(values, 50) for size, values in seconds.items()}
    fit = fit_line(list(medians), list(medians.values()))
    best = max(size / took for size, took in medians.items())
    enough = min(size for size, took in medians.items() if size / took >= PEAK_SHARE * best)
    return {**fit._asdict(), "smallest_mib_near_peak": enough / MIB}


class Fit(NamedTuple):
    """Holds a line: T = fixed + bytes / speed."""

    fixed_us: float
    gb_per_s: float | None  # None: larger sizes took no longer


def fit_line(n_bytes: Sequence[float], seconds: Sequence[float]) -> Fit:
    """Fit by least squares of the relative error: small sizes count as much as large ones."""
    sizes, times = np.asarray(n_bytes, np.float64), np.asarray(seconds, np.float64)
    design = np.stack([1 / times, sizes / times], axis=1)
    (fixed, slope), *_ = np.linalg.lstsq(design, np.ones(times.size), rcond=None)
    return Fit(float(fixed) * 1e6, float(1e-9 / slope) if slope > 0 else None)


# ----- link -----


def measure_link_speeds(device: Device, settings: Settings) -> dict[str, Any]:
    """Measure GB/s of the ways over the link. Each repeat measures all but the matvecs."""
    kernels, uploads = clock_of(device), clock_of(device, "upload")
    speeds, gathers = [], []
    for _ in range(max(settings.repeats, MIN_REPEATS)):
        speeds.append(measure_link(device))
        gathers.append(measure_gather(device) / 1e9)
    reads = summarise([speed.read_bytes_per_second / 1e9 for speed in speeds])
    copies = summarise([speed.copy_bytes_per_second / 1e9 for speed in speeds])
    rows = [
        Row("plain loads of host memory in place", reads, "GB/s", kernels),
        *measure_in_place(device, MATRIX_MIB, max(settings.repeats, MIN_REPEATS)),
        Row("copies host -> device, upload queue", copies, "GB/s", uploads),
        Row("copies host -> device, gather kernel", summarise(gathers), "GB/s", kernels),
    ]
    return {"rows": rows}
