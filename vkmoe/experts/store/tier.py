"""Brings experts into memory of one kind, and follows what is under way there.

There is one `Tier` for device slots, filled from host memory, and where the host pool is smaller
than the model one for the pool, filled from the file; `HostPool` runs that. A tier carries out what
was decided, in the record of where experts are (decide/locations.py), and leaves the copying itself
to an uploader.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from operator import attrgetter
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkmoe.errors import DeviceLostError, GpuError, OutOfMemoryError, VkmoeError
from vkmoe.experts import _residency
from vkmoe.experts.decide.keys import Keys, Mask
from vkmoe.experts.decide.locations import Locations, Move
from vkmoe.experts.decide.residency import PoolResidency
from vkmoe.experts.records.profiler import Interval, Overlap, PoolCounters
from vkmoe.experts.store.copies import Copy, QueueFullError, Upload, Uploader
from vkmoe.experts.store.slots import Slot, SlotManager
from vkmoe.experts.store.table import ExpertTable
from vkmoe.gpu.arena import Placement

log = logging.getLogger("vkmoe")
MAX_PENDING = 8  # submits; the extension keeps at most 64 recordings for uploads
MAX_READ_BYTES = 1  # one expert a job: what is needed waits for no more guesses than that
MEMORY = attrgetter("memory")  # of a slot
N_ATTEMPTS = 2  # at an expert that is needed, before the run ends


@dataclass
class TierCounters:
    """Counts totals since the start; sizes in bytes, times in nanoseconds."""

    n_copies: int = 0
    copied_bytes: int = 0
    n_evictions: int = 0
    n_failed: int = 0
    n_cancelled: int = 0
    stall_ns: int = 0


@dataclass(eq=False, slots=True)
class _Pending:
    """Joins copies under way with the experts they are for."""

    keys: Keys
    n_bytes: int
    upload: Upload
    began_ns: int


@dataclass(eq=False)
class Tier:
    """Brings experts into the slots they were given; none is written while a submit can read it."""

    table: ExpertTable
    locations: Locations
    slots: SlotManager
    uploads: Uploader
    source: Callable[[int], Any]  # where the bytes of a key come from, as `uploads` takes it
    span_bytes: Sequence[int]  # of an expert [n_layers]
    max_copy_bytes: int  # of one upload
    failure: str  # what is logged, once, when an upload fails
    readable: Locations | None = None  # only experts that are present there can be copied
    overlap: Overlap | None = None  # notes when bytes moved
    counters: TierCounters = field(default_factory=TierCounters)
    errors: dict[int, Exception] = field(default_factory=dict)  # why a key's last copy failed

    def __post_init__(self) -> None:
        self._sizes = np.array(self.span_bytes, np.int64)
        self._n_experts = self.locations.space.n_experts
        self._n_per_upload = max(1, self.max_copy_bytes // max(self.span_bytes))
        self._pending: list[_Pending] = []
        self._ahead: list[Upload] = []  # in the queue before submits that were handed their experts

    @property
    def pending_bytes(self) -> int:
        """Return the bytes of copies under way, and of those that wait."""
        if not self.locations.any_arriving:
            return 0
        keys = self.locations.arriving.nonzero()[0]
        return int(self._sizes.take(keys // self._n_experts).sum())

    @property
    def is_copying(self) -> bool:
        """Return whether copies have begun whose end was not collected."""
        return bool(self._pending)

    def slot(self, key: int) -> Slot:
        """Return the slot that an expert has. Must hold: it has one."""
        return self.slots.all[self.locations.slot_of(key)]

    def addresses(self, keys: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return the addresses of the slots that experts have. Must hold: all have one."""
        return self.slots.addresses[self.locations.slots_of(keys)]

    def bring(self, moves: Sequence[Move], wait: bool = False, urgent: bool = False) -> None:
        """Carry out moves: begin to copy them, behind those that waited already.

        With `wait`, not more copies are begun at a time than can be waited for later.
        """
        self._start_able(moves, wait, urgent)

    def fill(self, moves: Sequence[Move], read: Callable[[Sequence[Copy]], object]) -> None:
        """Bring these all at once, before the first submit, by `read`. Raises what it raises."""
        self._begin_moves(moves)
        keys = np.array([move.key for move in moves], np.int64)
        copies = self._copies(keys, self.locations.slots_of(keys))
        self.locations.begin_copy(keys)
        read(copies)
        self._arrived(keys, sum([n_bytes for _, _, n_bytes in copies]))

    def started(self) -> None:
        """Begin with tokens: what was waited for until now does not count."""
        self.counters.stall_ns = 0
        if self.overlap is not None:
            self.overlap.begin_anew()

    def start_waiting(self, wait: bool = False, urgent: bool = False) -> None:
        """Begin the copies that wait, into slots that no submit reads any more."""
        self._start_able((), wait, urgent)

    def collect(self, wait: bool = False, needed: Set[int] = frozenset()) -> None:
        """Note which copies have arrived; waits for those of `needed` keys, or for all.

        Raises DeviceLostError. A key that fails to arrive otherwise loses its slot again. Waiting
        may be interrupted: what arrives later is noted by a later call.
        """
        self._let_go(wait)
        for pending in list(self._pending):
            waits = wait or (bool(needed) and not needed.isdisjoint(pending.keys.tolist()))
            if waits or pending.upload.done():
                self._finish(pending)

    def hand_over(self) -> None:
        """Note all copies under way as arrived for the next submit, which is queued behind them.

        It waits for them, not the host. Must hold: copies and submits have one queue. Raises what
        the copies before them failed with, which is that the device is lost.
        """
        self._let_go(wait=False)
        for pending in self._pending:
            self._arrived(pending.keys, pending.n_bytes)
            self._ahead.append(pending.upload)
        self._pending.clear()

    def cancel(self, wanted: Mask) -> None:
        """Take back the copies that have not begun and are for no `wanted` [n_keys] expert."""
        for pending in list(self._pending):
            if not wanted[pending.keys].any() and pending.upload.cancel():
                self._pending.remove(pending)
                self._take_back(pending.keys)
        waiting = self.locations.waiting()
        self._take_back(waiting[~wanted[waiting]])

    def vacate(self, numbers: Keys, leaving: Keys, publish: Callable[[], object]) -> bool:
        """Let no submit to come read these slots: `leaving` leave, what else is there moves.

        `publish` lets the table lead to where experts are. Returns False, with the others where
        they were, if the copies fail. Raises DeviceLostError. Must hold: no submit is in flight,
        nor a copy; `leaving` is what `Locations.leaving_for` says of these slots.
        """
        self.slots.unmap(self.locations.slots_of(leaving), self.table.version)
        self.locations.leave(leaving)
        publish()
        keys, new = self.locations.new_slots(numbers)
        old = self.locations.slots_of(keys)
        try:
            self.slots.copy(old, new)
        except DeviceLostError:
            raise
        except VkmoeError as error:
            log.warning("experts could not be moved to other slots: %s", error)
            return False
        self.slots.unmap(old, self.table.version)
        self.locations.move(keys, new)
        return True

    # ----- inside -----

    def _begin_moves(self, moves: Sequence[Move]) -> tuple[Keys, Keys]:
        """Note whose slots others get; return the experts whose copies can begin, and their slots.

        Those of `moves` come last, in their order.
        """
        state, slot_of, _, _ = self.locations.record
        readable = self.readable.record.state if self.readable is not None else None
        versions = (self.table.version, self.table.oldest_read)
        arrays = (state, slot_of, readable, self.slots.last_mapped)
        n_evicted, keys, numbers = _residency.begin_moves(moves, *arrays, *versions)
        self.counters.n_evictions += n_evicted
        return keys, numbers

    def _start_able(self, moves: Sequence[Move], wait: bool, urgent: bool) -> None:
        """Begin the copies that can begin, those of `moves` last."""
        keys, numbers = self._begin_moves(moves)
        for first in range(0, len(keys), self._n_per_upload):
            these = slice(first, first + self._n_per_upload)
            self._start(keys[these], numbers[these], urgent)
            if wait and len(self._pending) >= MAX_PENDING:
                self.collect(wait=True)

    def _copies(self, keys: Keys, numbers: Keys) -> list[Copy]:
        places = map(MEMORY, self.slots.at(numbers))
        sizes = self._sizes[keys // self._n_experts].tolist()
        return [*zip(map(self.source, keys.tolist()), places, sizes, strict=True)]

    def _start(self, keys: Keys, numbers: Keys, urgent: bool) -> None:
        copies = self._copies(keys, numbers)
        n_bytes = sum([n_bytes for _, _, n_bytes in copies])
        try:
            self.slots.poison(numbers)
            began = perf_counter_ns()
            self.locations.begin_copy(keys)
            upload = self.uploads.start(copies, urgent)
            self._pending.append(_Pending(keys, n_bytes, upload, began))
        except DeviceLostError:
            raise
        except QueueFullError:
            self.locations.put_off(keys)
        except Exception as error:
            self._give_up(keys, error)

    def _finish(self, pending: _Pending) -> None:
        failure, counters = None, self.counters
        began = perf_counter_ns()
        try:
            pending.upload.wait()
        except DeviceLostError:
            raise
        except Exception as error:
            failure = error
        ended = perf_counter_ns()
        counters.stall_ns += ended - began
        self._pending.remove(pending)
        if failure is None:
            self._arrived(pending.keys, pending.n_bytes)
            if self.overlap is not None:
                self.overlap.copied(pending.upload.interval(), (pending.began_ns, ended))
        else:
            self._give_up(pending.keys, failure)

    def _let_go(self, wait: bool) -> None:
        """Let go of copies that were handed over, and count how long submits waited for them."""
        for upload in list(self._ahead):
            if not (wait or upload.done()):
                continue
            upload.wait()
            self._ahead.remove(upload)
            begin, end = upload.interval() or (0, 0)
            self.counters.stall_ns += end - begin

    def _arrived(self, keys: Keys, n_bytes: int) -> None:
        self.locations.arrive(keys)
        self.counters.copied_bytes += n_bytes
        self.counters.n_copies += len(keys)

    def _give_up(self, keys: Keys, error: Exception) -> None:
        """Take back copies that failed; warns once."""
        if not self.counters.n_failed:
            log.warning("%s: %s", self.failure, str(error))  # the error holds on to memory
        self.counters.n_failed += len(keys)
        self.errors.update((key, error) for key in keys.tolist())
        self._release(keys)

    def _take_back(self, keys: Keys) -> None:
        if keys.size:
            self.counters.n_cancelled += len(keys)
            self._release(keys)

    def _release(self, keys: Keys) -> None:
        slots, oldest = self.locations.slots_of(keys), self.table.oldest_read
        self.locations.leave(keys)
        # A submit may still read the victim of an expert that waited.
        self.slots.poison(slots[self.slots.are_writable(slots, oldest)])


class HostPool:
    """Runs a host pool smaller than the model: experts come into it from the file when needed.

    Those that are present on the device are not waited for here.
    """

    def __init__(
        self,
        residency: PoolResidency,
        slots: SlotManager,
        reads: Uploader,
        table: ExpertTable,
        span_bytes: Sequence[int],
        device: Locations,
        will_read: Callable[[int], object],
    ) -> None:
        """Begin empty; `device` says which experts are in its slots, `will_read` has the system
        begin to fetch one from the file."""
        self.residency, self.space = residency, residency.space
        self.locations, self._device = residency.locations, device
        self._will_read = will_read
        self._overlap = Overlap()  # by the host's clock, which times reads
        self.tier = Tier(
            table,
            residency.locations,
            slots,
            reads,
            source=lambda key: key,
            span_bytes=span_bytes,
            max_copy_bytes=MAX_READ_BYTES,
            failure="reading experts from the model file failed",
            overlap=self._overlap,
        )
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
    def is_whole(self) -> bool:
        """Return whether every expert is in a slot or here."""
        return bool((self._device.present | self.locations.present).all())

    @property
    def has_room_for_all(self) -> bool:
        """Return whether what is neither in a slot nor here can come, and nothing else must leave
        but experts that have slots."""
        here, in_slots = self.locations, self._device
        n_absent, n_twice = (
            np.bincount(here.pool_of[mask], minlength=len(here.pools))
            for mask in (~(here.resident | in_slots.resident), here.present & in_slots.resident)
        )
        return bool((n_absent <= n_twice + here.n_free_of_all).all())

    def place(self, key: int) -> Placement:
        """Return the memory of an expert's host slot. Must hold: it has one."""
        return self.tier.slot(key).memory

    def computed(self, host: Interval) -> None:
        """Note that computing went on from `host`'s begin to its end, by the clock of reads."""
        self._overlap.computed([host], host)

    def fill(self, read: Callable[[Sequence[Copy]], object], keeps: bool = False) -> None:
        """Let `read` read experts until the pool is full. Raises what it raises.

        Those that came through the pool into slots make room; with `keeps` for all others and for
        no more. To be called before the first submit.
        """
        in_slots = self._device.present
        twice = np.flatnonzero(self.locations.present & in_slots)
        self.locations.leave(self.residency.crowding(in_slots) if keeps else twice)
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
        room = len(keys) - int(np.count_nonzero(self.locations.arriving))
        elsewhere = keys[~(self.locations.are_resident(keys) | self._device.are_present(keys))]
        coming = elsewhere.tolist()[: max(0, room)]
        if coming:
            moves = self._bring(coming, kept, urgent=False)
            self._n_hinted += len(moves)
            self._guessed.update(move.key for move in moves)

    def read_absent(self) -> None:
        """Read what is neither in a slot nor here, as far as there is room; see `has_room_for_all`.

        Raises DeviceLostError. Must hold: no submit is in flight, and nothing is read.
        """
        in_slots = self._device.present
        absent = np.flatnonzero(~(in_slots | self.locations.present)).tolist()
        for first in range(0, len(absent), MAX_PENDING):
            kept = self.locations.present & ~in_slots
            self._bring(absent[first : first + MAX_PENDING], kept, urgent=True)
            self.tier.collect(wait=True)

    def end_reads(self) -> None:
        """Wait for the reads under way, and take back those that wait. Raises DeviceLostError."""
        self.tier.collect(wait=True)
        self.tier.cancel(np.zeros(self.space.n_keys, np.bool_))

    def can_free(self, numbers: Keys) -> bool:
        """Return whether a layer has as many host slots as it needs without these."""
        at_once = min(self.residency.n_at_once, self.space.n_experts)
        return self.locations.can_retire(numbers) and self.locations.n_left(numbers) >= at_once

    def clear(self, numbers: Keys, publish: Callable[[], object]) -> bool:
        """Put these host slots out of use; return whether that could be. See `Tier.vacate`."""
        leaving = self.residency.leaving_for(numbers, self._device.present)
        if not self.tier.vacate(numbers, leaving, publish):
            return False
        self.locations.retire(numbers)
        publish()
        return True

    # ----- inside -----

    def _bring(self, keys: list[int], kept: Mask, urgent: bool) -> list[Move]:
        moves = self.residency.bring(keys, kept, self._device.present)
        if self.residency.reasons is not None:
            self.residency.reasons.entered(moves, "missed" if urgent else "guessed")
        for move in moves if urgent else ():  # the disk has all of them at once
            self._will_read(move.key)
        self.tier.bring(moves, urgent=urgent)
        return moves

    def _fetch(self, absent: Keys, kept: Mask) -> tuple[Keys, Exception | None]:
        """Make one attempt; returns which are still absent, and why one could not be read."""
        tier, needed = self.tier, set(absent.tolist())
        # What is only guessed at waits; those needed come anew.
        tier.cancel(np.zeros(self.space.n_keys, np.bool_))
        for key in needed:
            tier.errors.pop(key, None)
        todo = absent[~self.locations.are_resident(absent)].tolist()
        moves = self._bring(todo, kept, urgent=True)
        tier.collect(needed=needed)
        if len(moves) < len(todo):
            tier.collect(wait=True)  # those on their way can leave once they are here
        still = absent[~self.locations.are_present(absent)]
        errors = (tier.errors[key] for key in still.tolist() if key in tier.errors)
        return still, next(errors, None)

    def _crowded(self, absent: Keys) -> OutOfMemoryError:
        layer = self.space.layer(absent.item(0))
        what = f"{len(absent)} experts of MoE layer {layer} found no place in the host pool"
        return OutOfMemoryError(what, "give a larger --host-pool")

    def _unreadable(self, error: Exception) -> VkmoeError:
        if isinstance(error, VkmoeError):
            return error
        failure = GpuError(
            f"an expert could not be read from the model file: {error}",
            "see whether the file is still there and whole",
        )
        failure.__cause__ = error
        return failure
