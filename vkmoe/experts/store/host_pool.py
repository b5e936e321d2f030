"""Runs a host pool smaller than the model: experts come into it from the file when needed.

Brings the parts together: which are in it (decide/pool_residency.py), and the host slots and reads
under way (tier.py). Does not know of device slots, but that some experts have one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from vkmoe.errors import GpuError, OutOfMemoryError, VkmoeError
from vkmoe.experts.decide.keys import Keys, KeySpace, Mask
from vkmoe.experts.decide.locations import Locations, Move
from vkmoe.experts.decide.residency import PoolResidency
from vkmoe.experts.records.overlap import Interval, Overlap
from vkmoe.experts.records.profiler import PoolCounters
from vkmoe.experts.store.copies import Copy
from vkmoe.experts.store.tier import Tier

__all__ = ["HostPool"]

N_ATTEMPTS = 2  # at an expert that is needed, before the run ends


class HostPool:
    """Keeps experts in host memory; the others are in the file.

    Those that are present on the device are not waited for here.
    """

    def __init__(
        self,
        residency: PoolResidency,
        tier: Tier,
        device: Locations,
        overlap: Overlap,
    ) -> None:
        """Begin empty; `overlap` learns of reads from `tier`, of computing from `computed`.

        `device` says which experts are in its slots.
        """
        self.residency, self.tier, self._overlap = residency, tier, overlap
        self.space: KeySpace = residency.space
        self.locations, self._device = residency.locations, device
        self._n_uses = self._n_hits = self._n_hinted = self._n_right = 0
        self._guessed: set[int] = set()  # for the layer to come, and being read for it

    @property
    def counters(self) -> PoolCounters:
        """Return what was done since the start."""
        tier, overlap = self.tier.counters, self._overlap
        hidden = overlap.fraction  # which adds up what is known by now
        return PoolCounters(
            n_uses=self._n_uses,
            n_hits=self._n_hits,
            n_reads=tier.n_copies,
            read_bytes=tier.copied_bytes,
            n_failed=tier.n_failed,
            n_hinted=self._n_hinted,
            n_cancelled=tier.n_cancelled,
            stall_ns=tier.stall_ns,
            read_ns=overlap.copied_ns,
            hidden=hidden,
            n_right=self._n_right,
        )

    @property
    def n_at_once(self) -> int:
        """Return how many experts of one size can always be here together."""
        return self.residency.n_at_once

    def computed(self, host: Interval) -> None:
        """Note that computing went on from `host`'s begin to its end, by the clock of reads."""
        self._overlap.computed([host], host)

    def fill(self, read: Callable[[Sequence[Copy]], object]) -> None:
        """Let `read` read experts until the pool is full. Raises what it raises.

        Those that came through the pool into slots make room. To be called before the first submit.
        """
        in_slots = self._device.present
        self.locations.leave(np.flatnonzero(self.locations.present & in_slots))
        none_kept = np.zeros(self.space.n_keys, np.bool_)
        wanted = self.residency.first_fill(in_slots)
        moves = self.residency.bring(wanted, none_kept, in_slots)
        self.tier.fill(moves, read)

    def started(self) -> None:
        """Begin with tokens: what was needed and waited for until now does not count."""
        self._n_uses = self._n_hits = 0
        self.tier.started()

    def need(self, keys: Keys, kept: Mask, make_room: Callable[[], Mask]) -> None:
        """Ensure these experts, `n_at_once` at most, are in a slot or in the pool; waits for them.

        A key may be repeated: each is a use, of one expert. `kept` [n_keys] may not leave the pool,
        these keys among them; `make_room` waits for those of them that are copied, and returns
        which are kept then. Raises ModelFileError and other VkmoeErrors when one cannot be read,
        even at a second attempt.
        """
        wanted = keys[~self._device.are_present(keys)]
        self.residency.use(wanted)
        self._n_right += len(self._guessed.intersection(keys.tolist()))
        self._guessed.clear()
        here = self.locations.are_present(wanted)
        self._n_uses += len(wanted)
        self._n_hits += int(np.count_nonzero(here))
        absent = np.array(list(dict.fromkeys(wanted[~here].tolist())), np.int64)
        n_failed = n_crowded = 0
        while absent.size:
            absent, error = self._fetch(absent, kept)
            n_failed += error is not None
            n_crowded += bool(absent.size) and error is None
            if error is not None and n_failed == N_ATTEMPTS:
                raise self._unreadable(error)
            if n_crowded == N_ATTEMPTS:
                raise self._crowded(absent)
            if absent.size:
                kept = make_room()

    def want(self, keys: Keys, kept: Mask) -> None:
        """Begin to read experts that may be needed soon, but never more than one call's keys."""
        room = len(keys) - len(self.tier.moving)
        elsewhere = keys[~(self.locations.are_resident(keys) | self._device.are_present(keys))]
        coming = elsewhere.tolist()[: max(0, room)]
        if coming:
            moves = self._bring(coming, kept, urgent=False)
            self._n_hinted += len(moves)
            self._guessed.update(move.key for move in moves)

    def check_integrity(self) -> None:
        """Raise AssertionError if the record or the policy contradicts itself (tests)."""
        self.residency.check_integrity()

    # ----- inside -----

    def _bring(self, keys: list[int], kept: Mask, urgent: bool) -> list[Move]:
        moves = self.residency.bring(keys, kept, self._device.present)
        self.tier.bring(moves, urgent=urgent)
        return moves

    def _fetch(self, absent: Keys, kept: Mask) -> tuple[Keys, Exception | None]:
        """Make one attempt; returns which are still absent, and why one could not be read."""
        tier, needed = self.tier, set(absent.tolist())
        # What is only guessed at waits; those needed come anew.
        tier.cancel(np.zeros(self.space.n_keys, np.bool_))
        for key in needed:
            tier.errors.pop(key, None)
        todo = [key for key in absent.tolist() if self.locations.is_absent(key)]
        moves = self._bring(todo, kept, urgent=True)
        tier.collect(needed=needed)
        if len(moves) < len(todo):
            tier.collect(wait=True)  # those on their way can leave once they are here
        still = absent[~self.locations.are_present(absent)]
        errors = [tier.errors[key] for key in still.tolist() if key in tier.errors]
        return still, errors[0] if errors else None

    def _crowded(self, absent: Keys) -> OutOfMemoryError:
        return OutOfMemoryError(
            f"{len(absent)} experts of MoE layer {self.space.layer(int(absent[0]))} found no place "
            "in the host pool",
            "give a larger --host-pool",
        )

    def _unreadable(self, error: Exception) -> VkmoeError:
        if isinstance(error, VkmoeError):
            return error
        failure = GpuError(
            f"an expert could not be read from the model file: {error}",
            "see whether the file is still there and whole",
        )
        failure.__cause__ = error
        return failure
