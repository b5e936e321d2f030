"""Turns what was asked and planned into how the expert cache works: its settings and its pools.

Pure. Raises UsageError for pins that the model or the slots do not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vkmoe.config import EngineConfig, Pins
from vkmoe.errors import UsageError
from vkmoe.experts.decide.settings import CacheSettings, PoolSpec, make_pools
from vkmoe.facts import ExpertSpec, MemoryPlan, ModelSpec

__all__ = [
    "cache_pools",
    "cache_settings",
    "copies_overlap",
]


def copies_overlap(config: EngineConfig, has_queue: bool) -> bool:
    """Say whether experts are copied while tokens are computed: where there is a queue for it."""
    return has_queue if config.expert_copies is None else config.expert_copies == "overlap"


def cache_pools(
    config: EngineConfig, spec: ModelSpec, plan: MemoryPlan, slot_bytes: Sequence[int]
) -> tuple[PoolSpec, ...]:
    """Make the pools of the plan's slots; none unless the experts are in a cache.

    `slot_bytes` are those of an expert in each MoE layer.
    """
    if not plan.expert_slots or spec.experts is None:
        return ()
    n_used = spec.experts.n_used
    return make_pools(plan.expert_slots, slot_bytes, n_used, config.expert_allocation)


def cache_settings(
    config: EngineConfig,
    name: str,
    experts: ExpertSpec | None,
    plan: MemoryPlan,
    overlaps: bool = False,
) -> CacheSettings:
    """Choose what decides about slots; `overlaps`: experts are copied beside tokens.

    `name` is the model's, for messages. Without slots nothing is pinned, but guesses may serve a
    small host pool. Raises UsageError for an id that the model does not have, for more residents
    than slots, and for a --moe-warmpin that residents leave no slot.
    """
    settings = CacheSettings(config.expert_policy, config.expert_half_life)
    if experts is None:
        return settings
    for expert in config.resident_ids:
        if expert >= experts.n_experts:
            raise UsageError(
                f"--expert-resident-ids names expert {expert}; "
                f"{name} has {experts.n_experts} in each layer, from 0 to {experts.n_experts - 1}",
                "leave that id out",
            )
    if not plan.mode.can_miss:
        return settings
    pins = _pins(config, experts.n_used, plan.expert_slots)
    if plan.mode.has_slots:
        fills = plan.mode.by_cpu or plan.exchanges
        settings = replace(
            settings,
            pins=pins,
            admission=config.expert_admission,
            fills=fills,
            exchanges=plan.exchanges,
        )
    elif not plan.host_slots:
        return settings
    return replace(
        settings,
        predictor=config.predictor,
        executor=plan.executor,
        # A copy that begins between two tokens and overlaps one is there for the one after it.
        lag=2 if overlaps else 1,
    )


def _pins(config: EngineConfig, n_used: int, slots: Sequence[int]) -> tuple[Pins, ...]:
    """Give the pins that were asked for their numbers, and check that there is room for them."""
    smallest, n_resident, pins = min(slots, default=0), 0, []
    if (residents := config.residents) is not None:
        n_resident = residents.n or smallest
        if n_resident > smallest:
            raise _no_room(config, residents, smallest)
        pins.append(replace(residents, n=n_resident))
    if (warm := config.warm_pins) is not None:
        if warm.n and slots:
            _check_room_for_warm(config, n_resident, slots)
        pins.append(replace(warm, n=warm.n or n_used))
    return tuple(pins)


def _check_room_for_warm(config: EngineConfig, n_resident: int, slots: Sequence[int]) -> None:
    """Check that pins and residents take at most half of a layer's slots; of all, if shared."""
    shared = config.expert_allocation == "global"
    room = sum(slots) // 2 - n_resident * len(slots) if shared else max(slots) // 2 - n_resident
    if room > 0:
        return
    kept = ""
    if config.residents is not None:
        verb = "is" if n_resident == 1 else "are"
        kept = f", and {_experts(config.residents, n_resident)} {verb} kept"
    raise UsageError(
        f"--moe-warmpin {config.moe_warmpin} has no slots left: a layer has {max(slots)}, of which "
        f"at most half are pinned{kept}",
        "keep fewer experts, give more slots, or leave out --moe-warmpin",
    )


def _no_room(config: EngineConfig, residents: Pins, smallest: int) -> UsageError:
    remedy = "there are no slots: leave that out"
    if smallest:
        remedy = f"keep at most {smallest}"
    elif config.expert_cache is not None:
        remedy = "there are no slots: give a larger --expert-cache"
    return UsageError(
        f"{_experts(residents, residents.n)} {'does' if residents.n == 1 else 'do'} not fit in the "
        f"{smallest} slot{'' if smallest == 1 else 's'} of a layer",
        remedy,
    )


def _experts(pins: Pins, n: int) -> str:
    return f"the {n} expert{'' if n == 1 else 's'} of {pins.flag}"
