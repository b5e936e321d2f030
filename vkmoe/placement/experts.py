"""Decides where experts go in each way in which they can be computed, and lists those ways.

Pure; a part of `plan`. A way settles all but how much; each of its plans is complete, so that plans
can be compared (forecast/cost.py). How many slots and host slots fit is the subject of pools.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from vkmoe.choices import MissWay
from vkmoe.config import EngineConfig
from vkmoe.errors import OutOfMemoryError, UsageError
from vkmoe.experts.decide.settings import MOST_LANDING, size_cache
from vkmoe.experts.store.table import N_VERSIONS
from vkmoe.experts.study.hit_curve import MEAN_CURVE, HitCurve
from vkmoe.experts.study.slot_curves import LayerCurves
from vkmoe.facts import Allocation, CacheSizing, DeviceInfo, MemoryPlan, WeightBytes
from vkmoe.gpu.arena import SLOT_CHUNK, lay_out_alike, lay_out_spans, round_up
from vkmoe.kernels.experts.operations import DESCRIPTOR_BYTES
from vkmoe.modes import RESIDENT, AtHome, Cache, CpuLayers, ExpertMode, Hybrid
from vkmoe.option_fields import in_mib
from vkmoe.placement.memory import GRANULARITY, allocation, layout_bytes, size_option
from vkmoe.placement.pools import PoolPlan, PoolPlanner, PoolRoom, SlotLayout
from vkmoe.weights.span_reader import READING_BYTES

N_STAGED = 4  # experts on their way from the file to slots at a time
PREDICTED = "predicted to be fastest; --expert-mode changes it"


@dataclass(frozen=True)
class ExpertRoom:
    """Holds what the decision about experts rests on: what was asked, the experts, their room.

    `base` is the plan without its experts; slots are found in what that leaves.
    """

    config: EngineConfig
    n_experts: int  # 0: the model has none
    n_used: int
    weights: WeightBytes
    device: DeviceInfo
    free: int  # bytes of the device
    pool: PoolRoom
    base: MemoryPlan
    brings: bool  # experts of prompts to the device
    curve: HitCurve = MEAN_CURVE
    lent: int = 0  # of the bytes of the device, until the KV cache takes them

    @property
    def flag(self) -> str:
        """Return the flag by which the user chose the slots; empty if the plan does."""
        return self.config.slots_option.partition(" ")[0]

    @property
    def mode_reason(self) -> str:
        """Give the reason for a mode that the user chose; empty if the plan does."""
        return f"as {self.config.mode_option}" if self.config.mode_option else ""

    @property
    def fits(self) -> bool:
        """Say whether all experts are wanted on the device, and fit there."""
        layout = self.layout(Way(RESIDENT))
        few_in_place = self.device.is_uma and PoolPlanner(self.config, layout).wants_few
        wants_all = min(self.slots(layout)) >= self.n_experts if self.flag else not few_in_place
        return wants_all and layout_bytes([layout.whole]) <= self.free

    def layout(self, way: Way) -> SlotLayout:
        """Describe what slots take in a way."""
        residents = self.config.residents
        return SlotLayout(
            self.device,
            self.weights.spans,
            self.n_experts,
            self.n_used,
            way.n_landing,
            gathers=way.mode.gathers,
            brings=way.brings,
            curves=self.curve if isinstance(self.curve, LayerCurves) else None,
            n_kept=residents.n if residents is not None else 0,
            lent=self.lent,
        )

    def slots(self, layout: SlotLayout) -> tuple[int, ...]:
        """Return the slots of each layer that were asked for, or else as many as fit."""
        config, n_bytes = self.config, self.config.expert_cache_bytes
        if config.expert_slots is not None:
            return (min(config.expert_slots, layout.n_experts),) * len(layout.span_bytes)
        return layout.largest(self.free - layout.common_bytes if n_bytes is None else n_bytes)


class Way(NamedTuple):
    """Settles what a plan leaves open, but how much: where experts are computed, and how."""

    mode: ExpertMode
    n_landing: int = 0  # slots of each layer in which experts land while they are read
    brings: bool = False  # experts of prompts to places on the device
    cpu_layers: int = 0  # whose experts the CPU computes, from the first on

    @property
    def gives(self) -> bool:
        """Say whether slots may be given back: where an expert is computed may not depend on it."""
        return isinstance(self.mode, Cache)


# ----- the ways there are -----


def ways(given: ExpertRoom) -> Iterator[Way]:
    """Yield the ways that options leave; those that need less memory come after their like.

    Where the weights count what the CPU would read, it computes experts. Where all experts fit on
    the device, no other way of it can be faster.
    """
    config, n_layers = given.config, len(given.weights.spans)
    if not given.device.is_vulkan or not n_layers:
        yield Way(RESIDENT)
    elif config.mode == "cpu":
        n_cpu = n_layers if config.n_cpu_moe is None else min(n_layers, config.n_cpu_moe)
        yield Way(CpuLayers(), cpu_layers=n_cpu)
    elif config.mode == "hybrid":
        yield Way(Hybrid(reason=given.mode_reason), cpu_layers=n_layers)
    elif given.weights.file_spans:
        yield from _ways_of_cpu(given)
    elif config.mode == "resident" or (config.mode == "auto" and given.fits):
        yield Way(RESIDENT)
    else:
        yield from _ways_of_cache(given)


def _ways_of_cache(given: ExpertRoom) -> Iterator[Way]:
    config, device = given.config, given.device
    promotes = not device.is_uma if config.promote_on_read is None else config.promote_on_read
    least = 0 if config.promote_on_read is None or not promotes else 1
    most = min(MOST_LANDING, given.n_used) if promotes else 0
    misses: tuple[MissWay, ...] = ("read", "gather")
    reason = ""
    if config.miss != "auto":
        misses, reason = (config.miss,), "as --miss"
    elif device.is_uma:
        misses, reason = ("read",), "the device shares the host's memory"
    brought: tuple[bool, ...] = (True, False)
    if device.is_uma:  # where a copy gains nothing, and is made only if options ask for such
        brought = (config.miss == "gather" or bool(config.promote_on_read),)
    for miss in misses:
        for n_landing in range(most, least - 1, -1):
            for brings in brought if given.brings else (False,):
                yield Way(Cache(miss, n_landing > 0, reason=reason), n_landing, brings)


def _ways_of_cpu(given: ExpertRoom) -> Iterator[Way]:
    """Yield the ways in which the CPU computes experts that no other option rules out."""
    config, n_layers = given.config, len(given.weights.spans)
    if not given.fits:
        with suppress(UsageError):
            replace(config, expert_mode="hybrid")
            yield Way(Hybrid(), cpu_layers=n_layers)
    with suppress(UsageError):
        replace(config, expert_mode="cpu")
        for n_cpu in dict.fromkeys((_least_on_cpu(given), n_layers)):
            if n_cpu:
                yield Way(CpuLayers(), cpu_layers=n_cpu)


def _least_on_cpu(given: ExpertRoom) -> int:
    """Count the layers of the CPU at least, so that the others fit on the device."""
    left, least = given.free, len(given.weights.spans)
    for size in reversed(given.weights.spans):
        left -= given.n_experts * round_up(size) + GRANULARITY
        if left < 0:
            break
        least -= 1
    return least


# ----- a plan of each -----


def place_experts(given: ExpertRoom, way: Way) -> MemoryPlan:
    """Complete the plan in a way.

    Raises OutOfMemoryError where too little is left, UsageError where options say so.
    """
    if not given.device.is_vulkan:
        made = _in_file(given)
    elif not given.weights.experts:
        sizing = size_cache((), (), 0, 0, given.flag) if given.flag else None
        options = (given.config.pool_option, given.config.mode_option)
        made = replace(given.base, sizing=sizing, notes=_idle("the model has no experts", *options))
    else:
        made = _Placing(given, way).plan()
    return _with_executor(made, given.config)


def given_by_slots(made: MemoryPlan, weights: WeightBytes, n_used: int) -> int:
    """Count the bytes that slots of a plan can give back, in whole chunks of theirs.

    A layer keeps as many as a token uses. What has no home leaves for a free place of the host's.
    """
    if not made.gives_slots or not made.expert_slots:
        return 0
    spans = [round_up(size) for size in weights.spans]
    kept = (min(n, n_used) for n in made.expert_slots)
    slots = zip(made.expert_slots, kept, spans, strict=True)
    n_bytes = sum((n - n_kept) * size for n, n_kept, size in slots)
    if made.exchanges:
        pool = zip(made.host_slots, dict.fromkeys(spans), strict=True)
        places = sum(n * size for n, size in (*zip(made.expert_slots, spans, strict=True), *pool))
        n_bytes = min(n_bytes, places - weights.experts)
    return max(0, n_bytes - SLOT_CHUNK)


def _idle(why: str, *options: str) -> tuple[str, ...]:
    """Make notes of options, as they were given, that can change nothing."""
    return tuple(f"{option} has no effect: {why}" for option in options if option)


def _in_file(given: ExpertRoom) -> MemoryPlan:
    """Complete the plan of a CPU: all experts are read where the file is mapped."""
    config, spans, n_experts = given.config, given.weights.spans, given.n_experts
    layers = f"--gpu-layers {config.gpu_layers}" if config.gpu_layers is not None else ""
    notes = (
        *_idle("the CPU reads weights in the file", layers),
        *_idle("the CPU reads experts in the file", config.slots_option, config.pool_option),
        *_idle("the CPU computes everything", config.mode_option),
    )
    if not spans:
        return replace(given.base, notes=notes)
    layout = lay_out_alike(given.device, [(size, n_experts) for size in spans])
    why = "where their weights are in the file"
    line = allocation(given.device, "addresses of experts", "device", why, "experts", [layout])
    sizing = size_cache((n_experts,) * len(spans), spans, n_experts, given.n_used)
    sizing = replace(sizing, n_bytes=given.weights.mapped_experts)
    return replace(given.base, lines=(*given.base.lines, line), sizing=sizing, notes=notes)


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
        asked = [option for option in (config.slots_option, config.pool_option) if option]
        more = " or ".join(option.split()[0] for option in asked)
        raise UsageError(
            "--executor fused needs all experts in slots or host memory; "
            f"{config.pool_option or 'the host pool'} holds {sum(made.host_slots):,} of them, and "
            f"there are {sum(made.expert_slots):,} slots",
            "leave out --executor" + (f", or give a larger {more}" if more else ""),
        )
    reason = "what a router chooses and the host pool lacks is read from the file first"
    return replace(made, executor="stepped", executor_reason=reason)


class _Placing:
    """Completes a plan in one way, and holds what that rests on."""

    def __init__(self, given: ExpertRoom, way: Way) -> None:
        self._given, self._way, self._layout = given, way, given.layout(way)
        self._config, self._device, self._free = given.config, given.device, given.free
        self._pools = PoolPlanner(given.config, self._layout)
        self._line = partial(allocation, given.device)

    def plan(self) -> MemoryPlan:
        """Complete the plan. Raises OutOfMemoryError, UsageError."""
        mode, n_cpu = self._way.mode, self._way.cpu_layers
        if isinstance(mode, Cache):
            return self._cache()
        if isinstance(mode, Hybrid):
            return self._hybrid()
        return self._layers_of_cpu(n_cpu) if n_cpu else self._resident()

    def _made(self, mode: ExpertMode, lines: Sequence[Allocation], **more: Any) -> MemoryPlan:
        base = self._given.base
        return replace(base, mode=mode, lines=(*base.lines, *lines), **more)

    # ----- whole layers -----

    def _resident(self) -> MemoryPlan:
        """Put all experts on the device."""
        layout, config, shared = self._layout, self._config, self._device.is_uma
        fits = f"all fit in the {in_mib(self._free)} that are free"
        reason = "the device shares the host's memory: read in place" if shared else fits
        line = self._layers_on_device("experts", reason)
        slots = (layout.n_experts,) * len(layout.span_bytes)
        idle = not shared or self._pools.wants_few
        return self._made(
            RESIDENT,
            [line],
            sizing=self._sizing(slots, line.n_bytes),
            notes=_idle("all experts are on the device", config.pool_option) if idle else (),
        )

    def _layers_of_cpu(self, n_cpu: int) -> MemoryPlan:
        """Have the CPU compute the experts of the first layers; all others are on the device."""
        asked = self._given.mode_reason
        lines = self._cpu_lines(n_cpu, asked or PREDICTED)
        if n_cpu < len(self._layout.span_bytes):
            item = "experts of the other layers"
            lines.append(self._layers_on_device(item, asked or PREDICTED, n_cpu))
        return self._made(CpuLayers(reason=asked), lines, cpu_layers=n_cpu)

    def _layers_on_device(self, item: str, reason: str, first: int = 0) -> Allocation:
        """Make the line of all experts of the layers from `first` on. Raises OutOfMemoryError."""
        spans = [(size, self._layout.n_experts) for size in self._layout.span_bytes[first:]]
        line = self._line(item, "device", reason, "experts", [lay_out_alike(self._device, spans)])
        if line.n_bytes <= self._free:
            return line
        option = self._config.mode_option
        hint = f"use --n-cpu-moe {_least_on_cpu(self._given)} or more"
        if not first:
            flag = option.partition(" ")[0]
            hint = f"leave {flag} out, or choose a smaller model or quantisation"
        raise self._too_much(option, line.n_bytes, item, self._free, hint)

    def _cpu_lines(self, n_layers: int, reason: str) -> list[Allocation]:
        """Make the lines of the experts of the first layers, which the CPU reads."""
        in_file = self._given.weights.file_spans
        item = f"experts that the CPU computes, of {n_layers} of {len(in_file)} layers"
        spans = in_file[:n_layers]
        mapped = Allocation(item, "file", sum(span.mapped for span in spans), reason)
        entry_bytes = round_up(DESCRIPTOR_BYTES) + 8 * N_VERSIONS
        n_bytes = n_layers * self._layout.n_experts * entry_bytes
        n_bytes += sum(span.copied for span in spans)
        why = "where they are in the file, and what the CPU cannot read as it is there"
        return [mapped, self._line("addresses of the CPU's experts", "host", why, n_bytes=n_bytes)]

    # ----- some slots in each layer -----

    def _hybrid(self) -> MemoryPlan:
        """Plan as many slots as there are to be; the CPU computes experts without one."""
        layout, slots, n_layers = self._layout, self._slots(), self._way.cpu_layers
        if not any(slots):
            why = "it is not enough for a slot: the CPU computes all experts"
            made = self._layers_of_cpu(n_layers)
            return replace(made, notes=(*made.notes, *_idle(why, self._config.slots_option)))
        staging = lay_out_spans(self._device, [max(layout.span_bytes)] * N_STAGED)
        why = "on their way to slots, laid out anew"
        staged = self._line("staging of experts", "host", why, "staged experts", [staging])
        item, why = "reading from the file", "rows laid out anew"
        reading = self._line(item, "host", why, n_bytes=READING_BYTES)
        lines = (*self._cpu_lines(n_layers, "those without a slot"), staged, reading)
        return self._with_slots(slots, lines, cpu_layers=n_layers)

    def _cache(self) -> MemoryPlan:
        """Give some experts a slot on the device; the others are read in host memory."""
        layout, over = self._layout, "" if self._device.is_uma else " over the bus"
        slots, pool = self._beside_pool() if self._device.is_uma else self._before_pool()
        if not any(slots):
            return self._at_home(pool, over)
        return self._with_slots(
            slots,
            pool.lines(f"those without a slot are read in place{over}"),
            host_slots=pool.slots,
            exchanges=layout.holds_all(slots, pool.slots),
            landing_slots=layout.n_landing,
            brought_places=layout.brought_places,
        )

    def _with_slots(
        self, slots: tuple[int, ...], lines: Sequence[Allocation], **more: Any
    ) -> MemoryPlan:
        """Complete the plan with slots, and with `lines` of what serves experts without one."""
        sizing = self._sizing(slots, self._layout.own_bytes(slots))
        lines = (*self._slot_lines(slots), *lines)
        return self._made(self._way.mode, lines, expert_slots=slots, sizing=sizing, **more)

    def _at_home(self, pool: PoolPlan, over: str) -> MemoryPlan:
        option, too_few = self._config.slots_option, "not enough for a slot"
        reason = f"{in_mib(self._free)} are free on the device: read in place{over}"
        if option:
            reason = f"{self._given.flag} is {too_few}: read in place"
        return self._made(
            AtHome(),
            pool.lines(reason),
            sizing=self._sizing_at_home(pool),
            host_slots=pool.slots,
            notes=_idle(f"it is {too_few}", option) if pool.slots else (),
        )

    # ----- how many slots, and beside what -----

    def _slots(self) -> tuple[int, ...]:
        """Return the slots there are to be. Raises OutOfMemoryError where they do not fit."""
        slots = self._given.slots(self._layout)
        self._check(slots, self._free)
        return slots

    def _before_pool(self) -> tuple[tuple[int, ...], PoolPlan]:
        """Decide slots and the host pool, by the even split where that alone holds all with one."""
        layout, splits = self._layout, [self._slots()]
        if layout.curves is not None:
            splits.append(self._given.slots(replace(layout, curves=None)))
        found = [(slots, self._pools.decide(self._given.pool, slots)) for slots in splits]
        whole = (x for x in found if not x[1].slots or layout.holds_all(x[0], x[1].slots))
        return next(whole, found[0])

    def _beside_pool(self) -> tuple[tuple[int, ...], PoolPlan]:
        """Decide slots and the host pool in memory that they share: slots only if asked for.

        The pool leaves them room, unless a size was asked for that fits. Where homes for all have
        no room beside the slots, what has a slot needs none.
        """
        layout, room, pools, taken = self._layout, self._given.pool, self._pools, 0
        slots = self._given.slots(layout) if self._given.flag else (0,) * len(layout.span_bytes)
        if pools.asked is None or pools.asked > self._free:
            taken = min(self._needed(slots), max(0, room.most - pools.least_bytes))
        left = PoolRoom(min(room.unasked, room.most - taken), room.most - taken)
        pool = pools.decide(left, slots)
        beside = f" beside {in_mib(pool.n_bytes)} for {pool.share} in the host pool"
        self._check(slots, self._free - pool.taken_bytes, beside)
        return slots, pool

    def _needed(self, slots: Sequence[int]) -> int:
        """Count the bytes of these slots and what goes with them."""
        return self._layout.n_bytes(slots) + self._layout.common_bytes * any(slots)

    def _check(self, slots: Sequence[int], free: int, beside: str = "") -> None:
        """Refuse slots that do not fit; say how many would. Raises OutOfMemoryError."""
        if (needed := self._needed(slots)) <= free or not any(slots):
            return
        layout, flag, hint = self._layout, self._given.flag, f"leave {self._given.flag} out"
        by_size = self._config.expert_slots is None
        layout = layout if by_size else replace(layout, curves=None)
        largest = layout.largest(max(0, free) - layout.common_bytes)
        if any(largest) if by_size else min(largest):
            size = size_option(layout.n_bytes(largest), at_most=True)
            hint = f"use {flag} {size if by_size else min(largest)} or less, or leave it out"
        what = f"experts{beside}"
        raise self._too_much(self._config.slots_option, needed, what, max(0, free), hint)

    def _too_much(
        self, option: str, needed: int, what: str, free: int, hint: str
    ) -> OutOfMemoryError:
        return OutOfMemoryError(
            f"{option} needs {in_mib(needed)} for {what}; {in_mib(free)} of {self._device.name}'s "
            "memory can be used for them",
            hint,
        )

    # ----- how slots are described -----

    def _slot_lines(self, slots: tuple[int, ...]) -> Iterator[Allocation]:
        layout, own = self._layout, self._layout.own_bytes(slots)
        count = self._sizing(slots, own).slots_text
        item = f"expert slots, {count} of {layout.n_experts} in each layer"
        why = f"as {self._given.flag}" if self._given.flag else "what the device has left"
        why += ", split by --expert-profile" if max(slots) > min(slots) + 1 else ""
        yield self._line(item, "device", why, "expert slots", layout.arenas(slots), own)
        if n := layout.n_landing:
            item, landing = f"landing slots, {n} in each layer", layout.n_bytes(slots) - own
            why = "where experts land while they are read"
            yield self._line(item, "device", why, "expert slots", n_bytes=landing)
        if n := layout.n_gathered:
            item = f"gathered experts, {n} at a time"
            why = "those without a slot are copied there and read"
            yield self._line(item, "device", why, "gathered experts", [layout.gathered])
        if n := layout.brought_places:
            item = f"brought experts, {n} at a time and the next {n}"
            why = "those without a slot, for long prompts"
            yield self._line(item, "device", why, "brought experts", [layout.brought])

    def _sizing(self, slots: Sequence[int], n_bytes: int, flag: str | None = None) -> CacheSizing:
        """Describe the cache, with the `n_bytes` of its line: users read one figure, not two."""
        layout, flag = self._layout, self._given.flag if flag is None else flag
        sizing = size_cache(slots, layout.span_bytes, layout.n_experts, layout.n_used, flag)
        return replace(sizing, n_bytes=n_bytes)

    def _sizing_at_home(self, pool: PoolPlan) -> CacheSizing:
        """Describe a cache without slots; on shared memory the pool takes their part."""
        spans = self._layout.span_bytes
        sizing = self._sizing([0] * len(spans), 0)
        if pool.slots and self._device.is_uma:
            n_layers = Counter(spans)
            n_slots = dict(zip(n_layers, pool.slots, strict=True))
            slots = [n_slots[size] // n_layers[size] for size in spans]
            flag = "--host-pool" if self._config.pool_option else ""
            sizing = self._sizing(slots, pool.n_bytes, flag)
        return replace(sizing, place="host pool") if pool.slots else sizing
