"""A host pool smaller than the model: experts come into it from the file when they are needed.

Brings the parts together: who is in (pool_residency.py), places and reads under way (tier.py). Does
not know of device slots, but that some experts have one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from vkmoe.errors import GpuError, OutOfMemoryError, VkmoeError
from vkmoe.experts.counters import PoolCounters
from vkmoe.experts.keys import KeySpace
from vkmoe.experts.policy import Keys, Mask
from vkmoe.experts.pool_residency import PoolResidency
from vkmoe.experts.tier import Tier
from vkmoe.experts.uploads import Copy
from vkmoe.gpu.arena import Placement

__all__ = ["HostPool"]

N_ATTEMPTS = 2  # of reading an expert that is needed, before the run ends


class HostPool:
    """Experts in host memory; the others are in the file.

    `in_slots` [n_keys] is a view of who has a device slot; nobody here waits for those.
    """

    def __init__(
        self, residency: PoolResidency, tier: Tier, span_bytes: Sequence[int], in_slots: Mask
    ) -> None:
        self.residency, self.tier = residency, tier
        self.space: KeySpace = residency.space
        self._span_bytes, self._in_slots = list(span_bytes), in_slots
        self._n_uses = self._n_hits = self._n_hinted = 0

    @property
    def counters(self) -> PoolCounters:
        """What was done since the start."""
        tier = self.tier.counters
        return PoolCounters(
            n_uses=self._n_uses,
            n_hits=self._n_hits,
            n_reads=tier.n_copies,
            read_bytes=tier.copied_bytes,
            n_failed=tier.n_failed,
            n_hinted=self._n_hinted,
            n_cancelled=tier.n_cancelled,
            stall_ns=tier.stall_ns,
        )

    @property
    def n_at_once(self) -> int:
        """How many experts of one size can always be here together."""
        return min(pool.capacity for pool in self.residency.pools)

    def reset(self) -> None:
        """Nobody is in the pool, after a change that was torn in two."""
        self.tier.reset()
        self.residency.reset()

    def place(self, key: int) -> Placement:
        """Where an expert of the pool lies. Must hold: it is there."""
        return self.tier.slots.of(key).place

    def fill(self, read: Callable[[Sequence[Copy]], None]) -> None:
        """Let `read` read experts until the pool is full. Raises what it raises."""
        nobody = np.zeros(self.space.n_keys, np.bool_)
        moves = self.residency.bring(self.residency.first_fill(), nobody, self._in_slots)
        self.tier.fill(moves, read)

    def need(self, keys: Keys, kept: Mask) -> None:
        """Have these experts of one layer in a slot or in the pool; waits for them.

        `kept` [n_keys] may not leave the pool, these keys among them. Raises ModelFileError and
        other VkmoeErrors when one cannot be read, even at a second attempt.
        """
        wanted = keys[~self._in_slots[keys]]
        self.residency.use(wanted)
        self._n_uses += len(wanted)
        self._n_hits += int(np.count_nonzero(self.residency.published[wanted]))
        absent = wanted[~self.residency.published[wanted]]
        for attempt in range(1, 2 * N_ATTEMPTS + 1):
            if not absent.size:
                return
            absent = self._fetch(absent, kept, final=attempt >= N_ATTEMPTS)
        raise OutOfMemoryError(
            f"{len(absent)} experts of layer {self.space.layer(int(absent[0]))} found no place in "
            "the host pool",
            "give a larger --host-pool",
        )

    def want(self, keys: Keys, kept: Mask, budget_bytes: float) -> None:
        """Begin to read experts that may be needed soon, as far as the budget goes."""
        waiting = self.tier.pending_bytes
        coming: list[int] = []
        for key in keys[~self._in_slots[keys]].tolist():
            if self.residency.is_absent(key):
                waiting += self._span_bytes[self.space.layer(key)]
                if waiting > budget_bytes:
                    break
                coming.append(key)
        if coming:
            moves = self.residency.bring(coming, kept, self._in_slots)
            self._n_hinted += len(moves)
            self.tier.bring(moves)

    def check_integrity(self) -> None:
        """Raises AssertionError unless policy and places agree (tests)."""
        self.residency.check_integrity()
        self.tier.slots.check_integrity()
        published = set(np.flatnonzero(self.residency.published).tolist())
        assert self.tier.slots.keys == published | self.tier.moving, "places and policy differ"

    # ----- inside -----

    def _fetch(self, absent: Keys, kept: Mask, final: bool) -> Keys:
        """One attempt; returns who is still absent."""
        tier, needed = self.tier, set(absent.tolist())
        tier.cancel(lambda key: False)  # whoever is only guessed at waits; those needed come anew
        for key in needed:
            tier.errors.pop(key, None)
        todo = [key for key in absent.tolist() if self.residency.is_absent(key)]
        moves = self.residency.bring(todo, kept, self._in_slots)
        tier.bring(moves, urgent=True)
        tier.collect(needed=needed)
        if len(moves) < len(todo):
            tier.collect(wait=True)  # those on their way can leave once they are here
        still = absent[~self.residency.published[absent]]
        failures = [tier.errors[key] for key in still.tolist() if key in tier.errors]
        if failures and final:
            raise self._unreadable(failures[0]) from failures[0]
        return still

    def _unreadable(self, error: Exception) -> VkmoeError:
        if isinstance(error, VkmoeError):
            return error
        return GpuError(
            f"an expert could not be read from the model file: {error}",
            "see whether the file is still there and whole",
        )
