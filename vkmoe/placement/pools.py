"""Finds how many experts some bytes hold: in slots on a device, and in host slots of a pool.

Pure; a part of `plan`. Slots are split evenly over layers. Slots of a host pool are shared by
layers whose experts have the same size: each size gets its share of the bytes, but no less than a
token uses in one layer, because those must be there at the same time. Where experts go is the
subject of experts.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vkmoe.config import EngineConfig
from vkmoe.errors import OutOfMemoryError, UsageError, VkmoeError
from vkmoe.experts.decide.settings import PoolSpec
from vkmoe.facts import READ_IN_PLACE, Allocation, ArenaLayout, DeviceInfo, ExpertMode
from vkmoe.gpu.arena import chunk_cap, lay_out_slots, lay_out_spans, round_up
from vkmoe.ops.prompt_experts import HALF_BYTES, N_HALVES, places_of_round
from vkmoe.placement.cache_choice import N_LANDING
from vkmoe.placement.memory import allocation, in_mib, layout_bytes, size_option
from vkmoe.placement.span_reader import READING_BYTES

__all__ = ["PoolPlan", "PoolPlanner", "PoolRoom", "SlotLayout", "host_pools", "split_slots"]

_SMALLER = "close other programs, or choose a smaller model or quantisation"


@dataclass(frozen=True)
class SlotLayout:
    """Counts what slots take: on a device their own bytes, those to land in, and room to gather; in
    a host pool one number of slots for each size of expert, in the order of their first layers.

    All bytes are bounds of what is allocated: one arena for each size.
    """

    device: DeviceInfo
    span_bytes: Sequence[int]  # of an expert in each MoE layer
    n_experts: int
    n_used: int
    mode: ExpertMode = READ_IN_PLACE  # of a cache
    brings: bool = True  # experts of prompts, to places on the device

    # ----- on the device -----

    @property
    def n_landing(self) -> int:
        """Count the slots each layer has besides its own: no more than a token can miss there."""
        return min(N_LANDING, self.n_used) if self.mode.promote else 0

    def own_bytes(self, slots: Sequence[int]) -> int:
        """Bound the bytes of `slots[layer]` slots alone."""
        return layout_bytes(self.arenas(slots, landing=False))

    def n_bytes(self, slots: Sequence[int]) -> int:
        """Bound the bytes of these slots and their landing slots."""
        return layout_bytes(self.arenas(slots))

    def arenas(self, slots: Sequence[int], landing: bool = True) -> tuple[ArenaLayout, ...]:
        """Lay out these slots, with their landing slots."""
        n_of_size: Counter[int] = Counter()
        for n_slots, size in zip(slots, self.span_bytes, strict=True):
            n_of_size[size] += n_slots + self.n_landing * (landing and n_slots > 0)
        return self.host_arenas(tuple(n_of_size.values()))

    @property
    def n_gathered(self) -> int:
        """Count the slots that all layers share, as many as a token can miss in one."""
        return self.n_used if self.mode.gathers else 0

    @property
    def gathered(self) -> ArenaLayout:
        """Lay out the slots that all layers share, each for the largest expert."""
        return lay_out_spans(self.device, [max(self.span_bytes, default=0)] * self.n_gathered)

    @property
    def brought_places(self) -> int:
        """Count the places of a half that experts of prompts are brought to, shared by all layers.

        0 where none are brought, or where no allocation holds two halves of so few.
        """
        most = min(HALF_BYTES, chunk_cap(self.device) // N_HALVES)
        n_places = places_of_round(self.n_experts, self._largest, most)
        fits = N_HALVES * n_places * self._largest <= chunk_cap(self.device)
        return n_places if self.brings and fits else 0

    @property
    def brought(self) -> ArenaLayout:
        """Lay out the places of both halves, behind one another, each for the largest expert."""
        n_bytes = N_HALVES * self.brought_places * self._largest
        return lay_out_spans(self.device, [n_bytes] if n_bytes else [])

    @property
    def _largest(self) -> int:
        return round_up(max(self.span_bytes, default=0))

    @property
    def common_bytes(self) -> int:
        """Bound the bytes of what layers share."""
        return layout_bytes([self.gathered, self.brought])

    def largest(self, n_bytes: int) -> tuple[int, ...]:
        """Find the most slots of each layer that fit in `n_bytes`; all 0 if not one each.

        Landing slots and what allocations add are included.
        """
        usable = n_bytes - self.n_landing * sum(self.span_bytes)
        while True:
            slots = split_slots(usable, self.span_bytes, self.n_experts)
            excess = self.n_bytes(slots) - n_bytes
            if excess <= 0 or not any(slots):
                return slots
            usable -= excess

    # ----- in a host pool -----

    def holds_all(self, slots: Sequence[int], host_slots: Sequence[int]) -> bool:
        """Say whether slots of each layer and host slots of each size hold all experts together."""
        n_free = dict(zip(dict.fromkeys(self.span_bytes), host_slots, strict=False))
        for n_slots, size in zip(slots, self.span_bytes, strict=True):
            n_free[size] = n_free.get(size, 0) + n_slots - self.n_experts
        return bool(host_slots) and min(n_free.values()) >= 0

    def host_arenas(self, slots: Sequence[int]) -> tuple[ArenaLayout, ...]:
        """Lay out host slots: so many of each size."""
        sizes = zip(dict.fromkeys(self.span_bytes), slots, strict=True)
        return tuple(lay_out_slots(self.device, size, n) for size, n in sizes)

    def host_bytes(self, slots: Sequence[int]) -> int:
        """Bound the bytes of host slots."""
        return layout_bytes(self.host_arenas(slots))

    @property
    def least_host_slots(self) -> tuple[int, ...]:
        """Count the slots of each size that one layer needs."""
        return (self.n_used,) * len(set(self.span_bytes))

    @property
    def least_host_bytes(self) -> int:
        """Bound the bytes of those."""
        return self.host_bytes(self.least_host_slots)

    def most_host_slots(self, n_bytes: int) -> tuple[int, ...] | None:
        """Find the most host slots that `n_bytes` hold; None if not even the least do."""
        n_of_size = [self.n_experts * n_layers for n_layers in Counter(self.span_bytes).values()]
        n_all = sum(n_of_size)

        def slots(share: int) -> tuple[int, ...]:
            return tuple(max(self.n_used, n * share // n_all) for n in n_of_size)

        fits, too_many = -1, n_all + 1
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self.host_bytes(slots(middle)) <= n_bytes:
                fits = middle
            else:
                too_many = middle
        return slots(fits) if fits >= 0 else None


def split_slots(n_bytes: int, slot_bytes: Sequence[int], n_experts: int) -> tuple[int, ...]:
    """Find the slots per layer that `n_bytes` hold, at most `n_experts`; all 0 if not one each."""
    n_slots = min(n_experts, max(0, n_bytes) // sum(slot_bytes))
    rest = n_bytes - n_slots * sum(slot_bytes)
    slots = []
    for size in slot_bytes:
        more = 0 < n_slots < n_experts and size <= rest
        rest -= size * more
        slots.append(n_slots + more)
    return tuple(slots)


def host_pools(
    slots: Sequence[int], span_bytes: Sequence[int], n_used: int
) -> tuple[PoolSpec, ...]:
    """Make the pools of a plan's `host_slots`; none where all are in host memory or better.

    `span_bytes` are those of an expert in each MoE layer.
    """
    if not slots:
        return ()
    pools = []
    for size, capacity in zip(dict.fromkeys(span_bytes), slots, strict=True):
        layers = tuple(i for i, other in enumerate(span_bytes) if other == size)
        # A lower floor would keep slots from the layer whose experts are needed together.
        floor = n_used if capacity >= n_used * len(layers) else 0
        pools.append(PoolSpec(layers, capacity, floor, size))
    return tuple(pools)


class PoolRoom(NamedTuple):
    """Counts the bytes of host memory for the pool: taken unasked, and taken if asked for."""

    unasked: int
    most: int


@dataclass(frozen=True)
class PoolPlan:
    """Holds what was decided of the host pool.

    `slots` are those of each size of expert; () where there is one for each expert.
    """

    slots: tuple[int, ...]
    layouts: tuple[ArenaLayout, ...]
    n_all: int  # experts of the model
    reason: str = ""

    @property
    def n_bytes(self) -> int:
        """Bound the bytes of the pool as it is allocated."""
        return layout_bytes(self.layouts)

    @property
    def taken_bytes(self) -> int:
        """Count the bytes of all its lines."""
        return self.n_bytes + READING_BYTES * bool(self.slots)

    @property
    def share(self) -> str:
        """Say how many experts the pool holds."""
        return f"{sum(self.slots):,} of {self.n_all:,} experts" if self.slots else "all experts"

    def lines(self, device: DeviceInfo, home_reason: str) -> tuple[Allocation, ...]:
        """Make the plan's lines; `home_reason` says what a pool of all experts is good for."""
        item = f"host pool, {self.share}"
        if not self.slots:
            return (allocation(device, item, "host", home_reason, "experts", self.layouts),)
        pool = allocation(device, item, "host", self.reason, "expert pool", self.layouts)
        reading = "rows laid out anew; the file's own pages are dropped behind"
        item = "reading from the file"
        return pool, allocation(device, item, "host", reading, n_bytes=READING_BYTES)


class PoolPlanner:
    """Decides how large the host pool is; `whole` is the arena of all experts.

    `wants_few`: one was asked for that does not hold `all` of them.
    """

    def __init__(self, config: EngineConfig, layout: SlotLayout, whole: ArenaLayout) -> None:
        self._layout, self._total = layout, layout_bytes([whole])
        self._option = f"--host-pool {config.host_pool.strip()}" if config.host_pool else ""
        self._asked = config.host_pool_bytes
        self._least = layout.least_host_bytes
        self.least_bytes = self._least + READING_BYTES  # of the smallest pool, and reading
        self.wants_few = self._asked is not None and self._asked < self._total
        self.all = PoolPlan((), (whole,), layout.n_experts * len(layout.span_bytes))

    def decide(self, room: PoolRoom) -> PoolPlan:
        """Plan the pool.

        Raises OutOfMemoryError or UsageError where a layer's used experts do not fit.
        """
        layout = self._layout
        if self._asked is None and self._total <= room.unasked:
            return self.all
        if self._asked is not None:
            n_bytes = min(self._asked, self._total)
            if n_bytes + READING_BYTES * self.wants_few > room.most:
                raise self._too_much(n_bytes, room)
            if not self.wants_few:
                return self.all
            slots, reason = layout.most_host_slots(n_bytes), "as --host-pool"
        else:
            slots = layout.most_host_slots(room.unasked - READING_BYTES)
            if slots is None and self.least_bytes <= room.most:
                slots = layout.least_host_slots
            reason = "what host memory allows"
        if slots is None:
            raise self._too_little(room)
        reason += "; the others are read from the file"
        return PoolPlan(slots, layout.host_arenas(slots), self.all.n_all, reason)

    def _too_much(self, n_bytes: int, room: PoolRoom) -> OutOfMemoryError:
        largest = size_option(room.most - READING_BYTES, at_most=True)
        fits = room.most >= self.least_bytes
        return OutOfMemoryError(
            f"{self._option} needs {in_mib(n_bytes)}; {in_mib(room.most)} of host memory "
            "can be used for experts",
            f"use --host-pool {largest} or less, or leave it out" if fits else _SMALLER,
        )

    def _too_little(self, room: PoolRoom) -> VkmoeError:
        needs = (
            f"the {self._layout.n_used} experts of a layer that a token uses need "
            f"{in_mib(self._least)}"
        )
        if self._asked is not None:
            least = size_option(self._least, at_most=False)
            return UsageError(
                f"{self._option} is too small: {needs}", f"use --host-pool {least} or more"
            )
        return OutOfMemoryError(
            f"{needs} of host memory, the least --host-pool there can be; {in_mib(room.most)} can "
            "be used",
            _SMALLER,
        )
