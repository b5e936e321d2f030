"""Part `copies`: host to device on each queue, and device to host memory, by size (B 3).

Speed and fixed cost come from a straight line through all sizes. The link is read while it is busy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bench.environment import link_under_load
from bench.measure import Row, percentile, summarise
from bench.parts.common import MIB, CheckError, Settings, fit_line, time_recording
from vkmoe.gpu.device import Device
from vkmoe.gpu.transfer import Transfer

if TYPE_CHECKING:
    from vkmoe.gpu import _native

__all__ = ["measure"]

PEAK_SHARE = 0.9  # the prefetch chunk is the smallest size that reaches this share of the peak


def measure(device: Device, settings: Settings) -> dict[str, Any]:
    """Rows of GB/s by direction, queue and size; a line fitted to each direction and queue."""
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


def _record(
    device: Device, source: _native.Buffer, target: _native.Buffer, size: int, queue: str
) -> _native.Recording:
    recorder = device.native.recorder(queue=queue)
    recorder.copy(source, 0, target, 0, size)
    return recorder.finish()


def _check(
    device: Device,
    recording: _native.Recording,
    target: _native.Buffer,
    pattern: NDArray[np.uint8],
    queue: str,
) -> None:
    """All bytes must arrive before a copy is timed; the target starts as something else."""
    clear = device.native.recorder()
    clear.fill(target, 0, target.size, 0)
    device.native.submit(clear.finish()).wait()
    device.native.submit(recording, queue).wait()
    with Transfer(device) as transfer:
        arrived = transfer.read(target, 0, target.size)
    if not np.array_equal(arrived, pattern):
        raise CheckError(f"a copy on the {queue} queue brought other bytes")


def _row(name: str, size: int, seconds: list[float]) -> Row:
    note = f"{1e6 * percentile(seconds, 50):.0f} us"
    speeds = summarise([size / took / 1e9 for took in seconds])
    return Row(f"{name}, {size / MIB:g} MiB", speeds, "GB/s", "wall", note)


def _line(seconds: dict[int, list[float]]) -> dict[str, float]:
    """Fixed cost and speed, and the smallest size near the best speed."""
    medians = {size: percentile(values, 50) for size, values in seconds.items()}
    fit = fit_line(list(medians), list(medians.values()))
    best = max(size / took for size, took in medians.items())
    enough = min(size for size, took in medians.items() if size / took >= PEAK_SHARE * best)
    return {**fit._asdict(), "smallest_mib_near_peak": enough / MIB}
