"""What was found (device, model) and what was decided (plan).

Plain data without a GPU behind it, so that tests invent them.
"""

from __future__ import annotations

from vkmoe.facts_device import DeviceInfo, DeviceLimits, Heap, MemoryType
from vkmoe.facts_model import ExpertSpec, LatentSpec, ModelSpec, RopeSpec
from vkmoe.facts_plan import (
    CacheSizing,
    Conversion,
    MemoryPlan,
    PlanLine,
    SizingStatus,
    WeightBytes,
)

__all__ = [
    "CacheSizing",
    "Conversion",
    "DeviceInfo",
    "DeviceLimits",
    "ExpertSpec",
    "Heap",
    "LatentSpec",
    "MemoryPlan",
    "MemoryType",
    "ModelSpec",
    "PlanLine",
    "RopeSpec",
    "SizingStatus",
    "WeightBytes",
]
