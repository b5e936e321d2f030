"""Where the experts go: on the device, in host memory with slots on the device, or host memory.

Pure; a part of `plan`. Owns what follows for the executor, and models whose experts' sizes are not
known; the others are the subject of sized_experts.py.
"""

from __future__ import annotations

from dataclasses import replace

from vkmoe.config import EngineConfig
from vkmoe.errors import OutOfMemoryError, UsageError
from vkmoe.experts.decide.sizing import size_cache
from vkmoe.facts import DeviceInfo, ExpertSpec, WeightBytes
from vkmoe.placement.allocations import allocated
from vkmoe.placement.expert_facts import ExpertPlan, Room
from vkmoe.placement.sized_experts import SizedExperts, cache_flag, idle_pool, plan_line
from vkmoe.placement.slots import MissWays
from vkmoe.placement.words import in_mib

__all__ = ["place_experts"]


def place_experts(
    config: EngineConfig,
    experts: ExpertSpec | None,
    weights: WeightBytes,
    device: DeviceInfo,
    room: Room,
    ways: MissWays,
) -> ExpertPlan:
    """Decide. Raises OutOfMemoryError where too little is left, UsageError where options say so."""
    flag = cache_flag(config)
    if experts is None or not weights.experts:
        sizing = size_cache((), (), 0, 0, flag) if flag else None
        made = ExpertPlan(
            "device", sizing=sizing, notes=idle_pool(config, "the model has no experts")
        )
    elif weights.spans:
        made = SizedExperts(config, experts, weights, device, room, ways).plan()
    else:
        made = _unknown_sizes(experts, weights, device, room, flag)
    return _with_executor(made, config)


def _with_executor(made: ExpertPlan, config: EngineConfig) -> ExpertPlan:
    """A pool without all experts needs a stop at each router. Raises UsageError if not allowed."""
    if not made.host_places:
        if config.executor is None:
            return made
        return replace(made, executor=config.executor, executor_reason="as --executor")
    if config.executor == "fused":
        cause = f"--host-pool {config.host_pool.strip()}" if config.host_pool else "the host pool"
        raise UsageError(
            f"--executor fused needs all experts in host memory; {cause} holds "
            f"{sum(made.host_places):,} of them",
            "leave out --executor" + (", or give a larger --host-pool" if config.host_pool else ""),
        )
    reason = "what a router chooses and the host pool lacks is read from the file first"
    return replace(made, executor="stepped", executor_reason=reason)


def _unknown_sizes(
    experts: ExpertSpec, weights: WeightBytes, device: DeviceInfo, room: Room, flag: str
) -> ExpertPlan:
    """All in one place: nothing can be said of single experts."""
    total = allocated(weights.experts)
    sizing = size_cache((0,), (0,), experts.n_experts, experts.n_used, flag)
    if total <= room.device:
        line = plan_line(device, "experts", "device", total, f"all fit in {in_mib(room.device)}")
        return ExpertPlan("device", sizing=replace(sizing, n_bytes=total), lines=(line,))
    if room.shared or total > room.pool.unasked:
        raise OutOfMemoryError(
            f"the experts need {in_mib(total)}; {in_mib(room.device)} of {device.name}'s memory "
            f"and {in_mib(room.pool.unasked)} of host memory can be used",
            "close other programs, or choose a smaller model or quantisation",
        )
    reason = "how large one is, is not known: read in place"
    line = plan_line(device, "experts", "host", total, reason)
    return ExpertPlan("host", sizing=sizing, lines=(line,))
