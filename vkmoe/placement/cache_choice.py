"""Turns what was asked and planned into the expert cache's settings and pools.

Pure. Raises UsageError for residents that the model or the slots do not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vkmoe.choices import ResidentSelection
from vkmoe.config import EngineConfig
from vkmoe.errors import UsageError
from vkmoe.experts.decide.settings import CacheSettings, PoolSpec, make_pools
from vkmoe.facts import MemoryPlan, ModelSpec

__all__ = ["cache_pools", "cache_settings", "copies_overlap"]


def copies_overlap(config: EngineConfig, has_queue: bool) -> bool:
    """Say whether experts are copied while tokens are computed: where there is a queue for it."""
    return has_queue if config.expert_copies is None else config.expert_copies == "overlap"


def cache_pools(
    config: EngineConfig, spec: ModelSpec, plan: MemoryPlan, slot_bytes: Sequence[int]
) -> tuple[PoolSpec, ...]:
    """Make the pools of the plan's slots; none unless the experts are in a cache.

    `slot_bytes` are those of an expert in each MoE layer.
    """
    if not plan.mode.in_cache or spec.experts is None:
        return ()
    n_used = spec.experts.n_used
    return make_pools(plan.expert_slots, slot_bytes, n_used, config.expert_allocation)


def cache_settings(
    config: EngineConfig, spec: ModelSpec, plan: MemoryPlan, overlaps: bool = False
) -> CacheSettings:
    """Choose what decides about slots; `overlaps`: experts are copied beside tokens.

    Without slots nothing is pinned or resident, but guesses may serve a small host pool. Raises
    UsageError for an id that the model does not have, for more residents than slots, and for a
    --moe-warmpin that residents leave no slot.
    """
    ids = config.resident_ids
    _check_ids(ids, spec)
    plain = CacheSettings(config.expert_policy, config.expert_half_life)
    if spec.experts is None or plan.mode.on_device:
        return plain
    selection = _selection(config)
    smallest = min(plan.expert_slots, default=0)
    n_resident = _n_resident(config, selection, ids, smallest)
    predictor = config.predictor(overlaps, plan.executor == "stepped")
    # A copy that begins between two tokens and overlaps one is there for the one after it.
    lag = 2 if overlaps else 1
    if not plan.mode.in_cache:
        if not plan.host_places:
            return plain
        return replace(plain, predictor=predictor, executor=plan.executor, lag=lag)
    if config.moe_warmpin:
        _check_room_for_pins(config, selection, n_resident, plan.expert_slots)
    return CacheSettings(
        policy=config.expert_policy,
        half_life=config.expert_half_life,
        warmpin=spec.experts.n_used if config.moe_warmpin is None else config.moe_warmpin,
        warmpin_after=config.moe_warmpin_after,
        selection=selection,
        n_resident=n_resident,
        resident_ids=ids,
        warmup_tokens=config.expert_warmup_tokens,
        admission=config.expert_admission,
        predictor=predictor,
        executor=plan.executor,
        lag=lag,
    )


def _check_ids(ids: Sequence[int], spec: ModelSpec) -> None:
    n_experts = spec.experts.n_experts if spec.experts else 0
    for expert in ids:
        if spec.experts is not None and expert >= n_experts:
            raise UsageError(
                f"--expert-resident-ids names expert {expert}; "
                f"{spec.name} has {n_experts} in each layer, from 0 to {n_experts - 1}",
                "leave that id out",
            )


def _selection(config: EngineConfig) -> ResidentSelection | None:
    if config.expert_resident_ids is not None:
        return "manual"
    return config.expert_resident_selection


def _check_room_for_pins(
    config: EngineConfig, selection: ResidentSelection | None, n_resident: int, slots: Sequence[int]
) -> None:
    """Check that pins and residents take at most half of a layer's slots; of all, if shared."""
    shared = config.expert_allocation == "global"
    room = sum(slots) // 2 - n_resident * len(slots) if shared else max(slots) // 2 - n_resident
    if room > 0:
        return
    kept = (
        f", and {_residents(config, n_resident)} {'is' if n_resident == 1 else 'are'} kept"
        if selection is not None
        else ""
    )
    raise UsageError(
        f"--moe-warmpin {config.moe_warmpin} has no slots left: a layer has {max(slots)}, of which "
        f"at most half are pinned{kept}",
        "keep fewer experts, give more slots, or leave out --moe-warmpin",
    )


def _n_resident(
    config: EngineConfig, selection: ResidentSelection | None, ids: Sequence[int], smallest: int
) -> int:
    """Count residents per layer: those named, the number asked for, or all slots."""
    if selection is None:
        return 0
    n_resident = len(ids) or config.expert_num_resident
    if n_resident is None:
        return smallest
    if n_resident > smallest:
        raise UsageError(
            f"{_residents(config, n_resident)} "
            f"{'does' if n_resident == 1 else 'do'} not fit in the "
            f"{smallest} slot{'' if smallest == 1 else 's'} of a layer",
            _remedy(config, smallest),
        )
    return n_resident


def _remedy(config: EngineConfig, smallest: int) -> str:
    if smallest:
        return f"keep at most {smallest}"
    if config.expert_cache is not None:
        return "there are no slots: give a larger --expert-cache"
    return "there are no slots: leave that out"


def _residents(config: EngineConfig, n_resident: int) -> str:
    count = "the 1 expert" if n_resident == 1 else f"the {n_resident} experts"
    if config.expert_resident_ids is not None:
        return f"{count} of --expert-resident-ids"
    if config.expert_num_resident is not None:
        return f"{count} of --expert-num-resident"
    return f"{count} of --expert-resident-selection"
