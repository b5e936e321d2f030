"""Makes do with less where a device refuses memory that it seemed to have. Pure.

Other programs take memory between plan and allocation, and drivers keep some for themselves. What
can be smaller is the experts' share: fewer slots, then none.
"""

from __future__ import annotations

from dataclasses import replace

from vkmoe.config import EngineConfig
from vkmoe.errors import OutOfMemoryError
from vkmoe.facts import DeviceInfo, MemoryPlan
from vkmoe.placement.memory import margin_for

__all__ = ["N_ATTEMPTS", "with_less"]

N_ATTEMPTS = 4  # which take away an eighth of the experts, a quarter, a half, and all
_REFUSED = "VK_ERROR_OUT_OF_DEVICE_MEMORY"
_OF_EXPERTS = ("experts", "expert slots")


def with_less(
    config: EngineConfig,
    plan: MemoryPlan,
    device: DeviceInfo,
    available_host_bytes: int,
    error: OutOfMemoryError,
    attempt: int,
) -> EngineConfig | None:
    """Ask for a plan with fewer experts on the device than one that failed; None: there is none.

    `attempt` counts those that failed, from 1. What a user asked for is not changed: then, and
    where the plan has no experts on the device, nothing can be less.
    """
    asked = config.expert_slots is not None or config.expert_cache is not None
    decided = asked or config.n_cpu_moe is not None or config.mode == "resident"
    of_experts = sum(
        line.n_bytes for line in plan.lines if line.place == "device" and line.name in _OF_EXPERTS
    )
    if error.result != _REFUSED or decided or not of_experts or attempt > N_ATTEMPTS:
        return None
    less = of_experts >> max(0, N_ATTEMPTS - attempt)
    on_host = plan.total("host") if device.is_uma else 0
    most = plan.total("device") + on_host - less
    return replace(config, vram_margin=str(margin_for(device, available_host_bytes, most)))
