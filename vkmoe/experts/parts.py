"""What an expert cache is made of, and how its two tiers are put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from vkmoe.experts.decide.pool_residency import PoolResidency
from vkmoe.experts.decide.residency import Residency
from vkmoe.experts.records.overlap import Overlap
from vkmoe.experts.store.copies import DrainedUploader
from vkmoe.experts.store.host_pool import HostPool
from vkmoe.experts.store.slots import SlotManager
from vkmoe.experts.store.table import Directory, ExpertTable
from vkmoe.experts.store.tier import Tier, TierSpec
from vkmoe.gpu.arena import Placement

__all__ = ["CacheWays", "ExpertMemory", "PoolParts", "make_pool", "make_tier"]

# Of one submit of copies: far below what drivers' watchdogs allow, on the slowest links too.
MAX_SUBMIT_BYTES = 256 << 20
OVERLAPPED_SUBMIT_BYTES = 16 << 20  # small enough to be of use, or taken back, one by one
MAX_READ_BYTES = 1  # one expert a job: what is needed waits for no more guesses than that
COPY_FAILED = "copying experts to the GPU failed, they are read in place"
READ_FAILED = "reading experts from the model file failed"


class ExpertMemory(NamedTuple):
    """Where experts can be.

    `homes` [n_layers][n_experts] hold all of them; empty with a host pool smaller than the model.
    """

    table: ExpertTable
    slots: SlotManager
    homes: Sequence[Sequence[Placement]]
    span_bytes: Sequence[int]  # of an expert [n_layers]
    scratch: Sequence[Placement] = ()  # [n_used]: where misses are gathered that may not stay


class PoolParts(NamedTuple):
    """A host pool smaller than the model."""

    residency: PoolResidency
    places: SlotManager
    reads: DrainedUploader


@dataclass(frozen=True)
class CacheWays:
    """How copies are made.

    With `wait`, the plain way, the next submit finds all in place that was decided to move; else
    copies are collected when they are done.
    """

    wait: bool = True
    marks_homes: bool = False  # kernels are to know what they read at home
    budget: Callable[[], float] = lambda: inf  # bytes that may be copied for the next token
    overlap: Overlap | None = None  # told when copies to slots ran


def make_tier(
    memory: ExpertMemory,
    directory: Directory,
    residency: Residency,
    uploads: DrainedUploader,
    home: Callable[[int], Placement],
    ways: CacheWays,
) -> Tier:
    """The device's slots, filled from the homes."""
    spec = TierSpec(
        memory.slots,
        uploads,
        directory.set_slots,
        home,
        memory.span_bytes,
        residency.space.n_experts,
        MAX_SUBMIT_BYTES if ways.wait else OVERLAPPED_SUBMIT_BYTES,
        COPY_FAILED,
        ways.overlap,
    )
    return Tier(spec, residency, memory.table)


def make_pool(
    parts: PoolParts, memory: ExpertMemory, directory: Directory, residency: Residency
) -> HostPool:
    """The host pool, filled from the file."""
    overlap = Overlap()  # by the host's clock, which times reads
    spec = TierSpec(
        parts.places,
        parts.reads,
        directory.set_homes,
        lambda key: key,
        memory.span_bytes,
        residency.space.n_experts,
        MAX_READ_BYTES,
        READ_FAILED,
        overlap,
    )
    tier = Tier(spec, parts.residency, memory.table)
    in_slots = residency.published.reshape(-1)
    return HostPool(parts.residency, tier, in_slots, overlap)
