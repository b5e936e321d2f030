"""This module names options of the expert cache that do nothing, or leave it nothing to do.

Its functions are pure: they compare what was asked with what was planned. Options that contradict
each other are errors of the config.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from vkmoe.config import EngineConfig, flags_of, long_flag
from vkmoe.facts import MemoryPlan

__all__ = ["cache_notes", "dependent_notes", "idle_notes"]

AMOUNT = ("expert_cache", "expert_slots")
CHOICE = (
    "expert_policy", "expert_allocation", "moe_warmpin", "moe_warmpin_after",
    "expert_resident_selection", "expert_num_resident", "expert_warmup_tokens",
    "expert_resident_ids",
)  # fmt: skip
MOVING = (
    "miss", "promote_on_read", "expert_admission", "expert_copies",
)  # fmt: skip
PREDICTING = ("expert_predictor", "moe_predict_prefetch")
COUNTING = ("expert_half_life",)  # a profile is counted with it, wherever the experts are
OF_THE_POOL = ("expert_policy", *PREDICTING, *COUNTING)  # what decides about a small host pool too


def cache_notes(config: EngineConfig, plan: MemoryPlan, one_queue: bool = False) -> list[str]:
    """Make lines on options without effect, on residents that leave no slot, on a pool; often none.

    `one_queue`: the device cannot copy while it computes.
    """
    lines = [*_pool(plan), *idle_notes(config, plan)]
    if one_queue and config.expert_copies == "overlap" and plan.mode.in_cache:
        lines.append("--expert-copies overlap: on one queue, copies and tokens still take turns")
    return lines


def idle_notes(config: EngineConfig, plan: MemoryPlan) -> list[str]:
    """Make the lines on options without effect and on residents that leave no slot."""
    return [*plan.notes, *_idle(config, plan), *_full(config, plan)]


def _pool(plan: MemoryPlan) -> Iterator[str]:
    """Say what it means that host memory does not hold all experts."""
    if plan.host_slots:
        (line,) = (line for line in plan.lines if line.item.startswith("host pool"))
        yield (
            f"{line.item}, {line.n_bytes / 2**20:,.1f} MiB ({line.reason}); "
            f"the executor is {plan.executor}: {plan.executor_reason}"
        )


def _idle(config: EngineConfig, plan: MemoryPlan) -> Iterator[str]:
    sizing = plan.sizing
    counting = () if config.expert_profile is not None else COUNTING
    if sizing is None or sizing.status == "empty":
        reason = "the model has no experts"
        flags = _given(config, (*AMOUNT, *CHOICE, *COUNTING, *MOVING, *PREDICTING, "executor"))
    elif plan.mode.on_device:
        reason = f"all {sizing.n_experts} experts of each layer are on the device"
        flags = _given(config, (*CHOICE, *counting, *MOVING, *PREDICTING))
    elif plan.mode.experts_in == "host":
        reason, names = "no expert has a slot", (*CHOICE, *counting, *MOVING, *PREDICTING)
        working = OF_THE_POOL if plan.host_slots else ()
        flags = _given(config, tuple(name for name in names if name not in working))
    else:
        yield from dependent_notes(config)
        return
    yield from _without_effect(reason, flags)


def dependent_notes(config: EngineConfig) -> Iterator[str]:
    """Name the options that say more about another one, which is off."""
    if config.expert_resident_selection != "frequency":
        reason = "without --expert-resident-selection frequency"
        yield from _without_effect(reason, _given(config, ("expert_warmup_tokens",)))
    if config.moe_warmpin == 0:
        yield from _without_effect("with --moe-warmpin 0", _given(config, ("moe_warmpin_after",)))


def _without_effect(reason: str, flags: list[str]) -> Iterator[str]:
    if flags:
        listed = " and ".join([", ".join(flags[:-1]), flags[-1]] if len(flags) > 1 else flags)
        yield f"{reason}: {listed} {'have' if len(flags) > 1 else 'has'} no effect"


def _full(config: EngineConfig, plan: MemoryPlan) -> Iterator[str]:
    """Say that residents take all slots, so that nothing else can be cached."""
    residents = config.residents
    if not plan.mode.in_cache or residents is None:
        return
    smallest = min(plan.expert_slots)
    shared = config.expert_allocation == "global"
    room = sum(plan.expert_slots) / len(plan.expert_slots) if shared else smallest
    if (residents.n or smallest) >= room:
        taken = "the only slot" if smallest == 1 else f"all {smallest} slots"
        flag = "ids" if residents.by == "ids" else "selection"
        begin = f" after {residents.after} tokens" if residents.after else ""
        yield (
            f"--expert-resident-{flag} takes {taken} of a layer{begin}: "
            "no slot is left to follow the text"
        )


def _given(config: EngineConfig, names: tuple[str, ...]) -> list[str]:
    """Return the flags of the options that differ from their default."""
    return [
        long_flag(flags_of(item), getattr(config, item.name))
        for item in fields(config)
        if item.name in names and getattr(config, item.name) != item.default
    ]
