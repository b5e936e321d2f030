"""Lets the KV caches follow the longest sequence.

They grow between submits, with memory that nothing uses, or that expert slots give back; what
sequences do not need any more goes back to the slots. Growing changes no bit: kernels read the same
rows, and spread their work by a row's position alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from vkmoe.errors import OutOfMemoryError
from vkmoe.execute.kept_texts import KeptTexts
from vkmoe.experts.store.tracker import ExpertTracker
from vkmoe.facts import MemoryPlan
from vkmoe.gpu.arena import round_up
from vkmoe.models.kv_caches import KvCaches
from vkmoe.models.program_sizes import CONTEXT_STEP


class ContextMemory:
    """Decides how many positions KV caches have, and where the memory for more comes from."""

    def __init__(
        self,
        caches: KvCaches,
        tracker: ExpertTracker,
        plan: MemoryPlan,
        borrowers: KeptTexts | None,
    ) -> None:
        """`borrowers` are texts that may lie in the spare memory until it is needed."""
        self._caches, self._tracker, self._borrowers = caches, tracker, borrowers
        self._least, self._most = caches.n_positions, plan.ctx_size
        self._spare = plan.spare_bytes  # of the device, which nothing uses
        self._gives = plan.gives_slots
        self._taken = 0  # bytes that slots gave back

    def grow(self, n_positions: int, filled: Sequence[int]) -> bool:
        """Make room for so many positions of each region; return whether anything moved.

        The first `filled` positions of each region are kept. Must hold: no submit is in flight.
        Raises DeviceLostError; OutOfMemoryError where too little is left, with all rows kept.
        """
        caches = self._caches
        if n_positions <= caches.n_positions:
            return False
        more = max(n_positions, caches.n_positions + caches.n_positions // 2)
        for wanted in (more, n_positions):
            if self._resize(min(round_up(wanted, CONTEXT_STEP), self._most), filled):
                return True
        n_most = caches.n_positions
        raise OutOfMemoryError(
            f"no memory is left for a context of {n_positions:,} tokens; {n_most:,} fit now",
            "close other programs, lower --parallel, or try --cache-type-k q8_0",
        )

    def shrink(self, filled: Sequence[int]) -> bool:
        """Give back what regions with so many rows do not need; return whether anything moved.

        Must hold: no submit is in flight. Raises DeviceLostError.
        """
        needed = max(self._least, round_up(2 * max(filled), CONTEXT_STEP))
        if 2 * needed > self._caches.n_positions:
            return False
        before = self._caches.n_bytes
        if self._resize(needed, filled):
            n_bytes = min(self._taken, self._spare)
            _, n_taken = self._tracker.take_back(n_bytes)
            self._taken, self._spare = self._taken - n_taken, self._spare - n_taken
        return self._caches.n_bytes != before  # some layers may have moved before memory ended

    def _resize(self, n_positions: int, filled: Sequence[int]) -> bool:
        """Move the caches to places for so many positions, if there is memory for it."""
        caches = self._caches
        grows = n_positions > caches.n_positions
        missing = caches.bytes_to_resize(n_positions) - self._spare if grows else 0
        while missing <= 0 or self._take(missing):
            before = caches.n_bytes
            if grows and self._borrowers is not None:
                self._borrowers.fit(self._spare - caches.bytes_to_resize(n_positions))
            try:
                caches.resize(n_positions, filled)
                return True
            except OutOfMemoryError:  # less is free than was planned
                missing = 1
            finally:
                self._spare -= caches.n_bytes - before
            if not grows:
                break
        return False

    def _take(self, n_bytes: int) -> bool:
        """Have slots give back so many bytes."""
        if not self._gives:
            return False
        _, n_freed = self._tracker.give_back(n_bytes)
        self._taken, self._spare = self._taken + n_freed, self._spare + n_freed
        return n_freed >= n_bytes
