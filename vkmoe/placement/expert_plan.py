"""Where the experts go: on the device, in host memory with slots on the device, or host memory.

Pure; a part of `plan`. How many slots fit is the subject of slots.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from vkmoe.config import EngineConfig, parse_size
from vkmoe.errors import OutOfMemoryError
from vkmoe.experts.sizing import size_cache
from vkmoe.facts import CacheSizing, DeviceInfo, ExpertSpec, PlanLine, WeightBytes
from vkmoe.gpu.memory_types import Intent
from vkmoe.placement.allocations import allocated, arena_bytes, heap_of
from vkmoe.placement.slots import largest_slots, slot_arena_bytes

__all__ = ["ExpertPlan", "Room", "place_experts"]

MIB = 1 << 20
Place = Literal["device", "host", "cache"]


class Room(NamedTuple):
    """Bytes left for experts. Where the device shares the host's memory, both are the same ones."""

    device: int
    host: int
    shared: bool


@dataclass(frozen=True)
class ExpertPlan:
    """What was decided about the experts."""

    experts_in: Place
    slots: tuple[int, ...]  # per MoE layer; () unless "cache"
    sizing: CacheSizing | None
    lines: tuple[PlanLine, ...]


class _Asked(NamedTuple):
    """The slots a user asked for, and how."""

    slots: tuple[int, ...]
    flag: str
    text: str


def place_experts(
    config: EngineConfig,
    experts: ExpertSpec | None,
    weights: WeightBytes,
    device: DeviceInfo,
    room: Room,
) -> ExpertPlan:
    """Decide. Raises OutOfMemoryError when the experts, or the slots asked for, do not fit."""
    flag = _flag(config)
    if experts is None or not weights.experts:
        sizing = size_cache((), (), 0, 0, flag) if flag else None
        return ExpertPlan("device", (), sizing, ())
    return _Planner(config, experts, weights, device, room, flag).plan()


def _flag(config: EngineConfig) -> str:
    if config.expert_slots is not None:
        return "--expert-slots"
    return "--expert-cache" if config.expert_cache is not None else ""


class _Planner:
    """The decision, with what it rests on."""

    def __init__(
        self,
        config: EngineConfig,
        experts: ExpertSpec,
        weights: WeightBytes,
        device: DeviceInfo,
        room: Room,
        flag: str,
    ) -> None:
        self._config, self._experts, self._flag = config, experts, flag
        self._device, self._room = device, room
        self._known = bool(weights.spans)
        self._spans = weights.spans
        self._total = (
            arena_bytes(
                device,
                [size for size in weights.spans for _ in range(experts.n_experts)],
                weights.experts,
            )
            if self._known
            else allocated(weights.experts)
        )

    def plan(self) -> ExpertPlan:
        n_experts = self._experts.n_experts
        asked = self._asked() if self._known and self._flag else None
        if asked is not None and min(asked.slots) < n_experts:
            return self._cached(asked.slots) if self._fits(asked) else self._at_home()
        if self._total <= self._room.device:
            return self._resident()
        if asked is not None:
            raise self._too_much(asked)
        if self._room.shared or self._total > self._room.host:
            raise self._nowhere()
        slots = self._largest() if self._known else ()
        return self._cached(slots) if any(slots) else self._at_home()

    # ----- what was asked -----

    def _asked(self) -> _Asked:
        n_experts = self._experts.n_experts
        if self._config.expert_slots is not None:
            n_slots = self._config.expert_slots
            slots = (min(n_slots, n_experts),) * len(self._spans)
            return _Asked(slots, self._flag, f"{self._flag} {n_slots}")
        text = self._config.expert_cache
        assert text is not None
        slots = largest_slots(self._device, parse_size(text), self._spans, n_experts)
        return _Asked(slots, self._flag, f"{self._flag} {text.strip()}")

    def _fits(self, asked: _Asked) -> bool:
        """Whether there are slots to make. Raises OutOfMemoryError when there is no room."""
        if not self._room.shared and self._total > self._room.host:
            raise self._nowhere()
        if self._slot_bytes(asked.slots) > self._room_for_slots():
            raise self._too_much(asked)
        return any(asked.slots)

    # ----- how many slots -----

    def _room_for_slots(self) -> int:
        return self._room.device - (self._total if self._room.shared else 0)

    def _largest(self) -> tuple[int, ...]:
        n_experts = self._experts.n_experts
        return largest_slots(self._device, self._room_for_slots(), self._spans, n_experts)

    def _slot_bytes(self, slots: Sequence[int]) -> int:
        return slot_arena_bytes(self._device, slots, self._spans)

    # ----- what follows -----

    def _resident(self) -> ExpertPlan:
        reason = (
            "the device shares the host's memory: read in place"
            if self._room.shared
            else f"all fit in the {_mib(self._room.device)} that are free"
        )
        slots = (self._experts.n_experts,) * len(self._spans)
        line = self._line("experts", "device", self._total, reason)
        return ExpertPlan("device", (), self._sizing(slots, self._total), (line,))

    def _at_home(self) -> ExpertPlan:
        reason = (
            f"{self._flag} is not enough for one slot in each layer: read in place"
            if self._flag
            else f"{_mib(self._room.device)} are free on the device: read in place over the bus"
        )
        slots = (0,) * len(self._spans)
        line = self._line("experts", "host", self._total, reason)
        return ExpertPlan("host", (), self._sizing(slots, 0), (line,))

    def _cached(self, slots: tuple[int, ...]) -> ExpertPlan:
        few, many = min(slots), max(slots)
        count = f"{few}" if few == many else f"{few} or {many}"
        reason = f"as {self._flag}" if self._flag else "what the device has left"
        n_bytes = self._slot_bytes(slots)
        over = "" if self._room.shared else " over the bus"
        home_reason = f"those without a slot are read in place{over}"
        lines = (
            self._line(
                f"expert slots, {count} of {self._experts.n_experts} in each layer",
                "device",
                n_bytes,
                reason,
            ),
            self._line("host pool, all experts", "host", self._total, home_reason),
        )
        return ExpertPlan("cache", slots, self._sizing(slots, n_bytes), lines)

    def _sizing(self, slots: Sequence[int], n_bytes: int) -> CacheSizing:
        """`n_bytes` as the plan's line has them: the user reads one figure, not two."""
        experts = self._experts
        if not self._known:
            slots = (0,)
        sizes = self._spans or (0,)
        sizing = size_cache(slots, sizes, experts.n_experts, experts.n_used, self._flag)
        return replace(sizing, n_bytes=n_bytes)

    def _line(self, item: str, intent: Intent, n_bytes: int, reason: str) -> PlanLine:
        place: Literal["device", "host"] = "device" if intent == "device" else "host"
        return PlanLine(item, place, n_bytes, reason, heap_of(self._device, intent))

    # ----- what cannot be -----

    def _too_much(self, asked: _Asked) -> OutOfMemoryError:
        """Says what was asked, what there is, and the largest that is possible."""
        free = max(0, self._room_for_slots())
        largest = self._largest()
        needed = self._slot_bytes(asked.slots)
        homes = f" beside {_mib(self._total)} for all of them" if self._room.shared else ""
        if not any(largest):
            hint = f"leave {asked.flag} out"
        elif asked.flag == "--expert-slots":
            hint = f"use --expert-slots {min(largest)} or less, or leave it out"
        else:
            n_bytes = self._slot_bytes(largest)
            size = f"{n_bytes // MIB}MiB" if n_bytes >= MIB else str(n_bytes)
            hint = f"use --expert-cache {size} or less, or leave it out"
        return OutOfMemoryError(
            f"{asked.text} needs {_mib(needed)} for experts{homes}; "
            f"{_mib(free)} of {self._device.name}'s memory can be used for them",
            hint,
        )

    def _nowhere(self) -> OutOfMemoryError:
        return OutOfMemoryError(
            f"the experts need {_mib(self._total)}; {_mib(self._room.device)} of "
            f"{self._device.name}'s memory and {_mib(self._room.host)} of host memory can be used",
            "close other programs, or choose a smaller model or quantisation",
        )


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / MIB:,.0f} MiB"
