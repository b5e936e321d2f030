"""Replays a trace through the engine's own decisions, once or for many caches, without a GPU.

`simulate` gives hit counts equal to the engine's for the same routing, settings and pools; `misses`
tells where misses come from, by comparing them with Belady's optimum, `belady_hits`. `run_sweep`
replays one trace with many numbers of slots and policies. `bend_of_curve` says how many pay off.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import inf
from multiprocessing import resource_tracker
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.batch import MAX_LATER
from vkmoe.choices import PolicyName, SlotSharing
from vkmoe.experts.decide.foresight import Table
from vkmoe.experts.decide.keys import NO_KEYS, KeySpace, Values
from vkmoe.experts.decide.residency import NOTHING_KNOWN, Residency
from vkmoe.experts.decide.settings import CacheSettings, PoolSpec, make_pools
from vkmoe.experts.decide.token_table import Upcoming
from vkmoe.experts.records.trace import Trace
from vkmoe.experts.study.places import HostPlaces

ENOUGH_TOKENS = 200  # with fewer, the first use of each expert hides where the curve bends
SERIAL_USES = 200_000  # of experts in all replays, below which starting processes costs more
Progress = Callable[[int, int], None]  # replays done, replays in all
NEVER = np.iinfo(np.int64).max
Batch = tuple[NDArray[np.int64], int]  # layers [n_pools, layers per pool], slots of each pool


class Transfers(NamedTuple):
    """Says how experts get into slots. By default all that was decided is there in time."""

    late: bool = False  # copies are not there for the next submit, but for the one after it
    n_landing: int = 0  # missed experts of a layer that are in a slot for having been read
    token_bytes: float = inf  # that are copied at most before a token: see `Residency.bytes_before`


PLAIN = Transfers()


@dataclass(frozen=True, eq=False)
class SimulationResult:
    """Holds what a cache would have done on a trace."""

    trace: Trace
    hits: NDArray[np.int64]  # [n_tokens, n_layers]: uses served from slots
    n_promoted: NDArray[np.int64]  # [n_layers]: experts copied into slots
    start: NDArray[np.bool_]  # [n_layers, n_experts]: in slots before the first token
    n_landed: int = 0  # experts that got a slot without a copy

    @property
    def layer_hits(self) -> NDArray[np.int64]:
        """Return the hits of each layer, [n_layers]."""
        return np.asarray(self.hits.sum(axis=0), np.int64)

    @property
    def hit_rate(self) -> float:
        """Return hits per use of all layers, from 0 to 1."""
        return float(self.hits.mean()) / self.trace.header.n_used

    @property
    def worst_rate(self) -> float:
        """Return hits per use of the layer with the fewest."""
        return int(self.layer_hits.min()) / (self.trace.n_tokens * self.trace.header.n_used)

    @property
    def read_bytes(self) -> float:
        """Return the bytes a token reads at home because experts have no slot, on average.

        Guesses count for the tokens of the texts, as their copies do.
        """
        n_uses = self.trace.n_tokens * self.trace.header.n_used
        return self._per_token(n_uses - self.layer_hits)

    @property
    def copied_bytes(self) -> float:
        """Return the bytes copied into slots per token, on average."""
        return self._per_token(self.n_promoted)

    def _per_token(self, counts: NDArray[np.int64]) -> float:
        n_tokens = self.trace.n_text or self.trace.n_tokens
        return float(counts @ np.array(self.trace.header.span_bytes)) / n_tokens


def simulate(
    trace: Trace,
    settings: CacheSettings,
    pools: Sequence[PoolSpec],
    seed: NDArray[np.float64] | None = None,
    transfers: Transfers = PLAIN,
    table: Table | None = None,
    places: Sequence[PoolSpec] = (),
) -> SimulationResult:
    """Replay a trace on an empty cache; `seed` is a profile's counts, as `Residency` takes them.

    In stepped mode a layer is a submit, so that guesses of the next one are there in time.
    All sequences go through one cache. One with room for all experts of all layers is none: they
    are resident in place, and every use is a hit. Each run of the trace is one, a token where it
    has none. `table` is what is known of tokens at the start; a `KnowsNext` makes all of it known.
    `places` in host memory hold the experts without a slot, where not all have a home there.
    """
    space, n_used = trace.space, trace.header.n_used
    if _holds_all(trace, pools):
        hits = np.full((trace.n_tokens, space.n_layers), n_used, np.int64)
        everything = np.ones((space.n_layers, space.n_experts), np.bool_)
        return SimulationResult(trace, hits, np.zeros(space.n_layers, np.int64), everything)
    replay = _Replay(Residency(space, pools, settings, seed, table), transfers, places)
    start = replay.residency.present
    hits = np.empty((trace.n_tokens, space.n_layers), np.int64)
    ids = np.arange(trace.n_tokens) if isinstance(table, KnowsNext) else trace.ids
    known = _Known(trace, ids)
    for run in known.runs:
        if run.start in trace.starts:
            replay.begin_text()
        replay.decide(known.upcoming(run))
        tokens = None if ids is None else ids[run.start : run.stop].tolist()
        lands = len(run) == 1 and not (trace.runs and trace.is_prompt[run.start])
        hits[run.start : run.stop] = replay.run(trace.routing[run.start : run.stop], tokens, lands)
    layers = np.array(replay.copied, np.int64) // space.n_experts
    n_copied = np.bincount(layers, minlength=space.n_layers)
    return SimulationResult(trace, hits, n_copied, start, replay.n_landed)


class KnowsNext:
    """Knows what each token of a trace uses, by its number: the most that a `Table` can know."""

    def __init__(self, trace: Trace) -> None:
        self._keys, self._n_keys = trace.space.keys_of(trace.routing), trace.space.n_keys

    def learn(self, token: int, ids: NDArray[np.uint32]) -> None:
        """Do nothing: it knows all."""

    def expect(self, tokens: Iterable[int], usual: Values) -> Values:
        """Return how many of these tokens use each expert: [n_keys]."""
        found = np.bincount(self._keys[[*tokens]].ravel(), minlength=self._n_keys)
        return found.astype(np.float64)


class _Known:
    """Says of each run of a trace what an engine knows to come when it is about to begin."""

    def __init__(self, trace: Trace, ids: NDArray[np.int64] | None) -> None:
        firsts = [*(trace.runs or range(trace.n_tokens)), trace.n_tokens]
        self.runs = [range(a, b) for a, b in pairwise(firsts)]
        self._ids = ids
        # Up to where tokens are known: all of a prompt is, and of a reply the one that was sampled.
        self._ends = np.array([run.stop for run in self.runs for _ in run])
        starts = np.array([*trace.starts, trace.n_tokens])
        for token in range(trace.n_tokens - 2, -1, -1):
            if trace.is_prompt[token] and trace.is_prompt[token + 1] and token + 1 not in starts:
                self._ends[token] = self._ends[token + 1]

    def upcoming(self, run: range) -> Upcoming:
        """Return what is known before a run: its tokens, and those behind it."""
        if self._ids is None:
            return NOTHING_KNOWN
        end = min(int(self._ends[run.start]), run.stop + MAX_LATER)
        ids: list[int] = self._ids[run.start : end].tolist()
        return Upcoming(tuple(ids[: len(run)]), tuple(ids[len(run) :]))


class _Replay:
    """Runs a cache whose copies land when their time has come."""

    def __init__(
        self, residency: Residency, transfers: Transfers, places: Sequence[PoolSpec] = ()
    ) -> None:
        self.residency, self._transfers = residency, transfers
        self._places = HostPlaces(residency, places) if places else None
        self._n_experts = residency.space.n_experts
        self._stepped = residency.settings.executor == "stepped"
        self._late = self._places.start() if self._places is not None else residency.start()
        self.copied = [move.key for move in self._late]
        self.n_landed = 0
        self._missed: list[int] = []  # of the last run, in places to land in
        self._arrive()
        self._shown = residency.present

    def begin_text(self) -> None:
        """Note that the next run begins another text."""
        self.residency.reset_predictions()

    def decide(self, upcoming: Upcoming) -> None:
        """Decide what moves after the last run, if there was one, now that it is known what comes.

        Then learn from it.
        """
        residency = self.residency
        self._shown = residency.present
        if self._places is not None:
            self._places.before_decision()
        transfers = self._transfers
        n_bytes = residency.bytes_before(upcoming, transfers.token_bytes, transfers.late)
        moves = residency.decide(self._missed, n_bytes, upcoming)
        kept = [move for move in moves if move.landed]
        self.n_landed += len(kept)
        residency.arrived(kept)
        copies = [move for move in moves if not move.landed]
        self.copied += [move.key for move in copies]
        residency.arrived(self._late)
        self._late = copies
        if self._stepped and upcoming.ids:
            self._hint(residency.guess_layer(0), NO_KEYS)
        if not self._transfers.late:
            self._arrive()
        self._shown = residency.present
        residency.learn()
        if self._places is not None:
            self._places.look_ahead()

    def run(
        self, routing: NDArray[np.uint32], tokens: Sequence[int] | None, lands: bool
    ) -> NDArray[np.int64]:
        """Run tokens that use `routing` [n_tokens, n_layers, n_used]; returns their hits.

        `lands`: what is missed may land. Hits are [n_tokens, n_layers].
        """
        if self._stepped:
            assert len(routing) == 1, "no runs of several tokens are replayed layer by layer"
            hits = np.stack([self._layer(layer, ids) for layer, ids in enumerate(routing[0])])[None]
        else:
            hits = self._shown.reshape(-1)[self.residency.space.keys_of(routing)]
        lands = lands and self._transfers.n_landing > 0
        self._missed = self._landed(routing[0], hits[0]) if lands else []
        self.residency.observe(routing, tokens)
        return np.asarray(np.count_nonzero(hits, axis=2), np.int64)

    def _layer(self, layer: int, ids: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Return the hits [n_used] of a layer; fetches what they let expect of the next."""
        hits: NDArray[np.bool_] = self.residency.present[layer, ids]
        keys = ids.astype(np.int64) + layer * self._n_experts
        self._arrive()
        self._hint(self.residency.guess_layer(layer + 1), keys)
        return hits

    def _hint(self, guessed: NDArray[np.int64], needed: NDArray[np.int64]) -> None:
        moves = self.residency.hint(guessed, needed)
        self.copied += [move.key for move in moves]
        self.residency.arrived(moves)

    def _arrive(self) -> None:
        self.residency.arrived(self._late)
        self._late = []

    def _landed(self, routing: NDArray[np.uint32], hits: NDArray[np.bool_]) -> list[int]:
        """Return the first misses of each layer, by rank, as many as have a place to land."""
        missed = ~hits
        lands = missed & (missed.cumsum(axis=1) <= self._transfers.n_landing)
        layers, ranks = np.nonzero(lands)
        return [int(key) for key in layers * self._n_experts + routing[layers, ranks]]


# ----- the most hits there can be -----


def belady_hits(
    routing: NDArray[np.uint32],
    space: KeySpace,
    pools: Sequence[PoolSpec],
    initial: NDArray[np.bool_] | None = None,
) -> NDArray[np.int64]:
    """Return the hits of each token in each layer, [n_tokens, n_layers], at most.

    That is Belady's optimum (IBM Systems Journal 5, 1966), which knows the future, for a cache that
    is filled between tokens. A token's hits are judged by what is held when it begins. After it,
    the cache may keep any of what it held and what the token used, so it promotes on demand only
    and may let an expert pass by. Every use then opens an interval that lasts to the expert's next
    use; a slot holds one interval at a time, and each interval kept is a hit. Dropping the one that
    ends last whenever there are too many keeps the most of them. Residents, profiles and pins,
    which bring experts in ahead of need, are bound by it only if they are given as `initial`.

    `routing` is [n_tokens, n_layers, n_used]. `initial` [n_layers, n_experts] are held when the
    first token begins; empty without. Floors of pools do not bind the optimum.
    """
    numbers = space.keys_of(routing)
    upcoming, first = _next_uses(numbers, space)
    held = np.full(space.n_keys, NEVER)  # when a held expert is used next; NEVER: not held
    if initial is not None:
        held = np.where(initial.reshape(-1), first, NEVER)
    by_layer = held.reshape(space.n_layers, space.n_experts)
    batches = _batches(space, pools)
    hits = np.empty(routing.shape[:2], np.int64)
    for token, keys in enumerate(numbers):
        hits[token] = np.count_nonzero(held[keys] != NEVER, axis=1)
        held[keys] = upcoming[token]
        for layers, capacity in batches:
            rows = by_layer[layers].reshape(len(layers), -1)
            by_layer[layers] = _nearest(rows, capacity).reshape(*layers.shape, -1)
    return hits


def first_uses(
    routing: NDArray[np.uint32], space: KeySpace, initial: NDArray[np.bool_] | None = None
) -> NDArray[np.int64]:
    """Return how many different experts each layer uses, [n_layers], those held initially left out.

    So many misses no cache avoids that is filled on demand.
    """
    used = np.zeros((space.n_layers, space.n_experts), np.bool_)
    used.reshape(-1)[space.keys_of(routing)] = True
    if initial is not None:
        used &= ~initial
    return np.asarray(np.count_nonzero(used, axis=1), np.int64)


def _next_uses(
    numbers: NDArray[np.int64], space: KeySpace
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return when each used expert is used next, as `numbers`; when each is used first, [n_keys].

    A use is token * n_keys + key: in order of time, and no two are equal. NEVER: not again.
    """
    upcoming = np.empty_like(numbers)
    following = np.full(space.n_keys, NEVER)
    for token in range(len(numbers) - 1, -1, -1):
        keys = numbers[token]
        upcoming[token] = following[keys]
        following[keys] = token * space.n_keys + keys
    return upcoming, following


def _batches(space: KeySpace, pools: Sequence[PoolSpec]) -> list[Batch]:
    """Group pools of one shape, to be handled at once; layers without a pool hold nothing."""
    groups: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for pool in pools:
        groups.setdefault((len(pool.layers), pool.capacity), []).append(pool.layers)
    without = set(range(space.n_layers)) - {layer for pool in pools for layer in pool.layers}
    if without:
        groups[1, 0] = [(layer,) for layer in sorted(without)]
    return [(np.array(layers, np.int64), capacity) for (_, capacity), layers in groups.items()]


def _nearest(rows: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Return each row with all but its `capacity` smallest entries made NEVER."""
    if capacity == 0:
        return np.full_like(rows, NEVER)
    if capacity >= rows.shape[1]:
        return rows
    last = np.partition(rows, capacity - 1, axis=1)[:, capacity - 1 : capacity]
    return np.where(rows > last, NEVER, rows)


def ceiling(
    trace: Trace, pools: Sequence[PoolSpec], start: NDArray[np.bool_] | None = None
) -> NDArray[np.int64]:
    """Return the most hits of each layer, [n_layers], for a cache that holds `start` at first."""
    if _holds_all(trace, pools):
        n_uses = trace.n_tokens * trace.header.n_used
        return np.full(trace.header.n_layers, n_uses, np.int64)
    hits = belady_hits(trace.routing, trace.space, pools, start)
    return np.asarray(hits.sum(axis=0), np.int64)


class Misses(NamedTuple):
    """Splits misses by where they come from; together they are all misses."""

    compulsory: int  # first use of an expert that was not there from the start
    capacity: int  # any others that Belady's optimum with as many slots has too
    policy: int  # the rest. Negative where pins and residents beat what can be had on demand


def misses(result: SimulationResult, best: NDArray[np.int64]) -> Misses:
    """Split a result's misses; `best` [n_layers] is the `ceiling` of the same pools and start."""
    trace = result.trace
    n_uses = trace.n_tokens * trace.header.n_used * trace.header.n_layers
    n_misses, least = n_uses - int(result.layer_hits.sum()), n_uses - int(best.sum())
    compulsory = int(first_uses(trace.routing, trace.space, result.start).sum())
    return Misses(compulsory, least - compulsory, n_misses - least)


def _holds_all(trace: Trace, pools: Sequence[PoolSpec]) -> bool:
    slots = sum(min(pool.capacity, len(pool.layers) * trace.header.n_experts) for pool in pools)
    return slots == trace.space.n_keys


# ----- many replays of one trace -----


@dataclass(frozen=True, eq=False)
class Rung:
    """Holds the results for one number of slots per layer."""

    slots: int
    own: dict[PolicyName, SimulationResult]  # each layer with slots of its own, as all but `shared`
    exact: SimulationResult  # a forecast that knows exactly what the next token uses
    chosen: SimulationResult  # the main policy
    shared: SimulationResult  # likewise, but slots are shared by layers of one size
    own_best: NDArray[np.int64]  # [n_layers]: hits of Belady's optimum
    shared_best: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Sweep:
    """Holds all results; `main` is the policy looked at closely."""

    trace: Trace
    main: PolicyName
    rungs: tuple[Rung, ...]  # by rising slots
    # Of all that was chosen, by slots, whatever the rungs; empty: too short a trace.
    curve: dict[int, SimulationResult]


class _Job(NamedTuple):
    slots: int
    allocation: SlotSharing
    settings: CacheSettings
    transfers: Transfers
    knows_next: bool = False


@dataclass(frozen=True)
class Wanted:
    """Says which caches to try on a trace; `settings(policy, slots)` are the rest of each.

    `main` is looked at closely, or the first of `policies` where it is none of them; `curve` are
    the slots that `bend_of_curve` chooses from.
    """

    slots: Sequence[int]  # per layer
    policies: Sequence[PolicyName]
    settings: Callable[[PolicyName, int], CacheSettings]
    main: PolicyName
    curve: Sequence[int] = ()
    transfers: Transfers = PLAIN


def ladder(n_experts: int, n_used: int) -> tuple[int, ...]:
    """Return slots per layer worth a look: what a token uses, doubled up to half, 3/4, all."""
    doubled = (n_used << power for power in range(n_experts.bit_length()))
    counts = {n_experts, n_experts // 2, n_experts * 3 // 4}
    counts.update(count for count in doubled if count <= n_experts // 2)
    return tuple(sorted(count for count in counts if count >= n_used))


def run_sweep(trace: Trace, wanted: Wanted, progress: Progress | None = None) -> Sweep:
    """Replay `trace` for each number of slots and policy."""
    main = wanted.main if wanted.main in wanted.policies else wanted.policies[0]

    def job(n_slots: int, policy: PolicyName = main, sharing: SlotSharing = "layer") -> _Job:
        return _Job(n_slots, sharing, wanted.settings(policy, n_slots), wanted.transfers)

    def shared(n_slots: int) -> _Job:
        return job(n_slots, sharing="global")

    def exact(n_slots: int) -> _Job:
        return job(n_slots, "forecast")._replace(knows_next=True)

    slots = sorted(set(wanted.slots))
    curve = sorted(wanted.curve) if trace.n_tokens >= ENOUGH_TOKENS else []
    jobs = [*map(shared, slots), *map(exact, slots)]  # the slowest first
    jobs += [job(n, policy) for n in slots for policy in wanted.policies]
    jobs = list(dict.fromkeys([*jobs, *map(job, curve)]))
    results: dict[_Job, SimulationResult] = {}
    with _replays(trace, jobs) as replies:
        for done, result in replies:
            results[done] = replace(result, trace=trace)  # a process has a copy of its own
            if progress is not None:
                progress(len(results), len(jobs))
    rungs = []
    for n in slots:
        own = {policy: results[job(n, policy)] for policy in wanted.policies}
        chosen, of_all = results[job(n)], results[shared(n)]
        own_best = ceiling(trace, _pools(trace, n, "layer"), chosen.start)
        shared_best = ceiling(trace, _pools(trace, n, "global"), of_all.start)
        rungs.append(Rung(n, own, results[exact(n)], chosen, of_all, own_best, shared_best))
    return Sweep(trace, main, tuple(rungs), {n: results[job(n)] for n in curve})


def bend_of_curve(sweep: Sweep) -> int | None:
    """Return the slots per layer with the most hits above what as many random experts would have.

    Random ones serve slots / n_experts of the uses, so this is where the curve of the main
    policy bends: fewer give up slots that earn more than an average one, more add such as earn
    less. All experts: it does not bend. None: there is no curve.
    """
    n_experts, curve = sweep.trace.header.n_experts, sweep.curve
    return max(curve, key=lambda n: curve[n].hit_rate - n / n_experts, default=None)


def _pools(trace: Trace, n_slots: int, allocation: SlotSharing) -> tuple[PoolSpec, ...]:
    header = trace.header
    return make_pools([n_slots] * header.n_layers, header.span_bytes, header.n_used, allocation)


def _replay(trace: Trace, job: _Job) -> tuple[_Job, SimulationResult]:
    pools = _pools(trace, job.slots, job.allocation)
    table = KnowsNext(trace) if job.knows_next else None
    return job, simulate(trace, job.settings, pools, transfers=job.transfers, table=table)


@contextmanager
def _replays(
    trace: Trace, jobs: Sequence[_Job]
) -> Iterator[Iterator[tuple[_Job, SimulationResult]]]:
    """Yield the results of jobs as they are done, in any order."""
    n_workers, replay = min(len(os.sched_getaffinity(0)), len(jobs)), partial(_replay, trace)
    if n_workers == 1 or trace.routing.size * len(jobs) < SERIAL_USES:
        yield map(replay, jobs)
        return
    # A fresh interpreter each: forking a process that has threads (a progress bar) can hang.
    context = multiprocessing.get_context("spawn")
    resource_tracker.ensure_running()  # on starting, it would lift the mask below
    # Workers inherit the mask, so that Ctrl-C reaches the parent alone, which ends them.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        pool = context.Pool(n_workers)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    with pool:
        yield pool.imap_unordered(replay, jobs)
