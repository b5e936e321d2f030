"""What a plan's experts have room for, and what was decided about them: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from vkmoe.facts import CacheSizing, PlanLine

__all__ = ["ExpertPlan", "PoolRoom", "Room"]


class PoolRoom(NamedTuple):
    """Bytes of host memory for the pool: taken unasked, and taken if asked for."""

    unasked: int
    most: int


class Room(NamedTuple):
    """Bytes left for experts. Where the device shares the host's memory, all are the same ones."""

    device: int
    pool: PoolRoom
    shared: bool


@dataclass(frozen=True)
class ExpertPlan:
    """What was decided about the experts; the fields of MemoryPlan that have to do with them."""

    experts_in: Literal["device", "host", "cache"]
    expert_slots: tuple[int, ...] = ()  # per MoE layer; () unless "cache"
    sizing: CacheSizing | None = None
    lines: tuple[PlanLine, ...] = ()
    host_places: tuple[int, ...] = ()
    landing_slots: int = 0
    gather_places: int = 0
    executor: Literal["fused", "stepped"] = "fused"
    executor_reason: str = "every expert is where the device can read it"
    notes: tuple[str, ...] = ()
