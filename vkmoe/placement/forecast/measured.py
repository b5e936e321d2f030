"""Measures how fast a machine's memory is, once, and remembers it, with how far predictions erred.

Owns a file for each device in the user's cache folder: the speeds of its memory, of the CPU's and
of disks, and the corrections that trials gave. The link is measured anew by each engine (link.py):
it takes some milliseconds. With --tuning table nothing of this counts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

from vkmoe import remembered
from vkmoe.choices import ModeName
from vkmoe.cpu.device import n_cores
from vkmoe.cpu.reads import host_bytes_per_second
from vkmoe.errors import DeviceLostError, GpuError
from vkmoe.facts import DeviceInfo
from vkmoe.gguf_file.disk import read_speed
from vkmoe.gpu.device import Device
from vkmoe.gpu.link_speed import measure_memory
from vkmoe.placement.forecast.speeds import Speeds
from vkmoe.placement.link import link_of_misses

__all__ = ["Known", "measure_speeds", "recall_speeds", "remember_corrections"]

log = logging.getLogger("vkmoe")
_FORMAT, _VERSION = "vkmoe speeds", 1
_NAMES = ("device", "link", "host", "copy", "gather")  # of speeds; those of files are apart


class Known(NamedTuple):
    """Holds what is remembered of a machine; speeds that were not measured are 0."""

    speeds: Speeds = Speeds()
    corrections: Mapping[ModeName, float] = {}  # measured over predicted times of tokens

    @property
    def measured(self) -> bool:
        return self.speeds.device > 0 and self.speeds.host > 0 and self.speeds.file > 0


def recall_speeds(device: DeviceInfo, model: Path) -> Known:
    """Return what is remembered of a device and of the disk that has the model."""
    found = _read(device)
    speeds = Speeds(**found["speeds"], file=found["files"].get(_disk(model), 0.0))
    return Known(speeds, found["corrections"])


def measure_speeds(device: Device, model: Path, n_threads: int | None = None) -> Speeds:
    """Measure all speeds, which takes a second or two, and remember them.

    To be called before anything is allocated. Raises DeviceLostError.
    """
    info, host = device.info, host_bytes_per_second(n_threads or n_cores())
    speeds = Speeds(device=_of_device(device, host), host=host, file=read_speed(model))
    if info.is_vulkan:
        speeds = speeds.over_link(link_of_misses(device))
    found = _read(info)
    found["speeds"] = {name: getattr(speeds, name) for name in _NAMES}
    _write(info, found | {"files": {**found["files"], _disk(model): speeds.file}})
    return speeds


def _of_device(device: Device, host: float) -> float:
    """Measure device memory as shaders read it; 0 where that fails.

    The CPU reads `host` bytes per second; shaders that run on it reach a small part of that.
    """
    if not device.info.is_vulkan:
        return host
    try:
        return measure_memory(device)
    except DeviceLostError:
        raise
    except GpuError as error:
        log.warning("the speed of device memory could not be measured: %s", error)
        return 0.0


def remember_corrections(device: DeviceInfo, corrections: Mapping[ModeName, float]) -> None:
    """Remember by how much tokens of some modes take longer than predicted."""
    found = _read(device)
    _write(device, found | {"corrections": {**found["corrections"], **corrections}})


def _disk(model: Path) -> str:
    """Name the disk that has a file."""
    try:
        return str(os.stat(model).st_dev)
    except OSError:
        return ""


def _read(device: DeviceInfo) -> dict[str, Any]:
    """Read the file of a device; what is not there, or not sound, was never measured."""
    path = remembered.remembered_path(device, "speeds")
    found = remembered.read_remembered(path, remembered.machine_identity(device, _FORMAT, _VERSION))
    try:
        assert found is not None
        corrections = {mode: _speed(x) for mode, x in found["corrections"].items()}
        assert set(corrections) <= set(get_args(ModeName)) and all(corrections.values())
        return {
            "speeds": {name: _speed(found["speeds"][name]) for name in _NAMES},
            "files": {str(disk): _speed(x) for disk, x in found["files"].items()},
            "corrections": corrections,
        }
    except (AssertionError, KeyError, TypeError, ValueError, AttributeError):
        return {"speeds": dict.fromkeys(_NAMES, 0.0), "files": {}, "corrections": {}}


def _speed(value: Any) -> float:
    if not 0 <= float(value) < 1e15:
        raise ValueError(value)
    return float(value)


def _write(device: DeviceInfo, found: Mapping[str, Any]) -> None:
    path = remembered.remembered_path(device, "speeds")
    try:
        remembered.write_remembered(
            path, {**remembered.machine_identity(device, _FORMAT, _VERSION), **found}
        )
    except OSError as error:
        log.info("what was measured cannot be remembered: %s", error.strerror)
