"""Finds how many experts some bytes hold: in slots on a device, and in host slots of a pool.

Pure; a part of `plan`. Slots are split over layers by the hits they bring, evenly where nothing is
known of that. Slots of a host pool are shared by layers whose experts have the same size: each size
gets its share of the bytes, but no less than a token uses in one layer, because those must be there
at the same time. Where experts go is the subject of experts.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from vkmoe.config import EngineConfig
from vkmoe.errors import OutOfMemoryError, UsageError, VkmoeError
from vkmoe.experts.study.slot_curves import LayerCurves, split_by_gain, split_slots
from vkmoe.facts import Allocation, ArenaLayout, DeviceInfo
from vkmoe.gpu.arena import (
    SLOT_CHUNK,
    chunk_cap,
    lay_out_alike,
    lay_out_slots,
    lay_out_spans,
    round_up,
    slot_chunks,
)
from vkmoe.kernels.prompt_experts.operations import HALF_BYTES, N_HALVES, places_of_round
from vkmoe.option_fields import in_mib
from vkmoe.placement.memory import allocated, allocation, layout_bytes, size_option
from vkmoe.weights.span_reader import READING_BYTES

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
    n_landing: int = 0  # slots of each layer that has some, besides these
    gathers: bool = False  # experts that miss, to slots that all layers share
    brings: bool = True  # experts of prompts, to places on the device
    curves: LayerCurves | None = None  # of hits in each layer, if anything is known of them
    n_kept: int = 0  # experts of each layer that stay in their slots
    lent: int = 0  # bytes that slots have until the KV cache takes them

    @property
    def whole(self) -> ArenaLayout:
        """Lay out all experts."""
        return lay_out_alike(self.device, [(size, self.n_experts) for size in self.span_bytes])

    @cached_property
    def _n_layers(self) -> Counter[int]:
        """Count the layers that have experts of each size."""
        return Counter(self.span_bytes)

    # ----- on the device -----

    def own_bytes(self, slots: Sequence[int]) -> int:
        """Bound the bytes of `slots[layer]` slots alone."""
        return self.host_bytes(self._of_size(slots, 0))

    def n_bytes(self, slots: Sequence[int]) -> int:
        """Bound the bytes of these slots and their landing slots."""
        return self.host_bytes(self._of_size(slots, self.n_landing))

    def arenas(self, slots: Sequence[int]) -> tuple[ArenaLayout, ...]:
        """Lay out these slots, with their landing slots."""
        return self.host_arenas(self._of_size(slots, self.n_landing))

    def _of_size(self, slots: Sequence[int], n_landing: int) -> tuple[int, ...]:
        """Count the slots of each size, with so many to land in of each layer that has some."""
        n_of_size = dict.fromkeys(self.span_bytes, 0)
        for n_slots, size in zip(slots, self.span_bytes, strict=True):
            n_of_size[size] += n_slots + n_landing * (n_slots > 0)
        return tuple(n_of_size.values())

    @property
    def n_gathered(self) -> int:
        """Count the slots that all layers share, as many as a token can miss in one."""
        return self.n_used if self.gathers else 0

    @property
    def gathered(self) -> ArenaLayout:
        """Lay out the slots that all layers share, each for the largest expert."""
        return lay_out_spans(self.device, [self._largest] * self.n_gathered)

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
        """Find the most slots of each layer that fit in `n_bytes`; one for the first layers where
        that is less than one each.

        Landing slots and what allocations add are included.
        """
        usable = n_bytes - self.n_landing * sum(self.span_bytes)
        slots = self._split(usable)
        while any(slots) and (excess := self.n_bytes(slots) - n_bytes) > 0:
            usable -= excess
            slots = self._split(usable)
        if any(slots):
            return slots
        one = [0] * len(self.span_bytes)
        for layer in range(len(one)):
            one[layer] = 1
            if self.n_bytes(one) > n_bytes:
                one[layer] = 0
        return tuple(one)

    def _split(self, n_bytes: int) -> tuple[int, ...]:
        """Split bytes over layers: each has slots for what a token uses and for what stays there
        and another one, or as many as all can have."""
        even = split_slots(n_bytes, self.span_bytes, self.n_experts)
        if self.curves is None or not any(even):
            return even
        least = [min(max(self.n_used, self.n_kept + 1), min(even))] * len(even)
        return split_by_gain(n_bytes, self.span_bytes, self.curves, least)

    # ----- in a host pool -----

    def host_arenas(self, slots: Sequence[int]) -> tuple[ArenaLayout, ...]:
        """Lay out host slots: so many of each size."""
        sizes = zip(self._n_layers, slots, strict=True)
        return tuple(lay_out_slots(self.device, size, n) for size, n in sizes)

    def host_bytes(self, slots: Sequence[int]) -> int:
        """Bound the bytes of host slots."""
        sizes = zip(self._n_layers, slots, strict=True)
        chunks = (slot_chunks(self.device, size, n) for size, n in sizes)
        return sum(allocated(n_bytes) * n for found in chunks for n_bytes, n in found)

    @property
    def least_host_slots(self) -> tuple[int, ...]:
        """Count the slots of each size that one layer needs."""
        return (self.n_used,) * len(self._n_layers)

    @property
    def least_host_bytes(self) -> int:
        """Bound the bytes of those."""
        return self.host_bytes(self.least_host_slots)

    @property
    def _all_host_slots(self) -> tuple[int, ...]:
        """Count the slots of each size that hold all experts."""
        return tuple(self.n_experts * n for n in self._n_layers.values())

    def holds_all(self, slots: Sequence[int], host_slots: Sequence[int]) -> bool:
        """Say whether slots and host slots hold all experts, also without what is lent."""
        sizes = zip(self._of_size(slots, 0), host_slots, self._all_host_slots, strict=False)
        spare = [own + host - n for own, host, n in sizes]
        n_bytes = sum(n * size for n, size in zip(spare, self._n_layers, strict=False))
        lent = self.lent + SLOT_CHUNK if self.lent else 0
        return bool(host_slots) and min(spare) >= 0 and n_bytes >= lent

    def most_host_slots(self, n_bytes: int, slots: Sequence[int] = ()) -> tuple[int, ...] | None:
        """Find the most host slots that `n_bytes` hold; None if not even the least do.

        Beside `slots` on the device they hold all other experts first, if they can. What is left is
        shared in proportion to the experts of each size.
        """
        last, least = self._all_host_slots, self.least_host_slots
        first = (0,) * len(last)
        if slots:
            counted = zip(last, self._of_size(slots, 0), least, strict=True)
            others = tuple(max(low, n - on_device) for n, on_device, low in counted)
            if self.host_bytes(others) <= n_bytes:
                first = least = others
        n_steps = sum(last)

        def at(step: int) -> tuple[int, ...]:
            ends = zip(first, last, least, strict=True)
            return tuple(max(low, a + (b - a) * step // n_steps) for a, b, low in ends)

        steps = range(n_steps + 1)
        n_that_fit = bisect_right(steps, n_bytes, key=lambda step: self.host_bytes(at(step)))
        return at(n_that_fit - 1) if n_that_fit else None


class PoolRoom(NamedTuple):
    """Counts the bytes of host memory for the pool: taken unasked, and taken if asked for."""

    unasked: int
    most: int


@dataclass(frozen=True)
class PoolPlan:
    """Holds what was decided of the host pool: `slots` of each size; () where all have a home."""

    layout: SlotLayout
    slots: tuple[int, ...] = ()
    reason: str = ""

    @property
    def layouts(self) -> tuple[ArenaLayout, ...]:
        """Lay out the pool."""
        return self.layout.host_arenas(self.slots) if self.slots else (self.layout.whole,)

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
        n_all = self.layout.n_experts * len(self.layout.span_bytes)
        return f"{sum(self.slots):,} of {n_all:,} experts" if self.slots else "all experts"

    def lines(self, home_reason: str) -> tuple[Allocation, ...]:
        """Make the plan's lines; `home_reason` says what a pool of all experts is good for."""
        device, item = self.layout.device, f"host pool, {self.share}"
        if not self.slots:
            return (allocation(device, item, "host", home_reason, "experts", self.layouts),)
        pool = allocation(device, item, "host", self.reason, "expert pool", self.layouts)
        reading = "rows laid out anew; the file's own pages are dropped behind"
        item = "reading from the file"
        return pool, allocation(device, item, "host", reading, n_bytes=READING_BYTES)


class PoolPlanner:
    """Decides how large the host pool is; `asked` are bytes, no more than all experts take.

    `wants_few`: one was asked for that does not hold all of them.
    """

    def __init__(self, config: EngineConfig, layout: SlotLayout) -> None:
        self._layout, self._total = layout, PoolPlan(layout).n_bytes
        self._option, asked = config.pool_option, config.host_pool_bytes
        self.asked = None if asked is None else min(asked, self._total)
        self.least_bytes = layout.least_host_bytes + READING_BYTES  # of the smallest, and reading
        self.wants_few = self.asked is not None and self.asked < self._total

    def decide(self, room: PoolRoom, slots: Sequence[int]) -> PoolPlan:
        """Plan the pool beside `slots` of each layer on the device.

        Raises OutOfMemoryError or UsageError where a layer's used experts do not fit.
        """
        layout = self._layout
        if self.asked is None:
            if self._total <= room.unasked:
                return PoolPlan(layout)
            places = layout.most_host_slots(room.unasked - READING_BYTES, slots)
            if places is None and self.least_bytes <= room.most:
                places = layout.least_host_slots
            reason = "what host memory allows"
        else:
            if self.asked + READING_BYTES * self.wants_few > room.most:
                raise self._too_much(self.asked, room)
            if not self.wants_few:
                return PoolPlan(layout)
            places, reason = layout.most_host_slots(self.asked, slots), "as --host-pool"
        if places is None:
            raise self._too_little(room)
        where = "on the device" if layout.holds_all(slots, places) else "read from the file"
        return PoolPlan(layout, places, f"{reason}; the others are {where}")

    def _too_much(self, n_bytes: int, room: PoolRoom) -> OutOfMemoryError:
        largest = size_option(room.most - READING_BYTES, at_most=True)
        fits = room.most >= self.least_bytes
        return OutOfMemoryError(
            f"{self._option} needs {in_mib(n_bytes)}; {in_mib(room.most)} of host memory "
            "can be used for experts",
            f"use --host-pool {largest} or less, or leave it out" if fits else _SMALLER,
        )

    def _too_little(self, room: PoolRoom) -> VkmoeError:
        n_used, least = self._layout.n_used, self._layout.least_host_bytes
        needs = f"the {n_used} experts of a layer that a token uses need {in_mib(least)}"
        if self._option:
            hint = f"use --host-pool {size_option(least, at_most=False)} or more"
            return UsageError(f"{self._option} is too small: {needs}", hint)
        return OutOfMemoryError(
            f"{needs} of host memory, the least --host-pool there can be; {in_mib(room.most)} can "
            "be used",
            _SMALLER,
        )
