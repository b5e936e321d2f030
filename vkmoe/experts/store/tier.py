"""Memory of one kind that experts are brought into: which keys hold slots, and what is under way.

There is one tier for device slots, filled from host memory, and where the host pool is smaller than
the model one for the pool, filled from the file. Does not decide which experts come and go, and
leaves the copying itself to an uploader.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol, TypeAlias

from vkmoe.errors import DeviceLostError, GpuError
from vkmoe.experts.decide.residents import FREE, Move
from vkmoe.experts.records.overlap import Overlap
from vkmoe.experts.store.copies import Copy, DrainedUploader, QueueFullError, Upload
from vkmoe.experts.store.slots import Slot, SlotManager
from vkmoe.experts.store.table import ExpertTable

__all__ = ["Decider", "Tier", "TierCounters", "TierSpec"]

log = logging.getLogger("vkmoe")
MAX_PENDING = 8  # submits; the extension keeps at most 64 recordings for uploads
Taken: TypeAlias = tuple[Move, Slot]  # a move, and the slot that its expert has taken


class Decider(Protocol):
    """Decided the moves, and learns what became of them."""

    def landed(self, moves: Sequence[Move]) -> None: ...

    def failed(self, moves: Sequence[Move]) -> None: ...


class TierSpec(NamedTuple):
    """Lists what a tier works with."""

    slots: SlotManager
    uploads: DrainedUploader
    assign: Callable[[Sequence[int], Sequence[int]], None]  # notes addresses of keys; 0: none
    source: Callable[[int], Any]  # where the bytes of a key come from, as `uploads` takes it
    span_bytes: Sequence[int]  # of an expert [n_layers]
    n_experts: int
    max_copy_bytes: int  # of one upload
    failure: str  # what is logged, once, when an upload fails
    overlap: Overlap | None = None  # notes when bytes moved


class TierCounters:
    """Counts totals since the start; sizes in bytes, times in nanoseconds."""

    def __init__(self) -> None:
        self.n_copies = self.copied_bytes = self.n_evictions = 0
        self.n_failed = self.n_cancelled = self.stall_ns = 0


class _Pending(NamedTuple):
    """Joins copies under way with the moves they belong to."""

    taken: list[Taken]
    n_bytes: int
    upload: Upload
    began_ns: int


class Tier:
    """Exchanges the holders of slots; no slot is written while a submit can read it.

    While a change is half done it is `torn`: then only `reset` helps.
    """

    def __init__(self, spec: TierSpec, decider: Decider, epochs: ExpertTable) -> None:
        self.slots, self._uploads = spec.slots, spec.uploads
        self._assign, self._source, self._failure = spec.assign, spec.source, spec.failure
        self._span_bytes, self._n_experts = list(spec.span_bytes), spec.n_experts
        self._n_per_upload = max(1, spec.max_copy_bytes // max(spec.span_bytes))
        self._decider, self._epochs, self._overlap = decider, epochs, spec.overlap
        self._blocked: list[Taken] = []  # a submit still reads their slots, or the queue is full
        self._pending: list[_Pending] = []
        self.counters = TierCounters()
        self.errors: dict[int, Exception] = {}  # why a key's last copy failed
        self.torn = False

    @property
    def moving(self) -> set[int]:
        """Return the keys that have a slot and are not there yet."""
        blocked = {move.key for move, _ in self._blocked}
        return blocked | {move.key for one in self._pending for move, _ in one.taken}

    @property
    def pending_bytes(self) -> int:
        """Return the bytes of copies under way, and of those that wait."""
        sizes, n = self._span_bytes, self._n_experts
        blocked = [sizes[move.key // n] for move, _ in self._blocked]
        return sum(blocked) + sum([pending.n_bytes for pending in self._pending])

    @property
    def is_copying(self) -> bool:
        """Return whether copies have begun whose end was not collected."""
        return bool(self._pending)

    def bring(self, moves: Sequence[Move], wait: bool = False, urgent: bool = False) -> None:
        """Let these experts have the slots of their victims, and begin to copy.

        With `wait`, not more copies are begun at a time than can be waited for later.
        """
        if moves:
            outer, self.torn = self.torn, True
            self._take_slots(moves)
            self.torn = outer
        self.start_blocked(wait, urgent)

    def fill(self, moves: Sequence[Move], read: Callable[[Sequence[Copy]], object]) -> None:
        """Bring these all at once, before the first submit, by `read`. Raises what it raises."""
        self._take_slots(moves)
        taken, self._blocked = self._blocked, []
        copies = self._copies(taken)
        read(copies)
        self._arrived(taken, sum([n_bytes for _, _, n_bytes in copies]))

    def started(self) -> None:
        """Begin with tokens: what was waited for until now does not count."""
        self.counters.stall_ns = 0
        if self._overlap is not None:
            self._overlap.begin_anew()

    def drop(self, keys: Sequence[int]) -> None:
        """Free the slots of these keys. Must hold: no submit was ever led there."""
        self._assign(keys, [0] * len(keys))
        for key in keys:
            self.slots.release(key)

    def start_blocked(self, wait: bool = False, urgent: bool = False) -> None:
        """Begin the copies into slots that no submit reads any more."""
        if not self._blocked:
            return
        outer, self.torn = self.torn, True
        oldest, blocked = self._epochs.oldest_read, self._blocked
        able: list[Taken] = []
        self._blocked = []
        for one in blocked:
            (able if one[1].writable(oldest) else self._blocked).append(one)
        for start in range(0, len(able), self._n_per_upload):
            self._start(able[start : start + self._n_per_upload], urgent)
            if wait and len(self._pending) >= MAX_PENDING:
                self.collect(wait=True)
        self.torn = outer

    def collect(self, wait: bool = False, needed: Collection[int] = ()) -> None:
        """Give addresses to those that have arrived; waits for `needed` keys, or for all.

        Raises DeviceLostError. A key that fails to arrive otherwise loses its slot again.
        """
        for pending in list(self._pending):
            waits = wait or (bool(needed) and any(move.key in needed for move, _ in pending.taken))
            if waits or pending.upload.done():
                self._finish(pending)

    def cancel(self, wanted: Callable[[int], bool]) -> None:
        """Take back the copies that have not begun and hold no key that is `wanted`."""
        for pending in list(self._pending):
            if any(wanted(move.key) for move, _ in pending.taken):
                continue
            outer, self.torn = self.torn, True
            if pending.upload.cancel():
                self._pending.remove(pending)
                self._take_back(pending.taken)
            self.torn = outer
        stale = [one for one in self._blocked if not wanted(one[0].key)]
        if stale:
            outer, self.torn = self.torn, True
            self._blocked = [one for one in self._blocked if wanted(one[0].key)]
            self._take_back(stale)
            self.torn = outer

    def reset(self) -> None:
        """Free all slots, after a change torn in two; copies under way are waited for.

        Raises GpuError where one does not end.
        """
        if not self._uploads.drain():
            raise GpuError("a copy of experts does not end", "its disk or its GPU may hang")
        self._pending.clear()
        self._blocked.clear()
        self.errors.clear()
        self.slots.reset(self._epochs.version)
        self.slots.poison(self.slots.all)
        self.torn = False

    # ----- inside -----

    def _take_slots(self, moves: Sequence[Move]) -> None:
        slots, version = self.slots, self._epochs.version
        taken = [
            slots.take(move.pool, move.key)
            if move.victim == FREE
            else slots.exchange(move.victim, move.key, version)
            for move in moves
        ]
        self._blocked += zip(moves, taken, strict=True)
        victims = [move.victim for move in moves if move.victim != FREE]
        self._assign(victims, [0] * len(victims))
        self.counters.n_evictions += len(victims)

    def _copies(self, taken: Sequence[Taken]) -> list[Copy]:
        source, span_bytes, n = self._source, self._span_bytes, self._n_experts
        return [(source(move.key), slot.place, span_bytes[move.key // n]) for move, slot in taken]

    def _start(self, taken: list[Taken], urgent: bool) -> None:
        copies = self._copies(taken)
        n_bytes = sum([n_bytes for _, _, n_bytes in copies])
        try:
            self.slots.poison(slot for _, slot in taken)
            began = perf_counter_ns()
            upload = self._uploads.start(copies, urgent)
            self._pending.append(_Pending(taken, n_bytes, upload, began))
        except DeviceLostError:
            raise
        except QueueFullError:
            self._blocked += taken
        except Exception as error:
            self._give_up(taken, error)

    def _finish(self, pending: _Pending) -> None:
        failure, counters = None, self.counters
        began = perf_counter_ns()
        try:
            pending.upload.wait()  # Ctrl-C here leaves everything as it was
        except DeviceLostError:
            raise
        except Exception as error:
            failure = error
        outer, self.torn = self.torn, True
        ended = perf_counter_ns()
        counters.stall_ns += ended - began
        self._pending.remove(pending)
        if failure is None:
            self._arrived(pending.taken, pending.n_bytes)
            if self._overlap is not None:
                self._overlap.copied(pending.upload.interval(), (pending.began_ns, ended))
        else:
            self._give_up(pending.taken, failure)
        self.torn = outer

    def _arrived(self, taken: Sequence[Taken], n_bytes: int) -> None:
        moves = [move for move, _ in taken]
        self._assign([move.key for move in moves], [slot.address for _, slot in taken])
        self.counters.copied_bytes += n_bytes
        self.counters.n_copies += len(moves)
        self._decider.landed(moves)

    def _give_up(self, taken: list[Taken], error: Exception) -> None:
        """Take back copies that failed; warns once."""
        if not self.counters.n_failed:
            log.warning("%s: %s", self._failure, str(error))  # the error holds on to memory
        self.counters.n_failed += len(taken)
        self.errors.update((move.key, error) for move, _ in taken)
        self._release(taken)

    def _take_back(self, taken: Sequence[Taken]) -> None:
        self.counters.n_cancelled += len(taken)
        self._release(taken)

    def _release(self, taken: Sequence[Taken]) -> None:
        for move, _ in taken:
            self.slots.release(move.key)
        oldest = self._epochs.oldest_read  # a submit may still read its victim where one is blocked
        self.slots.poison(slot for _, slot in taken if slot.writable(oldest))
        self._decider.failed([move for move, _ in taken])
