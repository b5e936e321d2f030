"""The expert cache at work: the only one that knows policy, slots, host pool, table and copies.

`ExpertCache` puts these together and runs them: a submit is bracketed by `begin` and `end`, a token
ends with `after_token`; where a token is several submits with a look at the routing between them,
`need` makes a layer's experts available. While a submit reads a version of the table, nothing that
version leads to is written, except landing places, by that submit alone. `ExpertTracker` is the
engine's face of it, there also where nothing moves and only the counting is left. Does not decide
which experts have slots (decide/residency.py), and owns no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.decide.keys import Keys, Mask
from vkmoe.experts.decide.pool_residency import PoolResidency
from vkmoe.experts.decide.residency import Residency
from vkmoe.experts.decide.residents import FREE, Move
from vkmoe.experts.records.overlap import Interval, Overlap
from vkmoe.experts.records.profiler import CacheCounters, ExpertProfiler
from vkmoe.experts.store.copies import Copy, CopyBudget, DrainedUploader
from vkmoe.experts.store.host_pool import HostPool
from vkmoe.experts.store.slots import Landings, SlotManager
from vkmoe.experts.store.table import Directory, ExpertTable
from vkmoe.experts.store.tier import Tier, TierSpec
from vkmoe.gpu.arena import Placement

__all__ = ["CacheWays", "ExpertCache", "ExpertMemory", "ExpertTracker", "PoolParts"]

# Limit of one submit of copies: far below what drivers' watchdogs allow, on the slowest links too.
MAX_SUBMIT_BYTES = 256 << 20
OVERLAPPED_SUBMIT_BYTES = 16 << 20  # small enough to be of use, or taken back, one by one
MAX_READ_BYTES = 1  # one expert a job: what is needed waits for no more guesses than that
COPY_FAILED = "copying experts to the GPU failed, they are read in place"
READ_FAILED = "reading experts from the model file failed"


class ExpertMemory(NamedTuple):
    """Lists where experts can be.

    `homes` [n_layers][n_experts] hold all of them; empty with a host pool smaller than the model.
    """

    table: ExpertTable
    slots: SlotManager
    homes: Sequence[Sequence[Placement]]
    span_bytes: Sequence[int]  # of an expert [n_layers]
    scratch: Sequence[Placement] = ()  # [n_used]: where misses are gathered that may not stay


class PoolParts(NamedTuple):
    """Names the parts of a host pool smaller than the model."""

    residency: PoolResidency
    places: SlotManager
    reads: DrainedUploader


@dataclass(frozen=True)
class CacheWays:
    """Says how copies are made.

    With `wait`, the plain way, the next submit finds all in place that was decided to move; else
    copies are collected when they are done.
    """

    wait: bool = True
    marks_homes: bool = False  # kernels are to know what they read at home
    budget: Callable[[], float] = lambda: inf  # bytes that may be copied for the next token
    overlap: Overlap | None = None  # notes when copies to slots ran


PLAIN = CacheWays()


class ExpertTracker:
    """Does what the host has to do about experts between two submits."""

    def __init__(
        self,
        layer_numbers: Sequence[int],
        table: ExpertTable,
        residency: Residency,
        cache: ExpertCache | None,
        on_device: bool,
        checks: bool = False,
        budget: CopyBudget | None = None,
        overlap: Overlap | None = None,
    ) -> None:
        """Begin to count; without a cache, `on_device` says where all experts are.

        `budget` and `overlap` learn of tokens; they are there where copies overlap with these.
        `checks` is for tests.
        """
        self.residency, self.cache = residency, cache
        self.profiler = ExpertProfiler(residency.space, layer_numbers)
        self._table, self._on_device, self._checks = table, on_device, checks
        self._budget, self.overlap = budget, overlap
        self._host_ns = 0  # of the last token
        self._began_ns = 0  # the last submit
        self._note_pins()

    def begin(self, first: bool = True) -> int:
        """Return the number to end the next submit with, of a token's `first` or a later one.

        Must hold: no submit is in flight, not even one that was interrupted. Raises
        DeviceLostError.
        """
        self._table.end_all()
        reader = self.cache.begin(first) if self.cache is not None else self._table.begin()
        self._began_ns = perf_counter_ns()
        return reader

    def end(self, reader: int) -> None:
        """Note that a submit is over. One that was interrupted or failed needs no ending."""
        if self.cache is not None and self.cache.pool is not None:
            self.cache.pool.computed((self._began_ns, perf_counter_ns()))
        self._table.end(reader)

    def timed(self, submits: Sequence[Interval], host: Interval) -> None:
        """Note when a token ran, in these submits and between `host`'s begin and end.

        In nanoseconds of the device's and of the host's clock. Comes before `after_token`.
        """
        self._host_ns = host[1] - host[0]
        if self.overlap is not None:
            self.overlap.computed(submits, host)

    def need(self, layer: int, experts: NDArray[np.uint32]) -> None:
        """Have these experts [n_used] of a MoE layer where the next submit, which uses them, reads.

        Raises ModelFileError where they have to be read from the file and cannot.
        """
        if self.cache is not None:
            self.cache.need(layer, experts)

    def after_token(
        self, routing: NDArray[np.uint32], filled: NDArray[np.bool_] | None = None
    ) -> None:
        """Count a token that is over and used `routing` [n MoE layers, n_used], which is kept.

        `filled` [n MoE layers, n_used]: which were stored where they were to land; None: none.
        """
        if self.cache is not None:
            hits = self.cache.after_token(routing, filled)
            self.profiler.record(routing, hits)
            if self._budget is not None:
                self._budget.token(self._host_ns / 1e9, self.cache.last_missed_bytes)
        else:
            self.residency.use(routing)
            self.profiler.record(routing, self._on_device)
        self._note_pins()
        if self._checks and self.cache is not None:
            self.cache.check_integrity()

    def _note_pins(self) -> None:
        if self.residency.warm_at == self.residency.n_tokens:
            self.profiler.mark_warm()


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
        n_keys = self._space.n_keys
        self._directory = Directory(memory.table, n_keys, ways.marks_homes)
        self._directory.set_homes(range(len(self._homes)), [home.address for home in self._homes])
        self.pool = _make_pool(pool, memory, self._directory, residency) if pool else None
        home = self.pool.place if self.pool is not None else self._homes.__getitem__
        self._tier = _make_tier(memory, self._directory, residency, uploads, home, ways)
        self._landings = Landings(memory.table, memory.slots, memory.scratch)
        self._lands = self._landings.n_landing > 0
        self._steps = _LayerSteps(residency, self._tier, self.pool, ways.budget)
        self._missed_bytes = self._n_landed = 0
        self.last_missed_bytes = 0  # of the last token
        self._torn = False

    @property
    def counters(self) -> CacheCounters:
        """Return what was done since the start."""
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
        """Note that a submit is over."""
        self._table.end(reader)

    def need(self, layer: int, experts: NDArray[np.uint32]) -> None:
        """Have experts [n_used] of a layer, which the next submit uses, in a slot or in the pool.

        Waits for the file; raises ModelFileError where it cannot be read. What they let expect of
        the next layer is begun.
        """
        assert not self._is_torn, "a token goes on after it was interrupted"
        self._steps.need(layer, experts)

    def after_token(
        self, routing: NDArray[np.uint32], filled: NDArray[np.bool_] | None = None
    ) -> NDArray[np.bool_]:
        """Decide what moves after a token that used `routing` [n_layers, n_used]; begin to copy.

        `filled` [n_layers, n_used] marks experts that were stored where they were to land. Returns
        which uses were served from slots.
        """
        keys = self._space.numbers_of(routing)
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
        """Return which experts are published in a slot [n_keys]."""
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
        every_key = range(self._space.n_keys)
        if self.pool is not None:
            self.pool.reset()
            self._directory.set_homes(every_key, [0] * self._space.n_keys)
        self._directory.set_slots(every_key, [0] * self._space.n_keys)
        self._landings.offer_all()
        self._steps.forget()
        self._table.publish()
        self._torn = False

    def _begin(self, moves: list[Move]) -> None:
        """Keep the experts that have landed, and begin to copy the others."""
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


class _LayerSteps:
    """Has the experts of the next layer in place, where a token is cut at its routers.

    Begins to move what they let expect of the layer after it. Owns which experts are about to be
    run, and which of the token's were found in a slot; does not decide which leave.
    """

    def __init__(
        self,
        residency: Residency,
        tier: Tier,
        pool: HostPool | None,
        budget: Callable[[], float],
    ) -> None:
        """Work on a cache's parts; `budget` returns how many bytes may be copied ahead."""
        self._residency, self._tier, self._pool, self._budget = residency, tier, pool, budget
        self._in_slots: Mask = residency.published.reshape(-1)  # a view
        self._left: float | None = None  # bytes a token may still copy ahead, from its first hint
        self._next: tuple[int, Keys] | None = None  # layer and experts of the next submit
        self._hits: dict[int, Mask] = {}  # by layer
        self.n_hinted = 0

    def forget(self) -> None:
        """Begin a token, whatever became of the last one."""
        self._next = None
        self._hits.clear()
        self._left = None

    def need(self, layer: int, experts: NDArray[np.uint32]) -> None:
        """Have experts [n_used] of a layer, which the next submit uses, in place.

        Waits for the file; raises ModelFileError where it cannot be read.
        """
        keys = experts.astype(np.int64) + layer * self._residency.space.n_experts
        self._next = (layer, keys)
        self.fetch(keys)
        guessed = self._residency.guess_next_layer(layer, experts)
        if guessed.size:
            self._hint(guessed, keys)

    def fetch(self, keys: Keys) -> None:
        """Have experts in a slot or in the host pool. Raises ModelFileError."""
        if self._pool is not None:
            self._pool.need(keys, self._kept(keys), lambda: self._make_room(keys))

    def begin(self) -> None:
        """Note the hits of a submit that begins: the experts that are in a slot now."""
        if self._next is not None:
            layer, keys = self._next
            self._hits[layer] = self._in_slots[keys]

    def hits(self, keys: Keys) -> Mask:
        """Return which of `keys` [n_layers, n_used] the token that is over found in a slot."""
        hits: Mask = self._in_slots[keys]
        for layer, row in self._hits.items():
            hits[layer] = row
        return hits

    # ----- inside -----

    def _kept(self, keys: Keys) -> Mask:
        """Mark which may not leave the pool [n_keys]: those needed now or being copied from."""
        kept = np.zeros(self._residency.space.n_keys, np.bool_)
        kept[keys] = True
        kept[list(self._tier.moving)] = True
        return kept

    def _make_room(self, keys: Keys) -> Mask:
        """Wait until none is copied from the pool; return which may not leave it then."""
        self._tier.start_blocked(wait=True)
        self._tier.collect(wait=True)
        return self._kept(keys)

    def _hint(self, guessed: Keys, keys: Keys) -> None:
        """Begin to move what the next layer is expected to use, while `keys` are run."""
        tier, before = self._tier, self._tier.pending_bytes
        if self._left is None:
            self._left = self._budget() - before
        if self._pool is not None:
            self._pool.want(guessed, self._kept(keys))
            guessed = guessed[self._pool.residency.published[guessed]]
        outer, tier.torn = tier.torn, True
        moves = self._residency.hint(guessed.tolist(), keys, self._left)
        self.n_hinted += len(moves)
        tier.bring(moves)
        tier.torn = outer
        self._left -= tier.pending_bytes - before


def _make_tier(
    memory: ExpertMemory,
    directory: Directory,
    residency: Residency,
    uploads: DrainedUploader,
    home: Callable[[int], Placement],
    ways: CacheWays,
) -> Tier:
    """Make the tier of the device's slots, which are filled from the homes."""
    spec = TierSpec(
        memory.slots,
        uploads,
        directory.set_slots,
        home,
        memory.span_bytes,
        residency.space.n_experts,
        MAX_SUBMIT_BYTES if ways.wait else OVERLAPPED_SUBMIT_BYTES,
        COPY_FAILED,
        ways.overlap,
    )
    return Tier(spec, residency, memory.table)


def _make_pool(
    parts: PoolParts, memory: ExpertMemory, directory: Directory, residency: Residency
) -> HostPool:
    """Make the host pool, which is filled from the file."""
    overlap = Overlap()  # by the host's clock, which times reads
    spec = TierSpec(
        parts.places,
        parts.reads,
        directory.set_homes,
        lambda key: key,
        memory.span_bytes,
        residency.space.n_experts,
        MAX_READ_BYTES,
        READ_FAILED,
        overlap,
    )
    tier = Tier(spec, parts.residency, memory.table)
    in_slots = residency.published.reshape(-1)
    return HostPool(parts.residency, tier, in_slots, overlap)
