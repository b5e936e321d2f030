"""Runs the expert cache; only this module knows policy, slots, host pool, table and copies.

A run of tokens goes through `before_run`, where it is decided what moves after the run before it,
submits that begin with `begin`, and `after_run`. What the next decision can do without is learned
in `meanwhile`, when the next run is submitted. Where a run is several submits, `need` makes a
layer's experts available between them. While a submit reads a version of the table, nothing that
version leads to is written, except landing slots, by that submit alone.
Does not decide which experts have slots (decide/residency.py), nor count what tokens used
(tracker.py), and owns no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.errors import GpuError
from vkmoe.experts import _residency
from vkmoe.experts.decide.keys import NO_KEYS, Keys, Mask
from vkmoe.experts.decide.locations import FREE, Move
from vkmoe.experts.decide.reasons import Left
from vkmoe.experts.decide.residency import Residency
from vkmoe.experts.decide.token_table import Upcoming
from vkmoe.experts.records.profiler import (
    CacheCounters,
    Overlap,
    PoolCounters,
)
from vkmoe.experts.records.timing import Totals
from vkmoe.experts.store.copies import Copy, CopyBudget, Uploader, as_vkmoe_error
from vkmoe.experts.store.exchange import Exchange
from vkmoe.experts.store.layer_steps import LayerSteps
from vkmoe.experts.store.slots import Landings, SlotManager
from vkmoe.experts.store.table import AT_HOME, NOWHERE, ExpertTable
from vkmoe.experts.store.tier import N_ATTEMPTS, HostPool, Tier, TierCounters
from vkmoe.gpu.arena import Placement

# Limit of one submit of copies: far below what drivers' watchdogs allow, on the slowest links too.
MAX_SUBMIT_BYTES = 256 << 20
OVERLAPPED_SUBMIT_BYTES = 16 << 20  # small enough to be of use, or taken back, one by one


class CacheMemory(NamedTuple):
    """Lists where experts can be.

    `homes` [n_layers][n_experts] hold all of them; empty with a host pool smaller than the model.
    """

    table: ExpertTable
    slots: SlotManager
    homes: Sequence[Sequence[Placement]]
    span_bytes: Sequence[int]  # of an expert [n_layers]
    scratch: Sequence[Placement] = ()  # [n_used]: where misses are gathered that may not stay


@dataclass(frozen=True)
class CacheWays:
    """Says how copies are made."""

    wait: bool = True  # the plain way: the next submit waits for what is to move
    in_order: bool = False  # it is queued behind the copies: the host need not wait too
    budget: CopyBudget | None = None  # of bytes for the next token; None: there is no limit
    overlap: Overlap | None = None  # notes when copies to slots ran
    # What a run finds where does not depend on time: copies that began before a run are there for
    # the one after it, no sooner and no later; `fixed_bytes` of them at most, for tokens alone.
    punctual: bool = False
    fixed_bytes: float = inf


PLAIN = CacheWays()


class ExpertCache:
    """Keeps the experts that are worth it in device slots; the others are read at home.

    Owns none of its parts.
    """

    def __init__(
        self,
        residency: Residency,
        memory: CacheMemory,
        uploads: Uploader,
        ways: CacheWays = PLAIN,
        pool: HostPool | None = None,
        cpu: ExpertTable | None = None,
    ) -> None:
        """Begin with empty slots; `pool` is a host pool smaller than the model.

        With a `cpu`, that computes the experts without a slot: its table has those, ours has not.
        """
        self.residency, self._space, self._ways = residency, residency.space, ways
        self._memory, self._table, self.pool = memory, memory.table, pool
        self._homes = [home for row in memory.homes for home in row]  # by key
        self._span_bytes = np.array(memory.span_bytes, np.int64)
        homes = [home.address | AT_HOME for home in self._homes] or [NOWHERE] * self._space.n_keys
        self._home_addresses = np.array(homes, np.uint64)
        self._cpu = cpu
        self._cpu_addresses = cpu.entries.reshape(-1).copy() if cpu is not None else None
        # First: it sets slots apart.
        self._landings = Landings(memory.table, residency.locations, memory.slots, memory.scratch)
        self._uploads, self._tier = uploads, self._device_tier(uploads)
        self._exchange: Exchange | None = None  # while slots and pool hold all experts together
        self._written = TierCounters()  # of experts that were written back
        self._lands = memory.slots.n_landing > 0
        self._steps = LayerSteps(residency, self._tier, pool, ways.budget)
        self.missed_bytes = self._n_landed = 0
        self.landed_bytes = 0  # of the experts that kept the slots they landed in
        self._idle: Keys = NO_KEYS  # slots that were put out of use, whose memory is still there
        self._landed: list[int] = []  # of the last run

    @property
    def counters(self) -> CacheCounters:
        """Return what was done since the start."""
        tier, written = self._tier.counters, self._written
        return CacheCounters(
            n_uploads=tier.n_copies,
            upload_bytes=tier.copied_bytes,
            n_evictions=tier.n_evictions,
            missed_bytes=self.missed_bytes,
            n_table_writes=self._table.n_writes - 1,  # the first made the table
            n_failed_uploads=tier.n_failed,
            n_landed=self._n_landed,
            n_hinted=self._steps.n_hinted,
            n_cancelled=tier.n_cancelled,
            stall_ns=tier.stall_ns,
            n_written_back=written.n_copies,
            written_back_bytes=written.copied_bytes,
        )

    @property
    def pool_counters(self) -> PoolCounters | None:
        """Return what was done to serve misses from the file; None: there was no need of it."""
        found = self.pool.counters if self.pool is not None else None
        return found if found is not None and (self.reads_file or found.n_uses) else None

    @property
    def totals(self) -> Totals:
        """Return the few counters that are noted with every run."""
        file_ns = self.pool.tier.counters.stall_ns if self.pool is not None else 0
        return Totals(self.missed_bytes, self._tier.counters.stall_ns, file_ns)

    @property
    def most_slots(self) -> list[int]:
        """Return how many slots each pool can have in use: less where some were given back."""
        locations = self.residency.locations
        idle = np.bincount(locations.pools_of_slots(self._idle), minlength=len(locations.pools))
        most: list[int] = (locations.capacities + idle).tolist()
        return most

    @property
    def overlap(self) -> Overlap | None:
        return self._tier.overlap

    @property
    def copies_by_host(self) -> bool:
        """Return whether the host's clock times copies: it reads them from the file."""
        return self._cpu is not None

    def start(self, read: Callable[[Sequence[Copy]], object] | None = None) -> None:
        """Bring those into slots that are to be there for the first token, and fill the pool.

        `read` reads experts (key, memory, bytes) from the file. Raises DeviceLostError, and what
        reading raises.
        """
        exchanges = self.residency.settings.exchanges
        for _ in range(N_ATTEMPTS if exchanges else 1):  # what fails then has no other place
            moves = self.residency.start()
            step = max(1, len(moves) if self.pool is None else self.pool.residency.n_at_once)
            for first in range(0, len(moves), step):
                batch = moves[first : first + step]
                self._steps.fetch(np.array([move.key for move in batch], np.int64))
                self._tier.bring(batch, wait=True)
                self._collect(wait=True)
        if self.pool is not None:
            self.residency.host = self.pool.locations
            if read is not None:
                self.pool.fill(read, exchanges)
            self.pool.started()
            if exchanges and not self._begin_to_exchange(self.pool):
                raise GpuError(
                    "some experts could be copied neither to the device nor to host memory",
                    "close other programs, or give a larger --host-pool",
                )
        self._tier.started()
        self._write_addresses()

    def _begin_to_exchange(self, pool: HostPool) -> bool:
        """Read the file no more: experts that leave their slots are written back from now on.

        Returns False, with nothing done, where some expert is in no memory.
        """
        if pool.is_whole:
            residency, uploads, wait = self.residency, self._uploads, self._ways.wait
            exchange = Exchange(residency, self._tier, pool, uploads, wait, self._written)
            self._exchange = exchange
        return pool.is_whole

    def begin(self, first: bool = True) -> int:
        """Publish what has arrived, for the next submit. Returns the number to end it with.

        Submits of a token but its `first` come after a `need`. Raises DeviceLostError. A copy that
        fails otherwise leaves its expert at home.
        """
        if first:
            self._steps.forget()
        self._tier.start_waiting(urgent=self._ways.punctual)
        if self._ways.in_order:
            self._tier.hand_over()
        elif self._ways.wait or not self._ways.punctual:
            self._collect(self._ways.wait)
        if self.pool is not None and self.reads_file:
            self.pool.tier.collect()
        if self._lands:
            self._landings.offer()
        self._steps.begin()
        self._publish()
        return self._table.begin()

    def need(self, layer: int, experts: NDArray[np.uint32], guess: bool = True) -> None:
        """Ensure that a layer's experts [n_tokens, n_used] of the next submit are in memory.

        In a slot or in the pool. What they let expect of the next layer is begun, if they are to
        `guess` by. Waits for the file; raises ModelFileError where it cannot be read.
        """
        self._steps.need(layer, experts, guess)

    def after_run(
        self,
        routing: NDArray[np.uint32],
        filled: NDArray[np.bool_] | None = None,
        host_ns: int = 0,
        tokens: Sequence[int | None] | None = None,
    ) -> Mask:
        """Note what tokens used, as `ExpertTracker.after_run` says.

        The host waited for them for `host_ns`; 0: they tell nothing of how long a token takes.
        Returns which uses were served from slots.
        """
        keys, budget = self.residency.observe(routing, tokens), self._ways.budget
        # Misses that may land are of one row; those of the others are not filled.
        hits, missed_bytes, self._landed = self._landings.misses(
            keys, self._steps.hits(keys), filled, self._span_bytes
        )
        self.missed_bytes += missed_bytes
        self._steps.over()
        if self._tier.is_copying and not (self._ways.wait or self._ways.punctual):
            used = np.zeros(self._space.n_keys, np.bool_)
            used[keys] = True
            self._tier.cancel(used)
        if budget is not None and host_ns:
            budget.token(host_ns / 1e9, missed_bytes)
        return hits

    def decide(self, upcoming: Upcoming, decodes: bool = True) -> None:
        """Decide what moves after the tokens noted last, if that was not done; copies begin.

        The ids `upcoming` are known to come: to be decoded, or of a prompt.
        """
        if self._exchange is not None:
            self._exchange.collect()
        budget, landed = self._ways.budget, self._landed
        self._landed = []
        n_bytes = self._ways.fixed_bytes
        if budget is not None:
            n_bytes = budget.n_bytes - self._tier.pending_bytes
        n_bytes = self.residency.bytes_before(upcoming, n_bytes, beside=budget is not None)
        if self._ways.punctual:
            self._collect(wait=True)
            n_bytes *= decodes
        self._carry_out(self.residency.decide(landed, n_bytes, upcoming))
        if self.residency.settings.executor == "stepped" and upcoming.ids:
            self._steps.guess_first()

    def meanwhile(self) -> None:
        """Do what may be done while the first submit of a run is computed: learn from the last one,
        and write back the experts that are next to leave.
        """
        self.residency.learn()
        if self._exchange is not None:
            budget = self._ways.budget
            self._exchange.look_ahead(budget.n_bytes if budget is not None else inf)

    def give_back(self, n_bytes: int) -> tuple[int, int]:
        """Free slots until so many bytes are free, as far as can be; return slots and bytes.

        Between runs. Their experts are at home from then on; what host memory has no room for stays
        on the device. Must hold: the CPU computes none. Raises DeviceLostError.
        """
        assert self._cpu is None, "which experts are the CPU's would depend on other programs"
        n_freed = 0
        slots, locations = self._memory.slots, self.residency.locations
        wanted, idle, self._idle = locations.capacities, self._idle, NO_KEYS
        locations.restore(idle)  # those go first, as they are free
        while n_freed < n_bytes and (able := [*filter(self._can_free, slots.last_chunks())]):
            numbers = able[0]
            if not self._leave(numbers, "given back"):
                break
            n_freed += slots.free(numbers)
        self.resize(np.minimum(wanted, locations.capacities).tolist())
        return int((wanted - locations.capacities).sum()), n_freed

    @property
    def reads_file(self) -> bool:
        """Return whether experts may be in the file alone: tokens stop at routers to read them."""
        return self.pool is not None and self._exchange is None

    def give_back_places(self, n_bytes: int) -> tuple[int, int]:
        """Free host slots until so many bytes are free, as far as can be; return slots and bytes.

        Between runs. A layer keeps as many as it needs at once. Where slots and places held all
        experts, those that are worth least are in the file alone from then on. Must hold: there is
        a host pool.
        """
        pool = self.pool
        assert pool is not None
        self._end_copies()
        pool.end_reads()
        slots, n_slots, n_freed = pool.tier.slots, 0, 0
        try:
            while n_freed < n_bytes and (able := [*filter(self._can_spare, slots.last_chunks())]):
                if not pool.clear(able[0], self._publish):
                    break
                n_slots, n_freed = n_slots + len(able[0]), n_freed + slots.free(able[0])
        finally:  # Ctrl-C may come behind the first that left
            if not pool.is_whole:
                self._exchange = self.residency.backing = None
        return n_slots, n_freed

    def regain(self) -> None:
        """Bring all experts into slots and places again, if these held them once and can again.

        Between runs. The next run waits for what is read. Raises DeviceLostError; what cannot be
        read stays in the file.
        """
        pool, exchanged = self.pool, self.residency.settings.exchanges
        if pool is None or not exchanged or not self.reads_file or not pool.has_room_for_all:
            return
        self._tier.start_waiting(wait=True)
        self._tier.collect(wait=True)
        pool.end_reads()
        pool.read_absent()
        self._begin_to_exchange(pool)

    def take_back(self, n_bytes: int, of_host: bool = False) -> tuple[int, int]:
        """Take back memory that was given, at most so many bytes; return slots and bytes.

        Between runs. The slots are free. Takes none where the device refuses it.
        """
        tier = self.pool.tier if of_host and self.pool is not None else self._tier
        numbers, n_taken = tier.slots.take_back(n_bytes)
        tier.locations.restore(numbers)
        return len(numbers), n_taken

    def resize(self, capacities: Sequence[int]) -> None:
        """Use so many slots of each pool from now on; the others stay, empty.

        Between runs. Experts that lose theirs are at home from then on. Must hold: the CPU computes
        none, each pool has `most_slots` at most, and its floor, and there is `room_for` the experts
        that leave. Raises DeviceLostError, and GpuError where they cannot be written back.
        """
        assert self._cpu is None, "which experts are the CPU's would change"
        locations = self.residency.locations
        for pool, wanted in enumerate(capacities):
            n_more = wanted - int(locations.capacities[pool])
            if n_more < 0:
                numbers = self.residency.least_slots(pool, -n_more)
                if not self._leave(numbers, "fewer slots"):
                    raise GpuError("the experts of these slots could not be written back", "")
                self._memory.slots.poison(numbers)
                self._idle = np.union1d(self._idle, numbers)
            elif n_more > 0:
                ours = self._idle[locations.pools_of_slots(self._idle) == pool][:n_more]
                assert len(ours) == n_more, (capacities, self.most_slots)
                self._idle = np.setdiff1d(self._idle, ours)
                locations.restore(ours)

    def room_for(self, capacities: Sequence[int]) -> bool:
        """Return whether host memory has room for what leaves, with so many slots of each pool.

        Between runs. Ends the copies under way to know it. Raises DeviceLostError.
        """
        if self._exchange is None:
            return True
        self._end_copies()
        residency = self.residency
        n_fewer = (residency.locations.capacities - np.array(capacities)).tolist()
        going = [residency.least_slots(pool, n) for pool, n in enumerate(n_fewer) if n > 0]
        leaving = residency.leaving_for(np.concatenate(going or [NO_KEYS]))
        return self._exchange.has_room_for(leaving)

    def settle(self) -> None:
        """Wait for the copies under way, so that counters tell of them. Raises DeviceLostError."""
        self._tier.collect(wait=True)
        if self._exchange is not None:
            self._exchange.tier.collect(wait=True)

    def check_integrity(self) -> None:
        """Raise AssertionError if a record contradicts itself, or the table leads elsewhere."""
        self.residency.check_integrity()
        if self.pool is not None:
            self.pool.residency.check_integrity()
        assert self._exchange is None or self.pool is None or self.pool.is_whole, "one is nowhere"
        keys = np.flatnonzero(~self._changed)
        entries = self._table.entries.reshape(-1)[keys]
        assert (entries == self._addresses(keys)).all(), "the table leads elsewhere"

    # ----- inside -----

    @property
    def _changed(self) -> Mask:
        """Return which experts' addresses the table may not have yet [n_keys]."""
        changed = self.residency.locations.changed
        return changed if self.pool is None else changed | self.pool.locations.changed

    def _can_free(self, numbers: Keys) -> bool:
        """Return whether these slots can be put out of use, and their experts lie elsewhere."""
        exchange = self._exchange
        able = self.residency.locations.can_retire(numbers)
        if not able or exchange is None:
            return able
        return exchange.has_room_for(self.residency.leaving_for(numbers))

    def _can_spare(self, numbers: Keys) -> bool:
        """Return whether these host slots can be put out of use.

        What a layer can have at once stays: batches go by that.
        """
        assert self.pool is not None
        enough = self.reads_file or self.pool.residency.n_at_once >= self._space.n_experts
        return enough and self.pool.can_free(numbers)

    def _leave(self, numbers: Keys, why: Left) -> bool:
        """Let nothing use these slots any more: no expert, no copy, no submit to come.

        Those that are the next to leave do so, and the others move. Return False, with the slots
        in use, where an expert could not be written back or moved.
        """
        self._end_copies()
        locations, slots = self.residency.locations, self._memory.slots
        leaving = self.residency.leaving_for(numbers)
        if self._exchange is not None and not self._exchange.back(leaving):
            return False
        if self.residency.reasons is not None:
            self.residency.reasons.left(leaving.tolist(), why)
        self._landings.move(locations.landing_in(numbers))
        if not self._tier.vacate(numbers, leaving, self._publish):
            self._landings.offer()
            return False
        locations.retire(numbers)
        self._landed = []
        self._landings.offer()
        self._publish()
        assert slots.are_writable(numbers, self._table.oldest_read).all()
        return True

    def _end_copies(self) -> None:
        """Wait for the copies under way, and take back those that wait. Raises DeviceLostError."""
        self.settle()
        self._tier.cancel(np.zeros(self._space.n_keys, np.bool_))

    def _device_tier(self, uploads: Uploader) -> Tier:
        """Make what brings experts into slots, from home, the pool, or the file itself."""
        memory, ways, pool = self._memory, self._ways, self.pool
        source: Callable[[int], Any] = self._homes.__getitem__ if pool is None else pool.place
        failure = "copying experts to the GPU failed, they are read in place"
        if self._cpu is not None:  # it computes them meanwhile; the file knows them by number
            source, failure = int, "copying experts to the GPU failed"
        return Tier(
            memory.table,
            self.residency.locations,
            memory.slots,
            uploads,
            source=source,
            span_bytes=memory.span_bytes,
            max_copy_bytes=MAX_SUBMIT_BYTES if ways.wait else OVERLAPPED_SUBMIT_BYTES,
            failure=failure,
            readable=pool.locations if pool is not None else None,
            overlap=ways.overlap,
        )

    def _collect(self, wait: bool) -> None:
        """Note what has arrived. Raises what a copy failed with where its lack changes the text."""
        self._tier.collect(wait)
        if self._ways.punctual and self._tier.errors:
            _, error = self._tier.errors.popitem()
            self._tier.errors.clear()
            raise as_vkmoe_error(error)

    def _write_addresses(self) -> None:
        """Let the table's next version lead to where the experts are."""
        if self.pool is None and self._cpu is None:
            locations, slots = self.residency.locations, self._memory.slots
            state, slot_of, changed, _ = locations.record
            homes, entries = self._home_addresses, self._table.entries
            arrays = (changed, state, slot_of, slots.addresses, homes, entries)
            self._table.note(_residency.write_addresses(*arrays))
            return
        keys = self._changed.nonzero()[0]
        if not keys.size:
            return
        addresses = self._addresses(keys)
        self._table.set_all(keys, addresses)
        if self._cpu is not None and self._cpu_addresses is not None:
            others = np.where(addresses == NOWHERE, self._cpu_addresses[keys], np.uint64(NOWHERE))
            self._cpu.set_all(keys, others)
            self._cpu.publish()
        self.residency.locations.changed[keys] = False
        if self.pool is not None:
            self.pool.locations.changed[keys] = False

    def _publish(self) -> None:
        """Have the next submit read where the experts are now."""
        self._write_addresses()
        self._table.publish()

    def _addresses(self, keys: Keys) -> NDArray[np.uint64]:
        """Return where experts are: in their slots, else at home, else NOWHERE."""
        found = self._home_addresses[keys]
        if self.pool is not None:
            here = self.pool.locations.are_present(keys)
            found[here] = self.pool.tier.addresses(keys[here]) | np.uint64(AT_HOME)
            found[~here] = NOWHERE
        in_slots = self.residency.locations.are_present(keys)
        found[in_slots] = self._tier.addresses(keys[in_slots])
        return found

    def _carry_out(self, moves: list[Move]) -> None:
        """Keep the experts that have landed, and begin to copy the others."""
        landed = [move for move in moves if move.landed]
        if landed:
            keys = np.array([move.key for move in landed], np.int64)
            has_victim = np.array([move.victim != FREE for move in landed], np.bool_)
            self._landings.keep(keys, has_victim)
            self._n_landed += len(landed)
            self.landed_bytes += int(self._span_bytes[keys // self._space.n_experts].sum())
            self._tier.counters.n_evictions += int(np.count_nonzero(has_victim))
            moves = [move for move in moves if not move.landed]
        self._tier.bring(moves, self._ways.wait, urgent=self._ways.punctual)
