"""Brings experts into memory of one kind, and follows what is under way there.

There is one tier for device slots, filled from host memory, and where the host pool is smaller than
the model one for the pool, filled from the file. It carries out what was decided, in the record of
where experts are (decide/locations.py), and leaves the copying itself to an uploader.

The record says before a copy begins that something may write its slot. So copies that Ctrl-C made
the tier lose sight of are found by the record alone: `recover` lets go of their experts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.errors import DeviceLostError, GpuError
from vkmoe.experts.decide.keys import Mask
from vkmoe.experts.decide.locations import FREE, Locations, Move
from vkmoe.experts.records.profiler import Overlap
from vkmoe.experts.store.copies import (
    Copy,
    DrainedUploader,
    JobCancelledError,
    QueueFullError,
    Upload,
)
from vkmoe.experts.store.slots import Slot, SlotManager
from vkmoe.experts.store.table import ExpertTable

__all__ = ["Tier", "TierCounters", "TierSpec"]

log = logging.getLogger("vkmoe")
MAX_PENDING = 8  # submits; the extension keeps at most 64 recordings for uploads


class TierSpec(NamedTuple):
    """Lists what a tier works with."""

    locations: Locations
    slots: SlotManager
    uploads: DrainedUploader
    source: Callable[[int], Any]  # where the bytes of a key come from, as `uploads` takes it
    readable: Locations | None  # only experts that are present there can be copied; None: all
    span_bytes: Sequence[int]  # of an expert [n_layers]
    max_copy_bytes: int  # of one upload
    failure: str  # what is logged, once, when an upload fails
    overlap: Overlap | None = None  # notes when bytes moved


class TierCounters:
    """Counts totals since the start; sizes in bytes, times in nanoseconds."""

    def __init__(self) -> None:
        self.n_copies = self.copied_bytes = self.n_evictions = 0
        self.n_failed = self.n_cancelled = self.stall_ns = 0


class _Pending(NamedTuple):
    """Joins copies under way with the experts they are for."""

    keys: list[int]
    n_bytes: int
    upload: Upload
    began_ns: int


class Tier:
    """Brings experts into the slots they were given; none is written while a submit can read it."""

    def __init__(self, spec: TierSpec, table: ExpertTable) -> None:
        self.locations, self.slots, self.overlap = spec.locations, spec.slots, spec.overlap
        self._uploads, self._source, self._readable = spec.uploads, spec.source, spec.readable
        self._failure, self._table = spec.failure, table
        self._span_bytes = np.array(spec.span_bytes, np.int64)
        self._sizes: list[int] = self._span_bytes.tolist()
        self._n_experts = spec.locations.space.n_experts
        self._n_per_upload = max(1, spec.max_copy_bytes // max(spec.span_bytes))
        self._addresses = spec.slots.addresses
        self._pending: list[_Pending] = []
        self.counters = TierCounters()
        self.errors: dict[int, Exception] = {}  # why a key's last copy failed

    @property
    def moving(self) -> set[int]:
        """Return the keys that have a slot and are not there yet."""
        return set(np.flatnonzero(self.locations.arriving).tolist())

    @property
    def pending_bytes(self) -> int:
        """Return the bytes of copies under way, and of those that wait."""
        if not self.locations.any_arriving:
            return 0
        layers = np.flatnonzero(self.locations.arriving) // self._n_experts
        return int(self._span_bytes[layers].sum())

    @property
    def is_copying(self) -> bool:
        """Return whether copies have begun whose end was not collected."""
        return bool(self._pending)

    def slot(self, key: int) -> Slot:
        """Return the slot that an expert has. Must hold: it has one."""
        return self.slots.all[self.locations.slot_of(key)]

    def addresses(self, keys: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return the addresses of the slots that experts have. Must hold: all have one."""
        return self._addresses[self.locations.slots_of(keys)]

    def bring(self, moves: Sequence[Move], wait: bool = False, urgent: bool = False) -> None:
        """Carry out moves: begin to copy them, behind those that waited already.

        With `wait`, not more copies are begun at a time than can be waited for later.
        """
        self._note_evictions(moves)
        self.start_waiting(wait, urgent, [move.key for move in moves])

    def fill(self, moves: Sequence[Move], read: Callable[[Sequence[Copy]], object]) -> None:
        """Bring these all at once, before the first submit, by `read`. Raises what it raises."""
        self._note_evictions(moves)
        keys = [move.key for move in moves]
        copies = self._copies(keys)
        self.locations.begin_copy(keys)
        read(copies)
        self._arrived(keys, sum([n_bytes for _, _, n_bytes in copies]))

    def started(self) -> None:
        """Begin with tokens: what was waited for until now does not count."""
        self.counters.stall_ns = 0
        if self.overlap is not None:
            self.overlap.begin_anew()

    def start_waiting(
        self, wait: bool = False, urgent: bool = False, last: Sequence[int] = ()
    ) -> None:
        """Begin the copies that wait, into slots that no submit reads any more.

        Those of the keys `last` begin last, in their order.
        """
        waiting = self._waiting(last)
        if not waiting:
            return
        oldest = self._table.oldest_read
        slots = zip(waiting, self._slots(waiting), strict=True)
        able = [key for key, slot in slots if slot.writable(oldest)]
        for start in range(0, len(able), self._n_per_upload):
            self._start(able[start : start + self._n_per_upload], urgent)
            if wait and len(self._pending) >= MAX_PENDING:
                self.collect(wait=True)

    def collect(self, wait: bool = False, needed: Collection[int] = ()) -> None:
        """Note which copies have arrived; waits for those of `needed` keys, or for all.

        Raises DeviceLostError. A key that fails to arrive otherwise loses its slot again.
        """
        for pending in list(self._pending):
            waits = wait or (bool(needed) and any(key in needed for key in pending.keys))
            if waits or pending.upload.done():
                self._finish(pending)

    def cancel(self, wanted: Mask) -> None:
        """Take back the copies that have not begun and are for no `wanted` [n_keys] expert."""
        for pending in list(self._pending):
            if not wanted[pending.keys].any() and pending.upload.cancel():
                self._pending.remove(pending)
                self._take_back(pending.keys)
        waiting = self.locations.waiting()
        self._take_back(waiting[~wanted[waiting]].tolist())

    def recover(self) -> None:
        """Let go of the experts whose copies nothing follows any more: Ctrl-C came between.

        Nothing is written afterwards by a copy that is not followed. To be called before each
        token. Raises GpuError where a copy does not end.
        """
        if sum([len(pending.keys) for pending in self._pending]) == self.locations.n_copying:
            return
        if not self._uploads.drain():
            raise GpuError("a copy of experts does not end", "its disk or its GPU may hang")
        self._pending.clear()
        self._release(self.locations.copying().tolist())

    # ----- inside -----

    def _note_evictions(self, moves: Sequence[Move]) -> None:
        newcomers = [move.key for move in moves if move.victim != FREE]
        if newcomers:
            self.slots.unmap(self._slots(newcomers), self._table.version)
            self.counters.n_evictions += len(newcomers)

    def _slots(self, keys: Sequence[int]) -> list[Slot]:
        """Return the slots that experts have. Must hold: all have one."""
        return self.slots.at(self.locations.slots_of(np.array(keys, np.int64)))

    def _waiting(self, last: Sequence[int]) -> list[int]:
        """Return the experts whose copies can begin, those of `last` last and in that order."""
        waiting = self.locations.waiting()
        if self._readable is not None:
            waiting = waiting[self._readable.are_present(waiting)]
        elif len(waiting) == len(last):
            return [*last]  # as nearly always: no others wait
        found: list[int] = waiting.tolist()
        turn = {key: i for i, key in enumerate(last, 1)}
        return sorted(found, key=lambda key: turn.get(key, 0)) if turn else found

    def _copies(self, keys: Sequence[int]) -> list[Copy]:
        source, sizes, n = self._source, self._sizes, self._n_experts
        slots = zip(keys, self._slots(keys), strict=True)
        return [(source(key), slot.memory, sizes[key // n]) for key, slot in slots]

    def _start(self, keys: list[int], urgent: bool) -> None:
        copies = self._copies(keys)
        n_bytes = sum([n_bytes for _, _, n_bytes in copies])
        try:
            self.slots.poison(map(self.slot, keys))
            began = perf_counter_ns()
            self.locations.begin_copy(keys)
            upload = self._uploads.start(copies, urgent)
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
            pending.upload.wait()  # Ctrl-C here leaves everything as it was
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
        elif isinstance(failure, JobCancelledError):  # Ctrl-C came before that was noted
            self._take_back(pending.keys)
        else:
            self._give_up(pending.keys, failure)

    def _arrived(self, keys: Sequence[int], n_bytes: int) -> None:
        self.locations.arrive(keys)
        self.counters.copied_bytes += n_bytes
        self.counters.n_copies += len(keys)

    def _give_up(self, keys: Sequence[int], error: Exception) -> None:
        """Take back copies that failed; warns once."""
        if not self.counters.n_failed:
            log.warning("%s: %s", self._failure, str(error))  # the error holds on to memory
        self.counters.n_failed += len(keys)
        self.errors.update((key, error) for key in keys)
        self._release(keys)

    def _take_back(self, keys: Sequence[int]) -> None:
        if keys:
            self.counters.n_cancelled += len(keys)
            self._release(keys)

    def _release(self, keys: Sequence[int]) -> None:
        slots, oldest = self._slots(keys), self._table.oldest_read
        self.locations.leave(keys)
        # A submit may still read the victim of an expert that waited.
        self.slots.poison(slot for slot in slots if slot.writable(oldest))
