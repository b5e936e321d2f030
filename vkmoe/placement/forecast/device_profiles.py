"""Describes devices that are not here, for plans: as a driver would, with what their memory does.

A profile is a JSON file with the fields of `DeviceInfo`, the host memory that is free, and speeds
in GB per second. Some come with vkmoe (`tools/make_device_profiles.py` makes them), others are the
user's. Does not plan.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

import numpy as np

from vkmoe.errors import UsageError
from vkmoe.facts import DeviceInfo
from vkmoe.gpu.device import Intent, memory_type_candidates
from vkmoe.placement.forecast.speeds import TYPICAL, Speeds
from vkmoe.placement.typed_json import typed

FOLDER = Path(__file__).resolve().parents[2] / "data" / "devices"
MOST_BYTES = 1 << 20  # of a file: a profile has a few KiB


@dataclass(frozen=True)
class DeviceProfile:
    """Describes a device and the machine it is in."""

    info: DeviceInfo
    available_host_bytes: int
    speeds: Speeds
    sources: Mapping[str, str]  # of sizes and speeds, in words


class _File(NamedTuple):
    """Is what a file has."""

    device: DeviceInfo
    host_memory_bytes: int
    gb_per_second: Speeds = Speeds()
    sources: Mapping[str, str] = MappingProxyType({})


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
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} is no device profile: {error}",
            f"compare it with one of vkmoe's own, such as {FOLDER / 'navi31.json'}",
        ) from None


def _profile(found: Any) -> DeviceProfile:
    """Build a profile from parsed JSON. Raises ValueError if it is wrong."""
    info, host_bytes, gb_per_second, sources = typed(_File, found)
    sizes = np.hstack([info.subgroup_size, info.subgroup_range, *vars(info.limits).values()])
    lacking = [x for x in get_args(Intent) if not memory_type_candidates(info, x)]
    problems = {
        "there are no heaps": not info.heaps,
        "a heap has no size": not all(heap.size for heap in info.heaps),
        "a memory type is of no heap": any(x.heap >= len(info.heaps) for x in info.memory_types),
        f"no memory type can be used for {' or '.join(lacking)} memory": bool(lacking),
        "a limit, or a size of subgroups, is 0": not sizes.all(),
        f"its type is none of {', '.join(TYPICAL)}": info.type not in TYPICAL,
        "its layout is not planes": not info.is_vulkan,
    }
    for problem, is_there in problems.items():
        if is_there:
            raise ValueError(problem)
    speeds = Speeds(**{key: 1e9 * value for key, value in vars(gb_per_second).items()})
    return DeviceProfile(info, host_bytes, speeds, sources)
