"""The expert cache at work: the only one that knows policy, slots, host pool, table and copies.

A submit is bracketed by `begin` and `end`, a token ends with `after_token`; where a token is
several submits with a look at the routing between them, `need` makes a layer's experts available.
While a submit reads a version of the table, nothing that version leads to is written, except
landing places, by that submit alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.decide.residency import Residency
from vkmoe.experts.decide.residents import FREE, Move
from vkmoe.experts.layer_steps import LayerSteps
from vkmoe.experts.parts import CacheWays, ExpertMemory, PoolParts, make_pool, make_tier
from vkmoe.experts.records.profiler import CacheCounters
from vkmoe.experts.store.copies import Copy, DrainedUploader
from vkmoe.experts.store.slots import Landings
from vkmoe.experts.store.table import Directory

__all__ = ["ExpertCache"]

PLAIN = CacheWays()


class ExpertCache:
    """Keeps the experts that are worth it in device slots; the others are read at home.

    Owns none of its parts.
    """

    def __init__(
        self,
        residency: Residency,
        memory: ExpertMemory,
        uploads: DrainedUploader,
        ways: CacheWays = PLAIN,
        pool: PoolParts | None = None,
    ) -> None:
        self.residency, self._space, self._ways = residency, residency.space, ways
        self._memory, self._table = memory, memory.table
        self._homes = [home for row in memory.homes for home in row]  # by number
        self._span_bytes = np.array(memory.span_bytes, np.int64)
        self._first = np.arange(self._space.n_layers, dtype=np.int64)[:, None]
        self._first *= self._space.n_experts
        n_keys = self._space.n_keys
        self._directory = Directory(memory.table, n_keys, ways.marks_homes)
        self._directory.set_homes(range(len(self._homes)), [home.address for home in self._homes])
        self.pool = make_pool(pool, memory, self._directory, residency) if pool else None
        home = self.pool.place if self.pool is not None else self._homes.__getitem__
        self._tier = make_tier(memory, self._directory, residency, uploads, home, ways)
        self._landings = Landings(memory.table, memory.slots, memory.scratch)
        self._lands = self._landings.n_landing > 0
        self._steps = LayerSteps(residency, self._tier, self.pool, ways.budget)
        self._missed_bytes = self._n_landed = 0
        self.last_missed_bytes = 0  # of the last token
        self._torn = False

    @property
    def counters(self) -> CacheCounters:
        """What was done since the start."""
        tier = self._tier.counters
        return CacheCounters(
            n_uploads=tier.n_copies,
            upload_bytes=tier.copied_bytes,
            n_evictions=tier.n_evictions,
            missed_bytes=self._missed_bytes,
            n_table_writes=self._table.n_writes - 1,  # the first made the table
            n_failed_uploads=tier.n_failed,
            n_landed=self._n_landed,
            n_hinted=self._steps.n_hinted,
            n_cancelled=tier.n_cancelled,
            stall_ns=tier.stall_ns,
        )

    def start(self, read: Callable[[Sequence[Copy]], object] | None = None) -> None:
        """Bring those into slots that are to be there for the first token, and fill the pool.

        `read` reads experts (key, place, bytes) from the file. Raises DeviceLostError, and what
        reading raises.
        """
        moves = self.residency.start()
        step = len(moves) if self.pool is None else max(1, self.pool.n_at_once)
        for first in range(0, len(moves), max(1, step)):
            self._bring_at_start(moves[first : first + step])
        if self.pool is not None:
            self.residency.copyable = self.pool.residency.published
            if read is not None:
                self.pool.fill(read)
            self.pool.started()
        self._tier.started()

    def begin(self, first: bool = True) -> int:
        """Publish what has arrived, for the next submit. Returns the number to end it with.

        Submits of a token but its `first` come after a `need`. Raises DeviceLostError. A copy that
        fails otherwise leaves its expert at home.
        """
        if self._is_torn and first:
            self._reset()
        assert not self._is_torn, "a token goes on after it was interrupted"
        if first:
            self._steps.forget()
        self._tier.start_blocked()
        self._tier.collect(self._ways.wait)
        if self.pool is not None:
            self.pool.tier.collect()
        if self._lands:
            self._landings.offer()
        self._steps.begin()
        self._table.publish()
        return self._table.begin()

    def end(self, reader: int) -> None:
        """That submit is over."""
        self._table.end(reader)

    def need(self, layer: int, experts: NDArray[np.uint32]) -> None:
        """The next submit uses these [n_used] of a layer: have them in a slot or in the pool.

        Waits for the file; raises ModelFileError where it cannot be read. What they let expect of
        the next layer is begun.
        """
        assert not self._is_torn, "a token goes on after it was interrupted"
        self._steps.need(layer, experts)

    def after_token(
        self, routing: NDArray[np.uint32], filled: NDArray[np.bool_] | None = None
    ) -> NDArray[np.bool_]:
        """A token is over that used `routing` [n_layers, n_used].

        `filled` [n_layers, n_used] says who was stored where it was to land. Decides what moves and
        begins to copy. Returns which uses were served from slots.
        """
        keys = routing + self._first
        hits = self._steps.hits(keys)
        missed = ~hits
        rank = missed.cumsum(axis=1)  # of a miss among those of its layer, from 1 on
        self.last_missed_bytes = int(rank[:, -1].dot(self._span_bytes))
        self._missed_bytes += self.last_missed_bytes
        outer, self._torn = self._torn, True
        landed: list[int] = []
        if filled is not None and self._lands:
            landed = self._landings.arrived(keys, rank, missed & filled)
        if self._tier.is_copying and not self._ways.wait:
            used = np.zeros(self._space.n_keys, np.bool_)
            used[keys] = True
            self._tier.cancel(used.item)
        budget = self._ways.budget() - self._tier.pending_bytes
        self._begin(self.residency.use(routing, landed, budget_bytes=budget))
        self._torn = outer
        return hits

    def settle(self) -> None:
        """Wait for the copies under way, so that the counters tell of them.

        Raises DeviceLostError.
        """
        if not self._is_torn:  # torn by Ctrl-C: the next token begins anew
            self._tier.collect(wait=True)

    def check_integrity(self) -> None:
        """Raises AssertionError unless policies, slots and table agree (tests)."""
        self.residency.check_integrity()
        slots, tier = self._memory.slots, self._tier
        slots.check_integrity()
        published = set(np.flatnonzero(self._in_slots).tolist())
        assert slots.keys == published | tier.moving, "slots and policies differ"
        assert not published & tier.moving, "published before it arrived"
        if self.pool is not None:
            self.pool.check_integrity()
        for number in range(self._space.n_keys):
            entry = int(self._table.entries[self._space.key(number)])
            assert entry == self._directory.entry(number), number
            if number in published:
                assert entry == slots.of(number).address, number
            else:
                assert self._directory.home(number) == self._home_address(number), number

    # ----- inside -----

    @property
    def _in_slots(self) -> NDArray[np.bool_]:
        """Who is published in a slot [n_keys]."""
        return self.residency.published.reshape(-1)

    @property
    def _is_torn(self) -> bool:
        pool_torn = self.pool is not None and self.pool.tier.torn
        return self._torn or self._tier.torn or pool_torn

    def _home_address(self, key: int) -> int:
        if self.pool is None:
            return self._homes[key].address
        return self.pool.place(key).address if self.pool.residency.published[key] else 0

    def _reset(self) -> None:
        """Send all experts home, after a change that was torn in two."""
        self._torn = True  # until all of it is done: Ctrl-C may come here too
        self._tier.reset()
        self.residency.reset()
        everybody = range(self._space.n_keys)
        if self.pool is not None:
            self.pool.reset()
            self._directory.set_homes(everybody, [0] * self._space.n_keys)
        self._directory.set_slots(everybody, [0] * self._space.n_keys)
        self._landings.offer_all()
        self._steps.forget()
        self._table.publish()
        self._torn = False

    def _begin(self, moves: list[Move]) -> None:
        """Keep who has landed, and begin to copy the others."""
        landed = [move for move in moves if move.landed]
        if landed:
            self._keep(landed)
            moves = [move for move in moves if not move.landed]
        self._tier.bring(moves, self._ways.wait)

    def _keep(self, landed: Sequence[Move]) -> None:
        gone = [move.victim for move in landed if move.victim != FREE]
        slots = self._landings.keep(landed)
        addresses = [0] * len(gone) + [slot.address for slot in slots]
        self._directory.set_slots([*gone, *[move.key for move in landed]], addresses)
        self.residency.landed(landed)
        self._n_landed += len(landed)
        self._tier.counters.n_evictions += len(gone)

    def _bring_at_start(self, moves: Sequence[Move]) -> None:
        self._steps.fetch(np.array([move.key for move in moves], np.int64))
        self._tier.bring(moves, wait=True)
        self._tier.collect(wait=True)
