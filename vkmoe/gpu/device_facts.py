"""From what the extension says of a device to `DeviceInfo`, which knows nothing of it."""

from __future__ import annotations

from typing import Any

from vkmoe.facts import DeviceInfo, DeviceLimits, Heap, MemoryType

__all__ = ["device_info"]


def device_info(facts: dict[str, Any]) -> DeviceInfo:
    """From one entry of the extension's `physical_devices()`."""
    limits: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in facts["limits"].items()
    }
    return DeviceInfo(
        index=facts["index"],
        name=facts["name"],
        type=facts["type"],
        vendor_id=facts["vendor_id"],
        driver_name=facts["driver_name"],
        driver_info=facts["driver_info"],
        api_version=tuple(facts["api_version"]),
        subgroup_size=facts["subgroup_size"],
        subgroup_arithmetic=facts["subgroup_arithmetic"],
        features=frozenset(facts["features"]),
        heaps=tuple(Heap(**heap) for heap in facts["heaps"]),
        memory_types=tuple(
            MemoryType(item["heap"], frozenset(item["flags"])) for item in facts["memory_types"]
        ),
        limits=DeviceLimits(**limits),
        subgroup_range=(facts["min_subgroup_size"], facts["max_subgroup_size"]),
        takes_subgroup_size=facts["takes_subgroup_size"],
    )
