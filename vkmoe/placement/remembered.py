"""Remembers what was measured on a device, in files of the user's cache folder.

Owns the form of these files, one of each kind for each device, and decides whether what stands in
one still fits: the driver, the compiled kernels and all else that was measured with must be those
of then. What does not fit, or is damaged, is ignored: it only costs speed. Of the kinds it knows
how kernels are best launched, as `vkmoe tune` measured it; the others are the subject of
placement/forecast/measured.py and canary/check.py.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from errno import ENOENT
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from vkmoe import __version__
from vkmoe.choices import TuningSource
from vkmoe.cpu.device import cpu_info
from vkmoe.cpu.variants import has_cpu
from vkmoe.experts.records.keeper import write_whole
from vkmoe.facts import DeviceInfo
from vkmoe.gpu.device import spirv_folder
from vkmoe.kernels.launches import KEEPING, KernelClass, Launch, MatvecFamily, TileNumbers
from vkmoe.kernels.tuning import Tuning, choose_tuning
from vkmoe.placement.typed_json import plain, typed
from vkmoe.quants import HAS_KERNEL

log = logging.getLogger("vkmoe")
Kind = Literal["tuning", "speeds", "canary"]
VERSIONS: dict[Kind, int] = {"tuning": 1, "speeds": 2, "canary": 1}
TILES_MEASURED = "matmul.q4_k"  # the kernel that stands for all that multiply tiles
MAX_BYTES = 1 << 20  # of a file, which has some hundred bytes for each kernel
T = TypeVar("T")

# ----- any file -----


class Misfit(Exception):
    """Says why a file is not used."""


def remembered_path(device: DeviceInfo, what: Kind = "tuning") -> Path:
    """Name the file of a device: in the user's cache folder, whether it is there or not."""
    # Without a home folder "~" stays as it is, and names a folder that is not there.
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-")
    return Path(cache) / "vkmoe" / what / f"{name[:80] or 'device'}.json"


def read(device: DeviceInfo, what: Kind, kind: type[T]) -> T:
    """Read what a file holds. Raises OSError, and Misfit where it is not to be used."""
    with remembered_path(device, what).open("rb") as stream:
        data = stream.read(MAX_BYTES + 1)
    try:
        document = dict(json.loads(data))
        for name, wanted in _identity(device, what).items():
            if document.pop(name) != wanted:
                raise Misfit(_MEANING.get(name, f"{name} was another then"))
        return typed(kind, document)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Misfit(f"it is damaged ({error})") from None


def write(device: DeviceInfo, what: Kind, value: Any) -> Path:
    """Write a file as a whole, in place of what it had; returns its path. Raises OSError."""
    path = remembered_path(device, what)
    if not path.is_absolute():
        raise FileNotFoundError(ENOENT, "you have no home folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {**_identity(device, what), **plain(value)}
    write_whole(path, json.dumps(document, indent=1, allow_nan=False) + "\n")
    return path


def forget(device: DeviceInfo) -> bool:
    """Delete what is remembered of a device; says whether there was anything. Raises OSError."""
    paths = [remembered_path(device, what) for what in VERSIONS]
    there = any(path.exists() for path in paths)
    for path in paths:
        path.unlink(missing_ok=True)
    return there


_MEANING = {  # of what a file must agree with, where it does not
    "format": "it is no tuning",
    "version": "it is of another version of vkmoe",
    "device": "it is of another device",
    "driver": "it was measured with another driver",
    "shaders": "it was measured with other kernels",
}


def _identity(device: DeviceInfo, what: Kind) -> dict[str, Any]:
    """Return what a file begins with, all of which must be as it was.

    Speeds depend on the CPU, too, and on whose memory is whose.
    """
    found = {
        "format": f"vkmoe {what}",
        "version": VERSIONS[what],
        "device": f"{device.name}, {device.vendor_id:#06x}",
        "driver": f"{device.driver}, Vulkan {'.'.join(map(str, device.api_version))}",
    }
    if what == "canary":  # its keys are hashes of kernels
        return found
    found["shaders"] = _fingerprint(choose_tuning(device).dot_suffix)
    if what == "tuning":
        return found
    cpu = f"{cpu_info().name}, {cpu_info().driver}" if has_cpu() else "without kernels"
    return found | {"vkmoe": __version__, "cpu": cpu, "shares_memory": device.is_uma}


def _fingerprint(suffix: str) -> str:
    """Hash the compiled kernels that a mapping launches, and those of tiles that are measured."""
    sums = hashlib.sha256()
    for family in (*get_args(MatvecFamily), *KEEPING.values()):
        for kind in sorted(HAS_KERNEL):
            path = spirv_folder() / f"{family}.{kind.lower()}{suffix}.spv"
            sums.update(path.read_bytes() if path.exists() else b"-")
    for path in sorted(spirv_folder().glob(f"{TILES_MEASURED}*.spv")):
        sums.update(path.read_bytes())
    return sums.hexdigest()[:16]


# ----- how kernels are launched -----


class Measured(NamedTuple):
    """Holds what was measured of a class of kernels: the table's launch, the best one, its gain.

    `gain` is the share of time that the best one saves; 0 where it is the table's.
    """

    kernel: KernelClass
    table: Launch
    best: Launch
    gain: float


class MeasuredTiles(NamedTuple):
    """Holds what tiles multiply: by the table, what was measured to be best, and its gain."""

    table: TileNumbers
    best: TileNumbers
    gain: float


class _Tunings(NamedTuple):
    """Is what a file of tunings has."""

    kernels: tuple[Measured, ...]
    tiles: MeasuredTiles | None = None


class Recalled(NamedTuple):
    """Holds what is remembered of a device, or a note on why it is not used."""

    measured: tuple[Measured, ...] = ()
    note: str = ""
    tiles: MeasuredTiles | None = None

    @property
    def changes(self) -> tuple[Measured, ...]:
        """List what is launched otherwise than the table has it."""
        return tuple(item for item in self.measured if item.best != item.table)


def tuning_for(device: DeviceInfo, source: TuningSource) -> Tuning:
    """Choose the tuning for a device, with what is remembered of it unless only the table counts.

    What is ignored is noted in the log.
    """
    if source == "table":
        return choose_tuning(device)
    recalled = recall(device)
    if recalled.note:
        log.info(recalled.note)
    return with_measured(device, recalled)


def with_measured(device: DeviceInfo, recalled: Recalled) -> Tuning:
    """Return the table's tuning with the launches and tiles that were measured to be better."""
    launches = tuple((item.kernel, item.best) for item in recalled.changes)
    tuning = replace(choose_tuning(device), launches=launches)
    return tuning.with_numbers(recalled.tiles.best) if recalled.tiles else tuning


def remember(
    device: DeviceInfo, measured: Sequence[Measured], tiles: MeasuredTiles | None = None
) -> Path:
    """Write what was measured in place of what was remembered. Raises OSError."""
    rounded = (item._replace(gain=round(item.gain, 4)) for item in sorted(measured))
    return write(device, "tuning", _Tunings(tuple(rounded), tiles))


def recall(device: DeviceInfo) -> Recalled:
    """Read what is remembered of a device. Never raises for what a file holds."""
    path, tuning = remembered_path(device), choose_tuning(device)
    try:
        found = read(device, "tuning", _Tunings)
        for item in found.kernels:
            _check(item, tuning, device)
        if found.tiles is not None and found.tiles.table != tuning.tile_numbers:
            raise Misfit("vkmoe's own table has changed since")
        return Recalled(found.kernels, tiles=found.tiles)
    except FileNotFoundError:
        return Recalled()
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    except Misfit as misfit:
        why = f"is not used: {misfit}"
    return Recalled(note=f"the tuning in {path} {why}; `vkmoe tune` measures again")


def _check(found: Measured, tuning: Tuning, device: DeviceInfo) -> None:
    """Raise Misfit where a launch may not be used."""
    if found.kernel.type not in HAS_KERNEL or found.gain >= 1.0:
        raise Misfit(f"it is damaged ({found.kernel.type}, {found.gain})")
    if found.table != tuning.table_launch(found.kernel):
        raise Misfit("vkmoe's own table has changed since")
    if found.best != found.table and not tuning.allows(found.kernel, found.best, device):
        raise Misfit(f"this device does not take {found.best}")
