"""Decides where experts go: the device, host memory with slots on the device, or host memory.

Pure; a part of `plan`. Owns what follows for the executor. How many slots and host slots fit is the
subject of pools.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from vkmoe.config import EngineConfig
from vkmoe.errors import OutOfMemoryError, UsageError
from vkmoe.experts.decide.settings import size_cache
from vkmoe.facts import (
    ON_DEVICE,
    Allocation,
    ArenaLayout,
    CacheSizing,
    DeviceInfo,
    ExpertMode,
    ExpertSpec,
    MemoryPlan,
    WeightBytes,
)
from vkmoe.gpu.arena import lay_out_spans
from vkmoe.gpu.memory_types import Intent
from vkmoe.placement.allocations import allocated, allocation, layout_bytes
from vkmoe.placement.pools import PoolPlan, PoolPlanner, PoolRoom, SlotLayout
from vkmoe.placement.words import in_mib, size_option

__all__ = ["ExpertRoom", "Room", "all_on_device", "place_experts"]


class Room(NamedTuple):
    """Holds bytes left for experts. Where memory is `shared`, pool and device have the same."""

    device: int
    pool: PoolRoom
    shared: bool


@dataclass(frozen=True)
class ExpertRoom:
    """Holds what the decision about experts rests on: what was asked, the experts, their room.

    `base` is the plan without its experts; slots are found in what that leaves.
    """

    config: EngineConfig
    experts: ExpertSpec | None
    weights: WeightBytes
    device: DeviceInfo
    room: Room
    base: MemoryPlan


def all_on_device(given: ExpertRoom, promote: bool) -> bool:
    """Say whether all experts will be on the device, if there are any.

    `promote`: missed experts would have slots to land in.
    """
    if given.experts is None or not given.weights.experts:
        return True
    if not given.weights.spans:
        return allocated(given.weights.experts) <= given.room.device
    mode = ExpertMode("cache", promote=promote)
    return _SizedExperts(given, given.experts, mode).all_on_device


def place_experts(given: ExpertRoom, mode: ExpertMode) -> MemoryPlan:
    """Complete the plan; `mode` is that of a cache, if there will be one.

    Raises OutOfMemoryError where too little is left, UsageError where options say so.
    """
    config, flag = given.config, _cache_flag(given.config)
    if given.experts is None or not given.weights.experts:
        sizing = size_cache((), (), 0, 0, flag) if flag else None
        idle = _idle_pool(config, "the model has no experts")
        made = replace(given.base, mode=ON_DEVICE, sizing=sizing, notes=idle)
    elif given.weights.spans:
        made = _SizedExperts(given, given.experts, mode).plan()
    else:
        made = _unknown_sizes(given, given.experts, flag)
    return _with_executor(made, config)


def _with_executor(made: MemoryPlan, config: EngineConfig) -> MemoryPlan:
    """Choose the executor: a pool without all experts needs a stop at each router.

    Raises UsageError where --executor does not allow it.
    """
    if not made.host_slots:
        if config.executor is None:
            return made
        return replace(made, executor=config.executor, executor_reason="as --executor")
    if config.executor == "fused":
        cause = f"--host-pool {config.host_pool.strip()}" if config.host_pool else "the host pool"
        raise UsageError(
            f"--executor fused needs all experts in host memory; {cause} holds "
            f"{sum(made.host_slots):,} of them",
            "leave out --executor" + (", or give a larger --host-pool" if config.host_pool else ""),
        )
    reason = "what a router chooses and the host pool lacks is read from the file first"
    return replace(made, executor="stepped", executor_reason=reason)


def _unknown_sizes(given: ExpertRoom, experts: ExpertSpec, flag: str) -> MemoryPlan:
    """Put all in one place, where nothing is known of single experts."""
    device, room, base = given.device, given.room, given.base
    total, whole = allocated(given.weights.experts), (ArenaLayout((given.weights.experts,)),)
    sizing = size_cache((0,), (0,), experts.n_experts, experts.n_used, flag)
    if total <= room.device:
        fits = f"all fit in {in_mib(room.device)}"
        line = allocation(device, "experts", "device", fits, "experts", whole)
        sizing = replace(sizing, n_bytes=total)
        return replace(base, mode=ON_DEVICE, sizing=sizing, lines=(*base.lines, line))
    if room.shared or total > room.pool.unasked:
        raise OutOfMemoryError(
            f"the experts need {in_mib(total)}; {in_mib(room.device)} of {device.name}'s memory "
            f"and {in_mib(room.pool.unasked)} of host memory can be used",
            "close other programs, or choose a smaller model or quantisation",
        )
    reason = "how large one is, is not known: read in place"
    line = allocation(device, "experts", "host", reason, "experts", whole)
    return replace(base, mode=ExpertMode("host"), sizing=sizing, lines=(*base.lines, line))


class _Asked(NamedTuple):
    """Describes the slots a user asked for, and how."""

    slots: tuple[int, ...]
    flag: str
    text: str


def _cache_flag(config: EngineConfig) -> str:
    """Find the flag by which the user chose the slots; empty if the plan does."""
    if config.expert_slots is not None:
        return "--expert-slots"
    return "--expert-cache" if config.expert_cache is not None else ""


def _idle_pool(config: EngineConfig, why: str) -> tuple[str, ...]:
    """Make a note where --host-pool can change nothing."""
    if config.host_pool is None:
        return ()
    return (f"--host-pool {config.host_pool.strip()} has no effect: {why}",)


class _SizedExperts:
    """Decides about experts of known sizes, and holds what that rests on."""

    def __init__(self, given: ExpertRoom, experts: ExpertSpec, mode: ExpertMode) -> None:
        self._config, self._flag = given.config, _cache_flag(given.config)
        self._experts, self._device, self._room = experts, given.device, given.room
        self._base = given.base
        n_experts, spans, self._mode = experts.n_experts, given.weights.spans, mode
        self._layout = SlotLayout(given.device, spans, n_experts, experts.n_used, mode)
        in_order = [size for size in spans for _ in range(n_experts)]
        self._whole = lay_out_spans(given.device, in_order)
        self._total = layout_bytes([self._whole])
        self._pools = PoolPlanner(given.config, self._layout, self._whole)

    @property
    def all_on_device(self) -> bool:
        """Say whether all experts are wanted on the device, and fit there."""
        asked = self._asked()
        few_in_place = self._room.shared and asked is None and self._pools.wants_few
        return self._wants_all(asked) and self._total <= self._room.device and not few_in_place

    def plan(self) -> MemoryPlan:
        if self.all_on_device:
            return self._resident()
        room, asked = self._room, self._asked()
        pool = self._pool(asked)
        free = self._free(pool)
        if asked is not None:
            if self._wants_all(asked) or self._needed(asked.slots) > free:
                raise self._too_much(asked, pool)
            slots = asked.slots
        else:
            slots = () if room.shared else self._largest(free)
        return self._cached(slots, pool) if any(slots) else self._at_home(pool, asked)

    def _wants_all(self, asked: _Asked | None) -> bool:
        return asked is None or min(asked.slots) >= self._experts.n_experts

    def _asked(self) -> _Asked | None:
        layout = self._layout
        if not self._flag:
            return None
        if self._config.expert_slots is not None:
            n_slots = self._config.expert_slots
            slots = (min(n_slots, layout.n_experts),) * len(layout.span_bytes)
            return _Asked(slots, self._flag, f"{self._flag} {n_slots}")
        text, n_bytes = self._config.expert_cache, self._config.expert_cache_bytes
        assert text is not None and n_bytes is not None
        return _Asked(layout.largest(n_bytes), self._flag, f"{self._flag} {text.strip()}")

    def _pool(self, asked: _Asked | None) -> PoolPlan:
        """Decide the host pool; without a size asked for it leaves slots room in shared memory."""
        room = self._room.pool
        if not self._room.shared or self._pools.wants_few:
            return self._pools.decide(room)
        if self._total <= self._room.device:
            return self._pools.all
        slots = self._needed(asked.slots) if asked else 0
        slots = min(slots, max(0, room.most - self._pools.least_bytes))
        return self._pools.decide(PoolRoom(min(room.unasked, room.most - slots), room.most - slots))

    def _free(self, pool: PoolPlan) -> int:
        """Count the device's bytes for slots and what goes with them."""
        return self._room.device - (pool.taken_bytes if self._room.shared else 0)

    def _needed(self, slots: Sequence[int]) -> int:
        return self._layout.n_bytes(slots) + self._layout.gather_bytes * any(slots)

    def _largest(self, free: int) -> tuple[int, ...]:
        return self._layout.largest(free - self._layout.gather_bytes)

    # ----- what follows -----

    def _resident(self) -> MemoryPlan:
        room = self._room
        reason = (
            "the device shares the host's memory: read in place"
            if room.shared
            else f"all fit in the {in_mib(room.device)} that are free"
        )
        slots = (self._experts.n_experts,) * len(self._layout.span_bytes)
        idle = not room.shared or self._pools.wants_few
        return replace(
            self._base,
            mode=ON_DEVICE,
            sizing=self._sizing(slots, self._total),
            lines=(*self._base.lines, self._all_experts("device", reason)),
            notes=_idle_pool(self._config, "all experts are on the device") if idle else (),
        )

    def _at_home(self, pool: PoolPlan, asked: _Asked | None) -> MemoryPlan:
        n_landing = self._layout.n_landing
        beside = f" beside {n_landing} to land in" if n_landing else ""
        too_few = f"not enough for one slot in each layer{beside}"
        reason = (
            f"{asked.flag} is {too_few}: read in place"
            if asked
            else f"{in_mib(self._room.device)} are free on the device: read in place over the bus"
        )
        lines = (
            pool.lines(self._device, reason) if pool.slots else (self._all_experts("host", reason),)
        )
        return replace(
            self._base,
            mode=ExpertMode("host"),
            sizing=self._sizing_at_home(pool),
            lines=(*self._base.lines, *lines),
            host_slots=pool.slots,
            notes=(f"{asked.text} has no effect: it is {too_few}",) if asked and pool.slots else (),
        )

    def _cached(self, slots: tuple[int, ...], pool: PoolPlan) -> MemoryPlan:
        layout = self._layout
        over = "" if self._room.shared else " over the bus"
        home_reason = f"those without a slot are read in place{over}"
        lines = (*self._slot_lines(slots), *pool.lines(self._device, home_reason))
        return replace(
            self._base,
            mode=self._mode,
            expert_slots=slots,
            sizing=self._sizing(slots, layout.own_bytes(slots)),
            lines=(*self._base.lines, *lines),
            host_slots=pool.slots,
            landing_slots=layout.n_landing,
            n_gathered=layout.n_gathered,
        )

    def _all_experts(self, intent: Intent, reason: str) -> Allocation:
        return allocation(self._device, "experts", intent, reason, "experts", [self._whole])

    def _slot_lines(self, slots: tuple[int, ...]) -> list[Allocation]:
        layout, device = self._layout, self._device
        few, many = min(slots), max(slots)
        count = f"{few}" if few == many else f"{few} or {many}"
        item = f"expert slots, {count} of {layout.n_experts} in each layer"
        reason = f"as {self._flag}" if self._flag else "what the device has left"
        arenas, own = layout.arenas(slots), layout.own_bytes(slots)
        lines = [allocation(device, item, "device", reason, "expert slots", arenas, own)]
        if n_landing := layout.n_landing:
            item = f"landing slots, {n_landing} in each layer"
            reason = "where experts land while they are read"
            n_bytes = layout.landing_bytes(slots)
            lines.append(
                allocation(device, item, "device", reason, "expert slots", n_bytes=n_bytes)
            )
        if n_gathered := layout.n_gathered:
            item = f"gathered experts, {n_gathered} at a time"
            reason = "those without a slot are copied there and read"
            lines.append(
                allocation(device, item, "device", reason, "gathered experts", [layout.gathered])
            )
        return lines

    def _sizing(self, slots: Sequence[int], n_bytes: int, flag: str | None = None) -> CacheSizing:
        """Describe the cache, with the `n_bytes` of its line: users read one figure, not two."""
        layout, flag = self._layout, self._flag if flag is None else flag
        sizing = size_cache(slots, layout.span_bytes, layout.n_experts, layout.n_used, flag)
        return replace(sizing, n_bytes=n_bytes)

    def _sizing_at_home(self, pool: PoolPlan) -> CacheSizing:
        """Describe a cache without slots; on shared memory the pool takes their part."""
        spans = self._layout.span_bytes
        if not pool.slots:
            return self._sizing((0,) * len(spans), 0)
        if self._room.shared:
            share = {
                size: n_slots // sum(other == size for other in spans)
                for size, n_slots in zip(dict.fromkeys(spans), pool.slots, strict=True)
            }
            flag = "--host-pool" if self._config.host_pool is not None else ""
            sizing = self._sizing([share[size] for size in spans], pool.n_bytes, flag)
        else:
            sizing = self._sizing((0,) * len(spans), 0)
        return replace(sizing, place="host pool")

    # ----- what cannot be -----

    def _too_much(self, asked: _Asked, pool: PoolPlan) -> OutOfMemoryError:
        """Say what was asked, what there is, and the largest that is possible."""
        free = max(0, self._free(pool))
        largest = self._largest(free)
        homes = ""
        if self._room.shared:
            whose = f"{pool.share} in the host pool" if pool.slots else "all of them"
            homes = f" beside {in_mib(pool.n_bytes)} for {whose}"
        if not any(largest):
            hint = f"leave {asked.flag} out"
        elif asked.flag == "--expert-slots":
            hint = f"use --expert-slots {min(largest)} or less, or leave it out"
        else:
            size = size_option(self._layout.n_bytes(largest), at_most=True)
            hint = f"use --expert-cache {size} or less, or leave it out"
        return OutOfMemoryError(
            f"{asked.text} needs {in_mib(self._needed(asked.slots))} for experts{homes}; "
            f"{in_mib(free)} of {self._device.name}'s memory can be used for them",
            hint,
        )
