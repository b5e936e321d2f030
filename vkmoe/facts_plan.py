"""What was decided before anything is allocated, and the sizes it rests on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "CacheSizing",
    "Conversion",
    "MemoryPlan",
    "PlanLine",
    "SizingStatus",
    "WeightBytes",
]

SizingStatus = Literal[
    "ok", "below_recommended", "budget_exhausted", "unknown_expert_size", "empty"
]


@dataclass(frozen=True)
class Conversion:
    """Tensors whose type has no kernels: while they are loaded they become another one."""

    file_type: str
    loaded_type: str
    of_experts: bool  # of routed ones, which a small host pool may read more than once
    n_tensors: int
    n_weights: int
    file_bytes: int
    loaded_bytes: int


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of the weights in device layout, rounded as they will be allocated.

    `spans` are the bytes of one expert in each MoE layer, `pieces` those of the trunk in the order
    they are placed; empty where they are not known. All but those of `conversions` keep their type.
    """

    trunk: int
    experts: int
    spans: tuple[int, ...] = ()
    pieces: tuple[int, ...] = ()
    conversions: tuple[Conversion, ...] = ()


@dataclass(frozen=True)
class CacheSizing:
    """How many experts are in memory, compared with what a model needs to run well.

    `experts/sizing.py` makes it and says it in words.
    """

    status: SizingStatus
    n_slots_smallest_layer: int
    n_slots: int  # of all layers
    n_total: int  # experts of all layers
    n_experts: int  # of one layer
    n_bytes: int  # of all slots; in a plan as they are allocated
    recommended: int  # slots per layer
    ratio: float  # slots of the smallest layer / recommended
    remedy: str  # empty when all is well
    place: Literal["device", "host pool"] = "device"  # the pool: a small one without slots


@dataclass(frozen=True)
class PlanLine:
    """One decided amount of memory: for what, where, how much, why there, in which Vulkan heap."""

    item: str
    place: Literal["device", "host"]
    n_bytes: int
    reason: str
    heap: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """What was decided before anything is allocated.

    "device": all experts resident. "cache": each has its home in host memory, and
    `expert_slots[layer]` (MoE layers) of them a copy on the device. "host": homes alone. Where host
    memory has homes for some at a time only, `host_places` counts them for each size of expert, in
    the order of the first layers that have it; placement/pools.py makes pools of them.
    """

    ctx_size: int
    kv_type: Literal["f16", "f32"]
    experts_in: Literal["device", "host", "cache"]
    lines: tuple[PlanLine, ...]
    expert_slots: tuple[int, ...] = ()
    sizing: CacheSizing | None = None
    host_places: tuple[int, ...] = ()  # () where there are homes for all
    landing_slots: int = 0  # of each layer that has slots, besides these
    gather_places: int = 0  # of the largest size, on the device; 0: misses are read at home
    executor: Literal["fused", "stepped"] = "fused"
    executor_reason: str = ""
    notes: tuple[str, ...] = ()  # options that have no effect, and why
    conversions: tuple[Conversion, ...] = ()

    def total(self, place: str) -> int:
        return sum(line.n_bytes for line in self.lines if line.place == place)

    def heap_totals(self) -> dict[int, int]:
        """Bytes of the lines in each Vulkan heap that has any."""
        totals: dict[int, int] = {}
        for line in self.lines:
            totals[line.heap] = totals.get(line.heap, 0) + line.n_bytes
        return totals
