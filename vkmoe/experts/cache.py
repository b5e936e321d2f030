"""The expert cache at work: the only one that knows policy, slots, table and copies together.

A token is bracketed by `begin_token` and `end_token`. Between two tokens, experts that were missed
are copied into slots and the table is changed; while a submit reads a version of the table, nothing
that version leads to is written.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from contextlib import suppress
from operator import mul
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vkmoe.errors import DeviceLostError, GpuError
from vkmoe.experts.counters import CacheCounters
from vkmoe.experts.moves import FREE, Move
from vkmoe.experts.residency import Residency
from vkmoe.experts.slots import Slot, SlotManager
from vkmoe.experts.table import ExpertTable
from vkmoe.experts.uploads import Upload, Uploader
from vkmoe.gpu.arena import Placement

__all__ = ["ExpertCache"]

log = logging.getLogger("vkmoe")
# Of one submit of copies: far below what drivers' watchdogs allow, on the slowest links too.
MAX_SUBMIT_BYTES = 256 << 20
MAX_PENDING = 8  # submits; the extension keeps at most 64 recordings for uploads


class ExpertMemory(NamedTuple):
    """Where experts can be. `homes` [n_layers][n_experts] hold all of them; `table` leads there."""

    table: ExpertTable
    slots: SlotManager
    homes: Sequence[Sequence[Placement]]
    span_bytes: Sequence[int]  # of an expert [n_layers]


Taken: TypeAlias = tuple[Move, Slot]  # a move, and the slot that its expert has taken


class _Pending(NamedTuple):
    """Copies under way and whose they are."""

    taken: list[Taken]
    n_bytes: int
    upload: Upload


class ExpertCache:
    """Keeps the experts that are worth it in device slots; the others are read at home.

    With `wait` (the plain way) the next token finds everything in place that was decided to move;
    without, copies are collected when they are done. Owns none of its parts.
    """

    def __init__(
        self, residency: Residency, memory: ExpertMemory, uploads: Uploader, wait: bool = True
    ) -> None:
        self.residency, self._space = residency, residency.space
        self._table, self._slots = memory.table, memory.slots
        self._homes = [home for row in memory.homes for home in row]  # by number
        self._addresses = array("Q", [home.address for home in self._homes])
        self._span_bytes = list(memory.span_bytes)
        self._n_experts = residency.space.n_experts
        self._n_per_submit = max(1, MAX_SUBMIT_BYTES // max(memory.span_bytes))
        self._layer_bytes = sum(memory.span_bytes)
        self._uploads, self._wait = uploads, wait
        self._blocked: list[Taken] = []  # their slots are still read by a submit in flight
        self._pending: list[_Pending] = []
        self._n_uploads = self._upload_bytes = self._n_evictions = self._missed_bytes = 0
        self._n_failed = 0
        self._torn = False
        self._begin(residency.start())

    @property
    def counters(self) -> CacheCounters:
        """What was done since the start."""
        return CacheCounters(
            self._n_uploads,
            self._upload_bytes,
            self._n_evictions,
            self._missed_bytes,
            self._table.n_writes - 1,  # the first made the table
            self._n_failed,
        )

    def begin_token(self) -> int:
        """Publish what has arrived, for the next submit. Returns the number to end it with.

        Raises DeviceLostError. A copy that fails otherwise leaves its expert at home.
        """
        if self._torn:
            self._reset()
        self._torn = True
        self._start_blocked()
        self._torn = False
        self._collect(self._wait)
        self._table.publish()
        return self._table.begin()

    def end_token(self, reader: int, routing: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """That submit is over; it used `routing` [n_layers, n_used].

        Decides what moves and begins to copy. Returns which uses were served from slots.
        """
        self._table.end(reader)
        hits = self.residency.hits(routing)
        n_hits = hits.sum(axis=1).tolist()
        used_bytes = routing.shape[1] * self._layer_bytes
        self._missed_bytes += used_bytes - sum(map(mul, n_hits, self._span_bytes))
        outer, self._torn = self._torn, True
        self._begin(self.residency.use(routing))
        self._torn = outer
        return hits

    def settle(self) -> None:
        """Wait for the copies under way, so that the counters tell of them.

        Raises DeviceLostError.
        """
        if not self._torn:  # torn by Ctrl-C: the next token begins anew
            self._collect(wait=True)

    def check_integrity(self) -> None:
        """Raises AssertionError unless policies, slots and table agree (tests)."""
        self.residency.check_integrity()
        self._slots.check_integrity()
        published = set(np.flatnonzero(self.residency.published).tolist())
        taken = [*self._blocked, *(one for pending in self._pending for one in pending.taken)]
        moving = {move.key for move, _ in taken}
        assert self._slots.keys == published | moving, "slots and policies differ"
        assert not published & moving, "published before it arrived"
        for number in range(self._space.n_keys):
            place = self._slots.of(number).place if number in published else self._homes[number]
            key = self._space.key(number)
            assert int(self._table.entries[key]) == place.address, key

    # ----- inside -----

    def _reset(self) -> None:
        """Send all experts home, after a change that was torn in two."""
        while self._pending:
            with suppress(GpuError):
                self._pending[-1].upload.wait()
            self._pending.pop()
        self._blocked.clear()
        self.residency.reset()
        self._slots.reset(self._table.version)
        self._table.set_all(range(len(self._homes)), self._addresses)
        self._table.publish()
        self._slots.poison(self._slots.all)
        self._torn = False

    def _begin(self, moves: list[Move]) -> None:
        """Take the victims out of the table, give their slots away, and begin to copy."""
        if moves:
            self._take_slots(moves)
        self._start_blocked()

    def _take_slots(self, moves: list[Move]) -> None:
        slots, version = self._slots, self._table.version
        taken = [
            slots.take(pool, key) if victim == FREE else slots.exchange(victim, key, version)
            for pool, key, victim, _ in moves
        ]
        self._blocked += zip(moves, taken, strict=True)
        victims = [move.victim for move in moves if move.victim != FREE]
        self._table.set_all(victims, [self._addresses[key] for key in victims])
        self._n_evictions += len(victims)

    def _start_blocked(self) -> None:
        """Begin the copies into slots that no submit reads any more."""
        if not self._blocked:
            return
        oldest, blocked = self._table.oldest_read, self._blocked
        able = [one for one in blocked if one[1].writable(oldest)]
        self._blocked = [one for one in blocked if not one[1].writable(oldest)]
        for start in range(0, len(able), self._n_per_submit):
            self._submit(able[start : start + self._n_per_submit])
            if self._wait and len(self._pending) >= MAX_PENDING:
                self._collect(wait=True)

    def _submit(self, taken: list[Taken]) -> None:
        homes, span_bytes, n = self._homes, self._span_bytes, self._n_experts
        copies = [(homes[move.key], slot.place, span_bytes[move.key // n]) for move, slot in taken]
        n_bytes = sum([n_bytes for _, _, n_bytes in copies])
        try:
            self._slots.poison(slot for _, slot in taken)
            self._pending.append(_Pending(taken, n_bytes, self._uploads.start(copies)))
        except DeviceLostError:
            raise
        except GpuError as error:
            self._give_up(taken, error)

    def _collect(self, wait: bool) -> None:
        """Map what has arrived, or with `wait` all that is under way."""
        for pending in list(self._pending):
            if not wait and not pending.upload.done():
                continue
            failure = None
            try:
                pending.upload.wait()  # Ctrl-C here leaves everything as it was
            except DeviceLostError:
                raise
            except GpuError as error:
                failure = error
            outer, self._torn = self._torn, True
            self._pending.remove(pending)
            if failure is None:
                self._map(pending)
            else:
                self._give_up(pending.taken, failure)
            self._torn = outer

    def _map(self, arrived: _Pending) -> None:
        moves = [move for move, _ in arrived.taken]
        addresses = [slot.place.address for _, slot in arrived.taken]
        self._table.set_all([move.key for move in moves], addresses)
        self._upload_bytes += arrived.n_bytes
        self._n_uploads += len(moves)
        self.residency.landed(moves)

    def _give_up(self, taken: list[Taken], error: GpuError) -> None:
        """Leave experts at home whose copies failed; tells of it once."""
        if not self._n_failed:
            log.warning("copying experts to the GPU failed, they are read in place: %s", error)
        self._n_failed += len(taken)
        for move, _ in taken:
            self._slots.release(move.key)
        self._slots.poison(slot for _, slot in taken)
        self.residency.failed([move for move, _ in taken])
