"""Measures how fast a machine's memory is, once, and remembers it, with what trials of modes found.

Owns a file for each device in the user's cache folder: the speeds of its memory, of the CPU's and
of disks; how far predictions erred, and which modes were chosen. The link is measured anew by each
engine: it takes some milliseconds. With --tuning table nothing of this counts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from vkmoe.batch import TokenBatch
from vkmoe.choices import ModeName, TuningSource
from vkmoe.cpu.device import n_cores
from vkmoe.cpu.reads import host_bytes_per_second
from vkmoe.errors import DeviceLostError, GpuError
from vkmoe.facts import DeviceInfo
from vkmoe.gguf_file.disk import read_speed
from vkmoe.gpu.backend import Backend
from vkmoe.gpu.device import Device
from vkmoe.gpu.link_speed import (
    GROUP_BYTES,
    N_SLICES,
    LinkSpeed,
    Timed,
    best_of,
    default_slice_bytes,
    link_memory,
    measure_link,
    measure_memory,
)
from vkmoe.gpu.program import Program, TensorRef, memory_range
from vkmoe.gpu.token_io import pack_params, param_words
from vkmoe.gpu.transfer import Transfer
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.memory.operations import LandingMemory, gather
from vkmoe.kernels.router.operations import RoutingLog
from vkmoe.kernels.tuning import choose_tuning
from vkmoe.placement import remembered
from vkmoe.placement.forecast.speeds import Speeds

log = logging.getLogger("vkmoe")
T = TypeVar("T")
MOST_CHOICES = 64  # that are remembered
SMALLEST_SLICE_BYTES = 1 << 20  # the time of less is the time of a submit
HEAP_SHARE = 16  # measuring a link takes at most this part of the smallest heap
_ROUTING = TensorRef("link routing", 6 * N_SLICES)
_PARAMS = TensorRef("link params", param_words(1))
_LOG = RoutingLog(1, N_SLICES, name="link log")


# ----- what is remembered -----


@dataclass(frozen=True)
class Known:
    """Holds what is remembered of a machine; speeds that were not measured are 0."""

    speeds: Speeds = field(default_factory=Speeds)
    disks: Mapping[str, float] = field(default_factory=dict)  # speeds of files
    corrections: Mapping[ModeName, float] = field(default_factory=dict)  # as in `Machine`
    # The mode that a trial chose and why, by what that depends on; the newest first.
    choices: Mapping[str, tuple[ModeName, str]] = field(default_factory=dict)

    @property
    def measured(self) -> bool:
        return self.speeds.device > 0 and self.speeds.host > 0 and self.speeds.file > 0


def recall_speeds(
    device: DeviceInfo, model: Path | None = None, source: TuningSource = "remembered"
) -> Known:
    """Return what is remembered of a device, and of the disk that has the model, if it counts."""
    if source == "table":
        return Known()
    try:
        found = remembered.read(device, "speeds", Known)
    except (OSError, remembered.Misfit):
        return Known()  # it is measured again, and the file is written anew
    speeds = replace(found.speeds, file=found.disks.get(_disk(model), 0.0) if model else 0.0)
    return replace(found, speeds=speeds) if all(found.corrections.values()) else Known()


def remember_trial(
    device: DeviceInfo, corrections: Mapping[ModeName, float], key: str, mode: ModeName, reason: str
) -> None:
    """Remember by how much tokens of some modes take longer than predicted, and what was chosen."""
    known = recall_speeds(device)
    choices = {key: (mode, reason)} | {k: x for k, x in known.choices.items() if k != key}
    choices = dict(list(choices.items())[:MOST_CHOICES])
    corrected = {**known.corrections, **corrections}
    _remember(device, replace(known, corrections=corrected, choices=choices))


def _disk(model: Path) -> str:
    """Name the disk that has a file."""
    try:
        return str(os.stat(model).st_dev)
    except OSError:
        return ""


def _remember(device: DeviceInfo, known: Known) -> None:
    try:
        remembered.write(device, "speeds", known)
    except OSError as error:
        log.info("what was measured cannot be remembered: %s", error.strerror)


# ----- what is measured -----


def measure_speeds(device: Device, model: Path, n_threads: int | None = None) -> Speeds:
    """Measure all speeds, which takes a second or two, and remember them.

    For `model` a folder may be given: then its disk's speed is the one that is remembered, if any.
    To be called before anything is allocated. Raises DeviceLostError.
    """
    info, host = device.info, host_bytes_per_second(n_threads or n_cores())
    known = recall_speeds(info, model)
    speeds = Speeds(device=host, host=host, file=read_speed(model) or known.speeds.file)
    if info.is_vulkan:  # shaders that run on a CPU reach a small part of what it reads itself
        found = _measured("device memory", lambda: measure_memory(device))
        speeds = replace(speeds, device=found or 0.0).over_link(link_of_misses(device))
    disks = {**known.disks, _disk(model): speeds.file}
    _remember(info, replace(known, speeds=speeds, disks=disks))
    return speeds


def link_of_misses(device: Device) -> LinkSpeed | None:
    """Measure what a miss costs; None where there is no link that misses cross.

    To be called before anything is allocated: it takes up to 64 MiB, or less on small devices, and
    gives them back. Raises DeviceLostError; without another result nothing depends on it.
    """
    if device.info.is_uma:
        return None
    room = min(heap.size for heap in device.info.heaps) // (HEAP_SHARE * N_SLICES)
    slice_bytes = min(default_slice_bytes(device), room) // GROUP_BYTES * GROUP_BYTES
    if slice_bytes < SMALLEST_SLICE_BYTES:
        return None

    def measure() -> LinkSpeed:
        speed = measure_link(device, slice_bytes)
        return speed._replace(gather_bytes_per_second=measure_gather(device, slice_bytes))

    return _measured("host memory", measure)


def _measured(what: str, measure: Callable[[], T]) -> T | None:
    """Measure a speed; None, with a warning, where that fails. Raises DeviceLostError."""
    try:
        return measure()
    except DeviceLostError:
        raise
    except GpuError as error:
        log.warning("the speed of %s could not be measured: %s", what, error)
        return None


def measure_gather(device: Device, slice_bytes: int | None = None) -> float:
    """Measure the bytes per second that the gather kernel copies from host memory, at best.

    It copies N_SLICES slices as it would that many missed experts. As cheap as `measure_link`, with
    as much memory, and the same errors.
    """
    slice_bytes = slice_bytes or default_slice_bytes(device)
    with link_memory(device, N_SLICES * slice_bytes) as (source, target):
        (best,) = best_of([_gather(device, source.address, target.address, slice_bytes)])
        return best


def _gather(device: Device, source: int, target: int, slice_bytes: int) -> Timed:
    """Time the copy of all slices from the address `source` to `target`."""
    backend, program = Backend(device), Program("gather slices")
    n_bytes = N_SLICES * slice_bytes
    starts = slice_bytes * np.arange(N_SLICES, dtype=np.uint64)
    addresses = np.concatenate([np.uint64(target) + starts, np.uint64(source) + starts])
    words = np.concatenate([np.zeros(2 * N_SLICES, np.uint32), addresses.view(np.uint32)])
    params = np.zeros(_PARAMS.n_words, np.uint32)
    pack_params(params.data, TokenBatch.one(0, 0), 0, serial=1)
    with Transfer(device, words.nbytes) as transfer:
        transfer.write(backend.tensor(_ROUTING), 0, words.view(np.uint8))
        transfer.write(backend.tensor(_PARAMS), 0, params.view(np.uint8))
        transfer.flush()
    memory = memory_range(target, n_bytes)
    landing = LandingMemory((memory,), _LOG, layer=0)
    homes = (memory_range(source, n_bytes),)
    op = OpContext(program, choose_tuning(device.info), "gather slices")
    gather(op, _ROUTING, _PARAMS, landing, slice_bytes, homes)
    return Timed(device, backend.record(program, timed=True), n_bytes)
