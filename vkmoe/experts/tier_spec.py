"""What a tier (tier.py) is made of, whom it tells, and what it counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from vkmoe.experts.decide.residents import Move
from vkmoe.experts.records.overlap import Overlap
from vkmoe.experts.store.copies import DrainedUploader
from vkmoe.experts.store.slots import SlotManager

__all__ = ["Decider", "TierCounters", "TierSpec"]


class Decider(Protocol):
    """Who decided the moves, and is told what became of them."""

    def landed(self, moves: Sequence[Move]) -> None: ...

    def failed(self, moves: Sequence[Move]) -> None: ...


class TierSpec(NamedTuple):
    """What a tier works with."""

    slots: SlotManager
    uploads: DrainedUploader
    assign: Callable[[Sequence[int], Sequence[int]], None]  # notes addresses of keys; 0: none
    source: Callable[[int], Any]  # where the bytes of a key come from, as `uploads` takes it
    span_bytes: Sequence[int]  # of an expert [n_layers]
    n_experts: int
    max_copy_bytes: int  # of one upload
    failure: str  # what is logged, once, when an upload fails
    overlap: Overlap | None = None  # told when bytes moved


class TierCounters:
    """Totals since the start; sizes in bytes, times in nanoseconds."""

    def __init__(self) -> None:
        self.n_copies = self.copied_bytes = self.n_evictions = 0
        self.n_failed = self.n_cancelled = self.stall_ns = 0
