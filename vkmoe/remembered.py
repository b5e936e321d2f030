"""Remembers how kernels are best launched on a device, as `vkmoe tune` measured it there.

Owns the file, one for each device, in the user's cache folder, and decides whether what stands in
it still fits: the driver, the compiled kernels and vkmoe's own table must be those of then. A file
that does not fit, or is damaged, is ignored with a note: it only costs speed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from errno import ENOENT
from pathlib import Path
from typing import Any, NamedTuple, get_args

from vkmoe import __version__
from vkmoe.choices import TuningSource
from vkmoe.cpu.device import cpu_info
from vkmoe.experts.records.keeper import write_whole
from vkmoe.facts import DeviceInfo
from vkmoe.gpu.device import spirv_folder
from vkmoe.ops.launches import (
    KEEPING,
    ColumnClass,
    KernelClass,
    Launch,
    MatvecFamily,
    RowClass,
)
from vkmoe.ops.tuning import Tuning, choose_tuning
from vkmoe.quants import HAS_KERNEL

__all__ = [
    "MAX_BYTES",
    "Measured",
    "Recalled",
    "forget",
    "identity",
    "machine_identity",
    "read_remembered",
    "recall",
    "remember",
    "remembered_path",
    "tuning_for",
    "with_measured",
    "write_remembered",
]

log = logging.getLogger("vkmoe")
FORMAT, VERSION = "vkmoe tuning", 1
MAX_BYTES = 1 << 20  # of a file, which has some hundred bytes for each kernel
_AGAIN = "`vkmoe tune` measures again"


class Measured(NamedTuple):
    """Holds what was measured of a class of kernels: the table's launch, the best one, its gain.

    `gain` is the share of time that the best one saves; 0 where it is the table's.
    """

    kernel: KernelClass
    table: Launch
    best: Launch
    gain: float


class Recalled(NamedTuple):
    """Holds what is remembered of a device, or a note on why it is not used."""

    measured: tuple[Measured, ...] = ()
    note: str = ""

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
    """Return the table's tuning with the launches that were measured to be better."""
    launches = tuple((item.kernel, item.best) for item in recalled.changes)
    return replace(choose_tuning(device), launches=launches)


def remembered_path(device: DeviceInfo, what: str = "tuning") -> Path:
    """Name the file of a device: in the user's cache folder, whether it is there or not."""
    # Without a home folder "~" stays as it is, and names a folder that is not there.
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-")
    return Path(cache) / "vkmoe" / what / f"{name[:80] or 'device'}.json"


def recall(device: DeviceInfo) -> Recalled:
    """Read what is remembered of a device. Never raises for what a file holds."""
    path = remembered_path(device)
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return Recalled()
    except OSError as error:
        return Recalled(note=f"the tuning in {path} cannot be read: {error.strerror}; {_AGAIN}")
    try:
        return Recalled(_parse(data, device))
    except _Misfit as misfit:
        return Recalled(note=f"the tuning in {path} is not used: {misfit}; {_AGAIN}")


def remember(device: DeviceInfo, measured: Sequence[Measured]) -> Path:
    """Write what was measured in place of what was remembered. Raises OSError."""
    document = {
        **identity(device),
        "kernels": [
            {
                "kernel": item.kernel._asdict(),
                "table": item.table._asdict(),
                "best": item.best._asdict(),
                "gain": round(item.gain, 4),
            }
            for item in sorted(measured)
        ],
    }
    return write_remembered(remembered_path(device), document)


def write_remembered(path: Path, document: Mapping[str, Any]) -> Path:
    """Write a file of the user's cache folder as a whole; returns its path. Raises OSError."""
    if not path.is_absolute():
        raise FileNotFoundError(ENOENT, "you have no home folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(document, indent=1, allow_nan=False) + "\n")
    return path


def read_remembered(path: Path, expected: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read such a file; None where it is not there, is damaged, or lacks what is expected."""
    try:
        with path.open("rb") as stream:
            document = json.loads(stream.read(MAX_BYTES + 1))
        if {name: document[name] for name in expected} == expected:
            return dict(document)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass  # it is measured again, and the file is written anew
    return None


def forget(device: DeviceInfo) -> bool:
    """Delete what is remembered of a device; says whether there was anything. Raises OSError.

    That is how kernels are launched, how fast memory is, and where experts are computed.
    """
    others = ("modes", "speeds")
    paths = [remembered_path(device), *(remembered_path(device, what) for what in others)]
    there = any(path.exists() for path in paths)
    for path in paths:
        path.unlink(missing_ok=True)
    return there


# ----- what a file must agree with -----


class _Misfit(Exception):
    """Says why a file is not used."""


_MEANING = {  # of the fields of a file, for notes
    "format": "it is no tuning",
    "version": "it is of another version of vkmoe",
    "device": "it is of another device",
    "driver": "it was measured with another driver",
    "shaders": "it was measured with other kernels",
}


def identity(
    device: DeviceInfo, file_format: str = FORMAT, version: int = VERSION
) -> dict[str, Any]:
    """Return what a file begins with, all of which must be as it was."""
    return {
        "format": file_format,
        "version": version,
        "device": f"{device.name}, {device.vendor_id:#06x}",
        "driver": f"{device.driver}, Vulkan {'.'.join(map(str, device.api_version))}",
        "shaders": _fingerprint(choose_tuning(device).dot_suffix),
    }


def machine_identity(device: DeviceInfo, file_format: str, version: int) -> dict[str, Any]:
    """Return what a file begins with that depends on the CPU, too, and on whose memory is whose."""
    cpu = cpu_info()
    beside = {"cpu": f"{cpu.name}, {cpu.driver}", "shares_memory": device.is_uma}
    return identity(device, file_format, version) | {"vkmoe": __version__} | beside


def _fingerprint(suffix: str) -> str:
    """Hash the compiled kernels that a mapping launches."""
    sums = hashlib.sha256()
    for family in (*get_args(MatvecFamily), *KEEPING.values()):
        for kind in sorted(HAS_KERNEL):
            path = spirv_folder() / f"{family}.{kind.lower()}{suffix}.spv"
            sums.update(path.read_bytes() if path.exists() else b"-")
    return sums.hexdigest()[:16]


def _parse(data: bytes, device: DeviceInfo) -> tuple[Measured, ...]:
    try:
        document = json.loads(data)
        expected = identity(device)
        for name, wanted in expected.items():
            if document[name] != wanted:
                raise _Misfit(_MEANING[name])
        if set(document) != {*expected, "kernels"}:
            raise _Misfit("it has a field that is not known")
        table = choose_tuning(device)
        return tuple(_measured(item, table, device) for item in document["kernels"])
    except (ValueError, TypeError, KeyError, RecursionError):
        raise _Misfit("it is damaged") from None


def _measured(item: dict[str, Any], tuning: Tuning, device: DeviceInfo) -> Measured:
    """Check an entry. Raises _Misfit, and TypeError, KeyError or ValueError for a damaged one."""
    found = Measured(
        KernelClass(**item["kernel"]),
        Launch(**item["table"]),
        Launch(**item["best"]),
        item["gain"],
    )
    kernel, numbers = found.kernel, (*found.table, *found.best)
    names = (*get_args(MatvecFamily), *HAS_KERNEL, *get_args(RowClass), *get_args(ColumnClass))
    sound = set(kernel) <= set(names) and kernel.family in get_args(MatvecFamily)
    if not (sound and all(type(number) is int for number in numbers)):
        raise ValueError(item)
    if set(item) != {"kernel", "table", "best", "gain"} or not 0.0 <= found.gain < 1.0:
        raise ValueError(item)
    if found.table != tuning.table_launch(kernel):
        raise _Misfit("vkmoe's own table has changed since")
    if found.best != found.table and not tuning.allows(kernel, found.best, device):
        raise _Misfit(f"this device does not take {found.best}")
    return found
