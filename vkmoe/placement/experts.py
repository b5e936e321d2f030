"""Decides where experts go in each way in which they can be computed, and lists those ways.

Pure; a part of `plan`. A way settles all but how much; each of its plans is complete, so that plans
can be compared (forecast/cost.py). How many slots and host slots fit is the subject of pools.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from vkmoe.choices import MissWay, ModeName
from vkmoe.config import EngineConfig
from vkmoe.errors import OutOfMemoryError, UsageError
from vkmoe.experts.decide.settings import MOST_LANDING, size_cache
from vkmoe.experts.store.table import N_VERSIONS
from vkmoe.experts.study.hit_curve import MEAN_CURVE, HitCurve
from vkmoe.experts.study.slot_curves import LayerCurves
from vkmoe.facts import (
    Allocation,
    ArenaLayout,
    CacheSizing,
    DeviceInfo,
    ExpertSpec,
    MemoryPlan,
    WeightBytes,
    in_mib,
)
from vkmoe.gpu.arena import lay_out_alike, lay_out_spans, round_up
from vkmoe.gpu.device import Intent
from vkmoe.modes import RESIDENT, AtHome, Cache, CpuLayers, Hybrid
from vkmoe.ops.experts import DESCRIPTOR_BYTES
from vkmoe.placement.memory import GRANULARITY, allocation, layout_bytes, size_option
from vkmoe.placement.pools import PoolPlan, PoolPlanner, PoolRoom, SlotLayout
from vkmoe.weights.span_reader import READING_BYTES

__all__ = ["N_STAGED", "ExpertRoom", "Way", "place_experts", "ways"]

N_STAGED = 4  # experts on their way from the file to slots at a time
PREDICTED = "predicted to be fastest; --expert-mode changes it"


@dataclass(frozen=True)
class ExpertRoom:
    """Holds what the decision about experts rests on: what was asked, the experts, their room.

    `base` is the plan without its experts; slots are found in what that leaves.
    """

    config: EngineConfig
    experts: ExpertSpec | None
    weights: WeightBytes
    device: DeviceInfo
    free: int  # bytes of the device
    pool: PoolRoom
    base: MemoryPlan
    brings: bool  # experts of prompts to the device
    curve: HitCurve = MEAN_CURVE

    @property
    def flag(self) -> str:
        """Return the flag by which the user chose the slots; empty if the plan does."""
        if self.config.expert_slots is not None:
            return "--expert-slots"
        return "--expert-cache" if self.config.expert_cache is not None else ""

    def asked(self, layout: SlotLayout) -> _Asked | None:
        """Return the slots that the user asked for, if any."""
        config, n_bytes = self.config, self.config.expert_cache_bytes
        if config.expert_slots is not None:
            slots = (min(config.expert_slots, layout.n_experts),) * len(layout.span_bytes)
            return _Asked(slots, f"{self.flag} {config.expert_slots}")
        if config.expert_cache is None or n_bytes is None:
            return None
        return _Asked(layout.largest(n_bytes), f"{self.flag} {config.expert_cache.strip()}")

    @cached_property
    def whole(self) -> ArenaLayout:
        """Lay out all experts."""
        return self.layout(_PLAIN).whole

    @cached_property
    def fits(self) -> bool:
        """Say whether all experts are wanted on the device, and fit there."""
        layout = self.layout(_PLAIN)
        asked, pools = self.asked(layout), PoolPlanner(self.config, layout, self.whole)
        few_in_place = self.device.is_uma and asked is None and pools.wants_few
        wants_all = asked is None or min(asked.slots) >= layout.n_experts
        return wants_all and not few_in_place and layout_bytes([self.whole]) <= self.free

    def layout(self, way: Way) -> SlotLayout:
        """Describe what slots take in a way."""
        assert self.experts is not None
        n_experts, n_used = self.experts.n_experts, self.experts.n_used
        brings = way.brings and self.brings
        gathers = way.miss == "gather"
        spans, landing = self.weights.spans, way.n_landing
        curves = self.curve if isinstance(self.curve, LayerCurves) else None
        n_kept = self.config.residents.n if self.config.residents is not None else 0
        return SlotLayout(
            self.device, spans, n_experts, n_used, landing, gathers, brings, curves, n_kept
        )


class _Asked(NamedTuple):
    """Describes the slots a user asked for, and how."""

    slots: tuple[int, ...]
    text: str


class Way(NamedTuple):
    """Settles what a plan leaves open, but how much: where experts are computed, and how."""

    mode: ModeName
    miss: MissWay = "read"
    n_landing: int = 0  # slots of each layer in which experts land while they are read
    brings: bool = False  # experts of prompts to places on the device
    cpu_layers: int = 0  # of mode "cpu", from the first on
    reason: str = ""  # for the way misses are served, in a few words


_PLAIN = Way("cache")


# ----- the ways there are -----


def ways(given: ExpertRoom) -> Iterator[Way]:
    """Yield the ways that options leave; those that need less memory come after their like.

    Where the weights count what the CPU would read, it computes experts. Where all experts fit on
    the device, no other way of it can be faster.
    """
    config, n_layers = given.config, len(given.weights.spans)
    if not given.device.is_vulkan or given.experts is None or not n_layers:
        yield Way("resident")
    elif config.mode == "cpu":
        n_cpu = n_layers if config.n_cpu_moe is None else config.n_cpu_moe
        yield Way("cpu", cpu_layers=min(n_layers, n_cpu))
    elif config.mode == "hybrid":
        yield Way("hybrid", reason=f"as {config.mode_option}")
    elif given.weights.file_spans:
        yield from _ways_of_cpu(given)
    elif config.mode == "resident" or (config.mode == "auto" and given.fits):
        yield Way("resident")
    else:
        yield from _ways_of_cache(given)


def _ways_of_cache(given: ExpertRoom) -> Iterator[Way]:
    config, device = given.config, given.device
    assert given.experts is not None
    promotes = not device.is_uma if config.promote_on_read is None else config.promote_on_read
    least = 0 if config.promote_on_read is None or not promotes else 1
    most = min(MOST_LANDING, given.experts.n_used) if promotes else 0
    misses: tuple[MissWay, ...] = ("read", "gather")
    if config.miss != "auto" or device.is_uma:
        misses = (config.miss if config.miss != "auto" else "read",)
    reason = "the device shares the host's memory" if device.is_uma else ""
    reason = "as --miss" if config.miss != "auto" else reason
    brought: tuple[bool, ...] = (True, False)
    if device.is_uma:  # where a copy gains nothing, and is made only if options ask for such
        brought = (config.miss == "gather" or bool(config.promote_on_read),)
    for miss in misses:
        for n_landing in range(most, least - 1, -1):
            for brings in brought if given.brings else (False,):
                yield Way("cache", miss, n_landing, brings, reason=reason)


def _ways_of_cpu(given: ExpertRoom) -> Iterator[Way]:
    """Yield the ways in which the CPU computes experts that no other option rules out."""
    config, n_layers = given.config, len(given.weights.spans)
    if not given.fits:
        with suppress(UsageError):
            replace(config, expert_mode="hybrid")
            yield Way("hybrid")
    with suppress(UsageError):
        replace(config, expert_mode="cpu")
        least = _least_on_cpu(given)
        if 0 < least < n_layers:
            yield Way("cpu", cpu_layers=least)
        yield Way("cpu", cpu_layers=n_layers)


def _least_on_cpu(given: ExpertRoom) -> int:
    """Count the layers of the CPU at least, so that the others fit on the device."""
    assert given.experts is not None
    left, least = given.free, len(given.weights.spans)
    for size in reversed(given.weights.spans):
        left -= given.experts.n_experts * round_up(size) + GRANULARITY
        if left < 0:
            break
        least -= 1
    return least


# ----- a plan of each -----


def place_experts(given: ExpertRoom, way: Way) -> MemoryPlan:
    """Complete the plan in a way.

    Raises OutOfMemoryError where too little is left, UsageError where options say so.
    """
    config = given.config
    if not given.device.is_vulkan:
        made = _in_file(given)
    elif given.experts is None or not given.weights.experts:
        sizing = size_cache((), (), 0, 0, given.flag) if given.flag else None
        idle = _idle_pool(config, "the model has no experts")
        if config.mode_option:
            idle = (*idle, f"{config.mode_option} has no effect: the model has no experts")
        made = replace(given.base, mode=RESIDENT, sizing=sizing, notes=idle)
    else:
        made = _KINDS[way.mode](given, way).plan()
    return _with_executor(made, config)


def _in_file(given: ExpertRoom) -> MemoryPlan:
    """Complete the plan of a CPU: all experts are read where the file is mapped."""
    asked = ("expert_slots", "expert_cache", "host_pool")
    flags = [f"--{name.replace('_', '-')}" for name in asked if getattr(given.config, name)]
    notes = [f"{flag} has no effect: the CPU reads experts from the file" for flag in flags]
    if given.config.mode_option:
        notes.append(f"{given.config.mode_option} has no effect: the CPU computes everything")
    made = replace(given.base, mode=RESIDENT, notes=tuple(notes))
    if given.experts is None or not given.weights.spans:
        return made
    n_experts, spans = given.experts.n_experts, given.weights.spans
    layout = lay_out_spans(given.device, [size for size in spans for _ in range(n_experts)])
    why = "where their weights are in the file"
    line = allocation(given.device, "addresses of experts", "device", why, "experts", [layout])
    slots = (n_experts,) * len(spans)
    sizing = size_cache(slots, spans, n_experts, given.experts.n_used, "")
    sizing = replace(sizing, n_bytes=given.weights.mapped_experts)
    return replace(made, lines=(*made.lines, line), sizing=sizing)


def _cpu_lines(given: ExpertRoom, n_layers: int, reason: str) -> list[Allocation]:
    """Make the lines of the experts of the first layers that the CPU reads, for all or some."""
    device, in_file = given.device, given.weights.file_spans
    assert given.experts is not None
    spans = in_file[:n_layers]
    item = f"experts that the CPU computes, of {n_layers} of {len(in_file)} layers"
    mapped = Allocation(item, "file", sum(span.mapped for span in spans), reason)
    n_bytes = n_layers * given.experts.n_experts * (round_up(DESCRIPTOR_BYTES) + 8 * N_VERSIONS)
    n_bytes += sum(span.copied for span in spans)
    reason = "where they are in the file, and what the CPU cannot read as it is there"
    item = "addresses of the CPU's experts"
    return [mapped, allocation(device, item, "host", reason, n_bytes=n_bytes)]


def _with_executor(made: MemoryPlan, config: EngineConfig) -> MemoryPlan:
    """Choose the executor: a pool without all experts needs a stop at each router.

    Raises UsageError where --executor does not allow it.
    """
    if made.cpu_layers:
        return replace(made, executor_reason="the CPU takes turns within it")
    if not made.host_slots or made.exchanges:
        default = "every expert is where the device can read it"
        reason = "as --executor" if config.executor else default
        return replace(made, executor=config.executor or "fused", executor_reason=reason)
    if config.executor == "fused":
        cause = f"--host-pool {config.host_pool.strip()}" if config.host_pool else "the host pool"
        slots = sum(made.expert_slots)
        asked = ("--expert-slots", config.expert_slots), ("--expert-cache", config.expert_cache)
        more = [flag for flag, value in (*asked, ("--host-pool", config.host_pool)) if value]
        larger = f", or give a larger {' or '.join(more)}" if more else ""
        raise UsageError(
            "--executor fused needs all experts in slots or host memory; "
            f"{cause} holds {sum(made.host_slots):,} of them, and there are "
            f"{f'{slots:,}' if slots else 'no'} slots",
            f"leave out --executor{larger}",
        )
    reason = "what a router chooses and the host pool lacks is read from the file first"
    return replace(made, executor="stepped", executor_reason=reason)


def _idle_pool(config: EngineConfig, why: str) -> tuple[str, ...]:
    """Make a note where --host-pool can change nothing."""
    if config.host_pool is None:
        return ()
    return (f"--host-pool {config.host_pool.strip()} has no effect: {why}",)


class _Placing(ABC):
    """Completes a plan in one way, and holds what that rests on."""

    def __init__(self, given: ExpertRoom, way: Way) -> None:
        self._given, self._config, self._flag = given, given.config, given.flag
        self._device, self._shared = given.device, given.device.is_uma
        self._free, self._base = given.free, given.base
        self._layout, self._way = given.layout(way), way
        self._asked = given.asked(self._layout)
        self._whole = given.whole
        self._total = layout_bytes([self._whole])

    @abstractmethod
    def plan(self) -> MemoryPlan:
        """Complete the plan. Raises OutOfMemoryError, UsageError."""

    def _needed(self, slots: Sequence[int]) -> int:
        """Count the bytes of these slots and what goes with them."""
        return self._layout.n_bytes(slots) + self._layout.common_bytes * any(slots)

    def _largest(self, free: int) -> tuple[int, ...]:
        return self._layout.largest(free - self._layout.common_bytes)

    @property
    def _even(self) -> SlotLayout:
        """Describe what slots take where all layers have as many."""
        return replace(self._layout, curves=None)

    @property
    def _even_slots(self) -> tuple[int, ...]:
        """Return the slots there would be if all layers had as many."""
        if (asked := self._given.asked(self._even)) is not None:
            return asked.slots
        return self._even.largest(self._free - self._layout.common_bytes)

    def _all_experts(self, intent: Intent, reason: str) -> Allocation:
        return allocation(self._device, "experts", intent, reason, "experts", [self._whole])

    def _slot_lines(self, slots: tuple[int, ...]) -> list[Allocation]:
        layout, device = self._layout, self._device
        arenas, own = layout.arenas(slots), layout.own_bytes(slots)
        count = self._sizing(slots, own).slots_text
        item = f"expert slots, {count} of {layout.n_experts} in each layer"
        reason = f"as {self._flag}" if self._flag else "what the device has left"
        if slots != self._even_slots:
            reason += ", split by --expert-profile"
        lines = [allocation(device, item, "device", reason, "expert slots", arenas, own)]
        if n_landing := layout.n_landing:
            item = f"landing slots, {n_landing} in each layer"
            why, landing = "where experts land while they are read", layout.n_bytes(slots) - own
            lines.append(allocation(device, item, "device", why, "expert slots", n_bytes=landing))
        if n_gathered := layout.n_gathered:
            item = f"gathered experts, {n_gathered} at a time"
            why, gathered = "those without a slot are copied there and read", [layout.gathered]
            lines.append(allocation(device, item, "device", why, "gathered experts", gathered))
        if n_brought := layout.brought_places:
            item = f"brought experts, {n_brought} at a time and the next {n_brought}"
            why, brought = "those without a slot, for long prompts", [layout.brought]
            lines.append(allocation(device, item, "device", why, "brought experts", brought))
        return lines

    def _sizing(self, slots: Sequence[int], n_bytes: int, flag: str | None = None) -> CacheSizing:
        """Describe the cache, with the `n_bytes` of its line: users read one figure, not two."""
        layout, flag = self._layout, self._flag if flag is None else flag
        sizing = size_cache(slots, layout.span_bytes, layout.n_experts, layout.n_used, flag)
        return replace(sizing, n_bytes=n_bytes)

    def _too_much(self, asked: _Asked, pool: PoolPlan | None, free: int) -> OutOfMemoryError:
        """Say what was asked, what there is beside homes in a pool, and what is possible."""
        largest, homes = self._largest(free), ""
        if self._shared and pool is not None:
            whose = f"{pool.share} in the host pool" if pool.slots else "all of them"
            homes = f" beside {in_mib(pool.n_bytes)} for {whose}"
        hint = f"leave {self._flag} out"
        if self._flag == "--expert-slots":
            largest = self._even.largest(free - self._layout.common_bytes)
        if any(largest) if self._flag == "--expert-cache" else min(largest):
            size = size_option(self._layout.n_bytes(largest), at_most=True)
            most = min(largest) if self._flag == "--expert-slots" else size
            hint = f"use {self._flag} {most} or less, or leave it out"
        return OutOfMemoryError(
            f"{asked.text} needs {in_mib(self._needed(asked.slots))} for experts{homes}; "
            f"{in_mib(free)} of {self._device.name}'s memory can be used for them",
            hint,
        )


class _Resident(_Placing):
    """Puts all experts on the device."""

    def plan(self) -> MemoryPlan:
        if not self._given.fits and self._config.mode == "resident":
            option = self._config.mode_option
            raise OutOfMemoryError(
                f"{option} needs {in_mib(self._total)} for experts; {in_mib(self._free)} of "
                f"{self._device.name}'s memory can be used for them",
                f"leave {option.split()[0]} out, or choose a smaller model or quantisation",
            )
        layout = self._layout
        fits = f"all fit in the {in_mib(self._free)} that are free"
        reason = "the device shares the host's memory: read in place" if self._shared else fits
        slots = (layout.n_experts,) * len(layout.span_bytes)
        idle = not self._shared or PoolPlanner(self._config, layout, self._whole).wants_few
        return replace(
            self._base,
            mode=RESIDENT,
            sizing=self._sizing(slots, self._total),
            lines=(*self._base.lines, self._all_experts("device", reason)),
            notes=_idle_pool(self._config, "all experts are on the device") if idle else (),
        )


class _Cache(_Placing):
    """Gives some experts a slot on the device; the others are read in host memory."""

    def __init__(self, given: ExpertRoom, way: Way) -> None:
        super().__init__(given, way)
        self._pools = PoolPlanner(given.config, self._layout, self._whole)

    def plan(self) -> MemoryPlan:
        asked = self._asked
        if not self._shared:
            slots = asked.slots if asked is not None else self._largest(self._free)
            self._check(asked, None, self._free)
            slots, pool = self._holding_all(slots)
        else:
            pool = self._shared_pool()
            self._check(asked, pool, self._free - pool.taken_bytes)
            slots = asked.slots if asked is not None else ()
        return self._cached(slots, pool) if any(slots) else self._at_home(pool)

    def _holding_all(self, slots: tuple[int, ...]) -> tuple[tuple[int, ...], PoolPlan]:
        """Decide the host pool, beside the even split where that alone holds all with one."""
        layout, room = self._layout, self._given.pool
        pool = self._pools.decide(room, slots)
        if layout.curves is None or not pool.slots or layout.holds_all(slots, pool.slots):
            return slots, pool
        even = self._even_slots
        beside = self._pools.decide(room, even)
        if not beside.slots or layout.holds_all(even, beside.slots):
            return even, beside
        return slots, pool

    def _check(self, asked: _Asked | None, pool: PoolPlan | None, free: int) -> None:
        if asked and self._needed(asked.slots) > free:
            raise self._too_much(asked, pool, max(0, free))

    def _shared_pool(self) -> PoolPlan:
        """Decide the host pool; without a size asked for it leaves slots room in shared memory.

        Where homes for all have no room beside the slots, what has a slot needs none.
        """
        room = self._given.pool
        slots = self._asked.slots if self._asked is not None else ()
        if self._pools.wants_few:
            return self._pools.decide(room, slots)
        needed = self._needed(slots) if slots else 0
        if self._total + needed * (self._config.host_pool is None) <= self._free:
            return self._pools.all
        n_bytes = min(needed, max(0, room.most - self._pools.least_bytes))
        room = PoolRoom(min(room.unasked, room.most - n_bytes), room.most - n_bytes)
        return self._pools.decide(room, slots)

    def _at_home(self, pool: PoolPlan) -> MemoryPlan:
        asked, too_few = self._asked, "not enough for a slot"
        free = f"{in_mib(self._free)} are free on the device: read in place over the bus"
        reason = f"{self._flag} is {too_few}: read in place" if asked else free
        whole = (self._all_experts("host", reason),)
        lines = pool.lines(self._device, reason) if pool.slots else whole
        return replace(
            self._base,
            mode=AtHome(),
            sizing=self._sizing_at_home(pool),
            lines=(*self._base.lines, *lines),
            host_slots=pool.slots,
            notes=(f"{asked.text} has no effect: it is {too_few}",) if asked and pool.slots else (),
        )

    def _cached(self, slots: tuple[int, ...], pool: PoolPlan) -> MemoryPlan:
        layout = self._layout
        over = "" if self._shared else " over the bus"
        home_reason = f"those without a slot are read in place{over}"
        lines = (*self._slot_lines(slots), *pool.lines(self._device, home_reason))
        return replace(
            self._base,
            mode=Cache(self._way.miss, layout.n_landing > 0, reason=self._way.reason),
            expert_slots=slots,
            sizing=self._sizing(slots, layout.own_bytes(slots)),
            lines=(*self._base.lines, *lines),
            host_slots=pool.slots,
            exchanges=layout.holds_all(slots, pool.slots),
            landing_slots=layout.n_landing,
            brought_places=layout.brought_places,
        )

    def _sizing_at_home(self, pool: PoolPlan) -> CacheSizing:
        """Describe a cache without slots; on shared memory the pool takes their part."""
        spans = self._layout.span_bytes
        slots, n_bytes, flag = [0] * len(spans), 0, self._flag
        if pool.slots and self._shared:
            n_layers = Counter(spans)
            share = {
                size: n // n_layers[size] for size, n in zip(n_layers, pool.slots, strict=True)
            }
            slots, n_bytes = [share[size] for size in spans], pool.n_bytes
            flag = "--host-pool" if self._config.host_pool is not None else ""
        sizing = self._sizing(slots, n_bytes, flag)
        return replace(sizing, place="host pool") if pool.slots else sizing


class _Hybrid(_Placing):
    """Gives some experts a slot on the device; the CPU computes the others."""

    def plan(self) -> MemoryPlan:
        """Plan as many slots as there are to be; the CPU computes experts without one."""
        asked, layout, given = self._asked, self._layout, self._given
        if asked is not None and self._needed(asked.slots) > self._free:
            raise self._too_much(asked, None, max(0, self._free))
        slots = asked.slots if asked is not None else self._largest(self._free)
        n_layers = len(layout.span_bytes)
        if not any(slots):
            made = _CpuLayers(given, self._way._replace(cpu_layers=n_layers)).plan()
            why = "not enough for a slot: the CPU computes all experts"
            notes = (f"{asked.text} has no effect: it is {why}",) if asked else ()
            return replace(made, notes=(*made.notes, *notes))
        lines = [*self._slot_lines(slots), *_cpu_lines(given, n_layers, "those without a slot")]
        item, why = "staging of experts", "on their way to slots, laid out anew"
        staging = [lay_out_spans(self._device, [max(layout.span_bytes)] * N_STAGED)]
        lines.append(allocation(self._device, item, "host", why, "staged experts", staging))
        item, why = "reading from the file", "rows laid out anew"
        lines.append(allocation(self._device, item, "host", why, n_bytes=READING_BYTES))
        return replace(
            self._base,
            mode=Hybrid(reason=self._way.reason),
            expert_slots=slots,
            sizing=self._sizing(slots, layout.own_bytes(slots)),
            lines=(*self._base.lines, *lines),
            cpu_layers=n_layers,
        )


class _CpuLayers(_Placing):
    """Has the CPU compute the experts of the first layers; those of the others are resident."""

    def plan(self) -> MemoryPlan:
        given, n_cpu, option = self._given, self._way.cpu_layers, self._config.mode_option
        assert given.experts is not None
        reason = f"as {option}" if option else PREDICTED
        lines = _cpu_lines(given, n_cpu, reason) if n_cpu else []
        if n_cpu < len(given.weights.spans):
            spans = [(size, given.experts.n_experts) for size in given.weights.spans[n_cpu:]]
            whole = lay_out_alike(self._device, spans)
            if (needed := layout_bytes([whole])) > self._free:
                raise self._too_many_on_device(needed)
            item = "experts of the other layers" if n_cpu else "experts"
            lines.append(allocation(self._device, item, "device", reason, "experts", [whole]))
        return replace(
            self._base,
            mode=CpuLayers(reason=f"as {option}" if option else "") if n_cpu else RESIDENT,
            lines=(*self._base.lines, *lines),
            cpu_layers=n_cpu,
        )

    def _too_many_on_device(self, needed: int) -> OutOfMemoryError:
        """Say how many layers the CPU must compute at least."""
        n_layers = len(self._given.weights.spans) - self._way.cpu_layers
        return OutOfMemoryError(
            f"with {self._config.mode_option} the experts of {n_layers} layers need "
            f"{in_mib(needed)} of {self._device.name}'s memory; {in_mib(self._free)} can be used "
            "for them",
            f"use --n-cpu-moe {_least_on_cpu(self._given)} or more",
        )


_KINDS: Mapping[ModeName, type[_Placing]] = {
    "resident": _Resident,
    "cache": _Cache,
    "hybrid": _Hybrid,
    "cpu": _CpuLayers,
}
