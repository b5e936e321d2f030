"""Describes devices that are not here, for plans: as a driver would, with what their memory does.

A profile is a JSON file with the fields of `DeviceInfo`, the host memory that is free, and speeds
in GB per second. Some come with vkmoe (`tools/make_device_profiles.py` makes them), others are the
user's. Does not plan.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from vkmoe.errors import UsageError
from vkmoe.facts import DeviceInfo, DeviceLimits, Heap, MemoryType
from vkmoe.gpu.device import Intent, memory_type_candidates
from vkmoe.placement.forecast.speeds import Speeds

__all__ = ["DeviceProfile", "described", "known_profiles", "read_profile"]

FOLDER = Path(__file__).resolve().parents[2] / "data" / "devices"
MOST_BYTES = 1 << 20  # of a file: a profile has a few KiB
TYPES = ("discrete", "integrated", "virtual", "cpu", "other")


@dataclass(frozen=True)
class DeviceProfile:
    """Describes a device and the machine it is in."""

    info: DeviceInfo
    available_host_bytes: int
    speeds: Speeds
    sources: Mapping[str, str]  # of sizes and speeds, in words


def described(info: DeviceInfo) -> dict[str, Any]:
    """Write a device as a profile has it: plain JSON."""
    found = asdict(info)
    found["features"] = sorted(info.features)
    found["memory_types"] = [
        {"heap": kind.heap, "flags": sorted(kind.flags)} for kind in info.memory_types
    ]
    return found


def known_profiles() -> list[str]:
    """Name the profiles that come with vkmoe."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def read_profile(name: str) -> DeviceProfile:
    """Read the profile of a name, or of a file. Raises UsageError for what is none."""
    path = FOLDER / f"{name}.json" if name in known_profiles() else Path(name)
    try:
        if not path.is_file():
            raise FileNotFoundError
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"it is larger than {MOST_BYTES >> 20} MiB")
        return _profile(json.loads(path.read_bytes()))
    except OSError as error:
        reason = f": {error.strerror}" if error.strerror else ""
        raise UsageError(
            f"no device profile {name!r}{reason}",
            f"there is {', '.join(known_profiles())}; or name a JSON file like theirs",
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise UsageError(
            f"{path} is no device profile: {what}",
            f"compare it with one of vkmoe's own, such as {FOLDER / 'navi31.json'}",
        ) from None


def _profile(found: dict[str, Any]) -> DeviceProfile:
    """Build a profile from parsed JSON. Raises ValueError, TypeError or KeyError if wrong."""
    device = dict(found["device"])
    heaps = tuple(_heap(heap) for heap in device["heaps"])
    types = tuple(
        MemoryType(_count(kind["heap"]), frozenset(map(str, kind["flags"])))
        for kind in device["memory_types"]
    )
    if not heaps:
        raise ValueError("there are no heaps")
    if not types or any(kind.heap >= len(heaps) for kind in types):
        raise ValueError("a memory type is of no heap")
    values: dict[str, Any] = {
        **device,
        "features": frozenset(map(str, device["features"])),
        "api_version": tuple(map(_count, device["api_version"])),
        "subgroup_size": _count(device["subgroup_size"], least=1),
        "subgroup_range": _pair(device["subgroup_range"]),
        "heaps": heaps,
        "memory_types": types,
        "limits": DeviceLimits(**{key: _limit(key, x) for key, x in device["limits"].items()}),
    }
    if values["type"] not in TYPES or values.get("layout", "planes") != "planes":
        raise ValueError(f"its type is none of {', '.join(TYPES)}, or its layout is not planes")
    info = DeviceInfo(**values)
    for intent in get_args(Intent):
        if not memory_type_candidates(info, intent):
            raise ValueError(f"no memory type can be used for {intent} memory")
    speeds = {key: 1e9 * _speed(value) for key, value in found.get("gb_per_second", {}).items()}
    sources = {str(key): str(text) for key, text in found.get("sources", {}).items()}
    return DeviceProfile(info, _count(found["host_memory_bytes"]), Speeds(**speeds), sources)


def _heap(found: dict[str, Any]) -> Heap:
    counts = {
        key: None if value is None else _count(value)
        for key, value in found.items()
        if key != "device_local"
    }
    if not counts.get("size") or not isinstance(found["device_local"], bool):
        raise ValueError("a heap has no size, or does not say whether it is device_local")
    return Heap(device_local=found["device_local"], **counts)  # type: ignore[arg-type]


def _pair(value: Any) -> tuple[int, int]:
    least, most = (_count(item, least=1) for item in value)
    return least, most


def _limit(key: str, value: Any) -> Any:
    """Read a limit: a number, three, or the nanoseconds of a timestamp."""
    if key == "timestamp_period":
        return _speed(value)
    if isinstance(value, list):
        x, y, z = (_count(item, least=1) for item in value)
        return x, y, z
    return _count(value, least=1)


def _count(value: Any, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 62:
        raise ValueError(f"{value!r} is no number of bytes or items")
    return value


def _speed(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e6:
        raise ValueError(f"{value!r} is no speed or time")
    return float(value)
