"""What the parts of bench/transfer.py share: their settings, timing a recording, straight lines.

Owns how one recording is timed by the wall clock and by the device. Does not choose what to record.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vkmoe.gpu.device import Device, translate_errors

if TYPE_CHECKING:
    from vkmoe.gpu import _native

__all__ = ["MIB", "CheckError", "Fit", "Settings", "Times", "fit_line", "time_recording"]

MIB = 1 << 20


class CheckError(AssertionError):
    """A result was wrong, so its time means nothing: a bug of ours or of the driver."""


@dataclass(frozen=True)
class Settings:
    """How much the parts measure; the defaults of the command line are in transfer.py."""

    card: Mapping[str, Any]  # a ratio is refused without it
    repeats: int
    submits: int  # of the submit part
    dispatches: int
    copy_mib: tuple[float, ...]
    homes_gib: tuple[float, ...]
    read_mib: tuple[float, ...]


class Times(NamedTuple):
    """Seconds of each repeat: wall from submit to the end of the wait, and on the device."""

    wall: list[float]
    device: list[float]  # empty where the recording has no timestamps


class Fit(NamedTuple):
    """T = fixed + bytes / speed."""

    fixed_us: float
    gb_per_s: float


def time_recording(
    device: Device,
    recording: _native.Recording,
    repeats: int,
    timed: bool = True,
    queue: str = "compute",
    before: _native.Recording | None = None,
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


def fit_line(n_bytes: Sequence[float], seconds: Sequence[float]) -> Fit:
    """Least squares of the relative error, so that small sizes count as much as large ones."""
    sizes, times = np.asarray(n_bytes, np.float64), np.asarray(seconds, np.float64)
    design = np.stack([1 / times, sizes / times], axis=1)
    (fixed, slope), *_ = np.linalg.lstsq(design, np.ones(times.size), rcond=None)
    return Fit(float(fixed) * 1e6, float(1e-9 / slope) if slope > 0 else float("inf"))
