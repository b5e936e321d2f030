"""Gives memory of experts back where other programs need it, and takes it back when that is over.

Watched are a GPU's memory, by the driver's budget, and the host's. What leaves, and how, is the
subject of cache.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Protocol

from vkmoe.cpu.host_memory import available_bytes
from vkmoe.experts.store.tracker import ExpertTracker
from vkmoe.gpu.device import Device, memory_type_candidates
from vkmoe.modes import Cache, ExpertMode

log = logging.getLogger("vkmoe")
KEPT_FREE_BYTES = 256 << 20  # besides, where memory is taken back: others may grow again
WATCH_SECONDS = 1.0  # between two looks, each of which asks the driver or the system

Moves = Callable[[int], tuple[int, int]]  # as many bytes, if it can: returns experts and bytes


class Borrower(Protocol):
    """Describes what has host memory only as long as nothing else needs it."""

    @property
    def n_bytes(self) -> int:
        """Count the bytes that it has now."""

    def missing(self) -> int:
        """Say how many of them other programs need."""

    def give_back(self, n_bytes: int) -> int:
        """Free so many bytes, or all; return how many these were."""


class MemoryWatch:
    """Watches one memory, between runs.

    `missing` says how many bytes are too few; if it is negative, how many others leave unused.
    """

    def __init__(
        self,
        memory: str,
        place: str,
        missing: Callable[[], int],
        give: Moves,
        take: Moves,
        borrower: Borrower | None = None,
    ) -> None:
        """Log of this `memory`, and of experts that have a `place` there.

        No expert leaves as long as the `borrower` has memory.
        """
        self._memory, self._place, self._missing = memory, place, missing
        self._give, self._take, self._borrower = give, take, borrower
        self._next_look = monotonic()
        self._wanted = 0  # 1: to give back, -1: to take back
        self._given = 0  # bytes
        self._warned = False

    def look(self) -> None:
        """Look at the memory, if that was not done of late."""
        if monotonic() < self._next_look:
            return
        self._next_look = monotonic() + WATCH_SECONDS
        n_missing = self._missing()
        n_free = -n_missing - KEPT_FREE_BYTES if self._given else 0
        last, self._wanted = self._wanted, 1 if n_missing > 0 else -1 if n_free > 0 else 0
        if self._wanted != last:  # once may be for a moment
            return
        if n_missing > 0:
            self._give_back(n_missing)
        elif n_free > 0:
            self._take_back(min(self._given, n_free))

    def _give_back(self, n_missing: int) -> None:
        if self._borrower is not None and (n_freed := self._borrower.give_back(n_missing)):
            words = "other programs need %s: %.0f MiB of prompts that were kept are given back"
            log.info(words, self._memory, n_freed / 2**20)
            return
        n_experts, n_freed = self._give(n_missing)
        self._given += n_freed
        if n_freed:
            log.log(
                logging.INFO if self._warned else logging.WARNING,
                "other programs need %s: %.0f MiB were given back, %d experts fewer have a %s",
                *(self._memory, n_freed / 2**20, n_experts, self._place),
            )
        elif not self._warned:
            log.warning(
                "other programs need %s, of which %.0f MiB too much are in use: expect to be "
                "slowed down; close them, or start again",
                *(self._memory, n_missing / 2**20),
            )
        self._warned = True

    def _take_back(self, n_bytes: int) -> None:
        n_experts, n_taken = self._take(n_bytes)
        self._given -= n_taken
        if n_taken:
            log.info(
                "%s is free again: %.0f MiB were taken back, %d experts more have a %s",
                *(self._memory, n_taken / 2**20, n_experts, self._place),
            )


def watches(
    device: Device, tracker: ExpertTracker, mode: ExpertMode, borrower: Borrower
) -> list[MemoryWatch]:
    """Make what watches the memory that a model has in common with other programs.

    Beyond its budget (VK_EXT_memory_budget) a driver moves what it likes to host memory, or refuses
    more. Beyond what the host has, the system ends a program. No memory of a device is watched
    where the driver tells no budget. Of host memory the `borrower` gives back what it has, before
    experts do that have another home.
    """
    found, info = list[MemoryWatch](), device.info
    heap = info.memory_types[memory_type_candidates(info, "device")[0]].heap
    if info.is_vulkan and not info.is_uma and info.heaps[heap].budget:

        def over_budget() -> int:
            now = device.heaps()[heap]
            return now.usage - now.budget if now.usage and now.budget else 0

        # Which experts are the CPU's may not depend on other programs.
        gives: Moves = tracker.give_back if isinstance(mode, Cache) else _nothing
        words = "the GPU's memory", "slot"
        found.append(MemoryWatch(*words, over_budget, gives, tracker.take_back))
    missing = borrower.missing
    give: Moves = _nothing
    take: Moves = _nothing
    if tracker.cache is not None and tracker.cache.pool is not None:
        missing = _host_watched(borrower)
        give, take = tracker.give_back_places, partial(tracker.take_back, of_host=True)
    found.append(MemoryWatch("host memory", "place there", missing, give, take, borrower))
    return found


def _nothing(_: int) -> tuple[int, int]:
    """Give back no expert's memory, and take none back."""
    return 0, 0


def _host_watched(borrower: Borrower) -> Callable[[], int]:
    """Return what says how many bytes of host memory are missing.

    Of those that are free now, what is borrowed included, others may use half, before so much is
    given back that they have three quarters.
    """
    at_first = available_bytes()
    kept = at_first * 3 // 4

    def missing() -> int:
        if (n_bytes := borrower.missing()) > 0:
            return n_bytes
        free = available_bytes() + borrower.n_bytes
        return kept - free if free < at_first // 2 or free > kept else 0

    return missing
