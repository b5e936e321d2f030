"""The expert cache at work: the only one that knows policy, slots, table and copies together.

A token is bracketed by `begin_token` and `end_token`. Between two tokens, experts that were missed
are copied into slots and the table is changed; while a submit reads a version of the table, nothing
that version leads to is written.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import mul
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.errors import DeviceLostError, GpuError
from vkmoe.experts.counters import CacheCounters
from vkmoe.experts.pools import FREE, Move
from vkmoe.experts.residency import Residency
from vkmoe.experts.slots import SlotManager
from vkmoe.experts.table import ExpertTable
from vkmoe.experts.uploads import Copy, Upload, Uploader
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


class _Pending(NamedTuple):
    """Copies under way and the moves they belong to."""

    moves: list[Move]
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
        self._span_bytes = list(memory.span_bytes)
        self._n_experts = residency.space.n_experts
        self._uploads, self._wait = uploads, wait
        self._blocked: list[Move] = []  # their slots are still read by a submit in flight
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
        with self._changing():
            self._start_blocked()
        self._collect(self._wait)
        self._table.publish()
        return self._table.begin()

    def end_token(self, reader: int, routing: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """That submit is over; it used `routing` [n_layers, n_used].

        Decides what moves and begins to copy. Returns which uses were served from slots.
        """
        self._table.end(reader)
        hits = self.residency.hits(routing)
        if not hits.all():
            n_misses = (~hits).sum(axis=1).tolist()
            self._missed_bytes += sum(map(mul, n_misses, self._span_bytes))
        with self._changing():
            self._begin(self.residency.use(routing))
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
        moving = {move.key for pending in self._pending for move in pending.moves}
        moving |= {move.key for move in self._blocked}
        assert self._slots.keys == published | moving, "slots and policies differ"
        assert not published & moving, "published before it arrived"
        for number in range(self._space.n_keys):
            place = self._slots.of(number).place if number in published else self._homes[number]
            key = self._space.key(number)
            assert int(self._table.entries[key]) == place.address, key

    # ----- inside -----

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """What is done inside must be done wholly; Ctrl-C in the middle means to begin anew."""
        outer, self._torn = self._torn, True
        yield
        self._torn = outer

    def _reset(self) -> None:
        """Send all experts home, after a change that was torn in two."""
        while self._pending:
            with suppress(GpuError):
                self._pending[-1].upload.wait()
            self._pending.pop()
        self._blocked.clear()
        self.residency.reset()
        self._slots.reset(self._table.version)
        for number, home in enumerate(self._homes):
            self._table.set(*self._space.key(number), home.address)
        self._table.publish()
        self._slots.poison(self._slots.all)
        self._torn = False

    def _begin(self, moves: list[Move]) -> None:
        """Take the victims out of the table, give their slots away, and begin to copy."""
        for move in moves:
            if move.victim != FREE:
                self._unmap(move.victim)
                self._n_evictions += 1
            self._slots.take(move.pool, move.key)
        self._blocked += moves
        self._start_blocked()

    def _unmap(self, key: int) -> None:
        self._slots.release(key, self._table.version)
        self._table.set(*divmod(key, self._n_experts), self._homes[key].address)

    def _start_blocked(self) -> None:
        """Begin the copies into slots that no submit reads any more."""
        if not self._blocked:
            return
        oldest = self._table.oldest_read
        able: list[Move] = []
        still: list[Move] = []
        for move in self._blocked:
            free = self._slots.of(move.key).writable(oldest)
            (able if free else still).append(move)
        self._blocked = still
        if able:
            self._copy(able)

    def _copy(self, moves: list[Move]) -> None:
        """In submits of a bounded size: a profile may fill all slots at once."""
        while moves:
            n_bytes, n_moves = 0, 0
            while n_moves < len(moves) and (n_bytes < MAX_SUBMIT_BYTES or not n_moves):
                n_bytes += self._span_bytes[moves[n_moves].key // self._n_experts]
                n_moves += 1
            self._submit(moves[:n_moves])
            moves = moves[n_moves:]
            if self._wait and len(self._pending) >= MAX_PENDING:
                self._collect(wait=True)

    def _submit(self, moves: list[Move]) -> None:
        slots = [self._slots.of(move.key) for move in moves]
        copies = [
            Copy(self._homes[slot.key], slot.place, self._span_bytes[slot.key // self._n_experts])
            for slot in slots
        ]
        try:
            self._slots.poison(slots)
            self._pending.append(_Pending(moves, self._uploads.start(copies)))
        except DeviceLostError:
            raise
        except GpuError as error:
            self._give_up(moves, error)

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
            with self._changing():
                self._pending.remove(pending)
                if failure is None:
                    self._map(pending.moves)
                else:
                    self._give_up(pending.moves, failure)

    def _map(self, moves: list[Move]) -> None:
        for move in moves:
            layer, expert = divmod(move.key, self._n_experts)
            self._table.set(layer, expert, self._slots.of(move.key).place.address)
            self._upload_bytes += self._span_bytes[layer]
        self._n_uploads += len(moves)
        self.residency.landed(moves)

    def _give_up(self, moves: list[Move], error: GpuError) -> None:
        """Leave experts at home whose copies failed; tells of it once."""
        if not self._n_failed:
            log.warning("copying experts to the GPU failed, they are read in place: %s", error)
        self._n_failed += len(moves)
        slots = [self._slots.of(move.key) for move in moves]
        for move in moves:
            self._slots.release(move.key, None)
        self._slots.poison(slots)
        self.residency.failed(moves)
