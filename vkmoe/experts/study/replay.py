"""Replays a trace through the engine's own decisions, once or for many caches, without a GPU.

`simulate` gives hit counts equal to the engine's for the same routing, settings and pools; `misses`
tells where misses come from, by comparing them with Belady's optimum (belady.py). `run_sweep`
replays one trace with many numbers of slots and policies; long sweeps use all cores, as the replays
know nothing of each other. `bend_of_curve` says how many slots pay off.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import resource_tracker
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.choices import PolicyName, SlotSharing
from vkmoe.experts.decide.locations import Move
from vkmoe.experts.decide.residency import Residency
from vkmoe.experts.decide.settings import CacheSettings, PoolSpec, make_pools
from vkmoe.experts.study.belady import belady_hits, first_uses
from vkmoe.experts.study.trace import Trace

__all__ = [
    "ENOUGH_TOKENS",
    "PLAIN",
    "Misses",
    "Rung",
    "SimulationResult",
    "Sweep",
    "Transfers",
    "Wanted",
    "bend_of_curve",
    "ceiling",
    "ladder",
    "misses",
    "run_sweep",
    "simulate",
]

ENOUGH_TOKENS = 200  # with fewer, the first use of each expert hides where the curve bends
SERIAL_USES = 200_000  # of experts in all replays, below which starting processes costs more
Progress = Callable[[int, int], None]  # replays done, replays in all


class Transfers(NamedTuple):
    """Says how experts get into slots. By default all that was decided is there in time."""

    late: bool = False  # copies are not there for the next submit, but for the one after it
    n_landing: int = 0  # missed experts of a layer that are in a slot for having been read


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
    def layer_rates(self) -> NDArray[np.float64]:
        """Return hits per use of each layer, from 0 to 1."""
        return self.layer_hits / (self.trace.n_tokens * self.trace.header.n_used)

    @property
    def hit_rate(self) -> float:
        """Return hits per use of all layers, from 0 to 1."""
        return float(self.layer_rates.mean())

    @property
    def worst_rate(self) -> float:
        """Return hits per use of the layer with the fewest."""
        return float(self.layer_rates.min())

    @property
    def decode_rate(self) -> float | None:
        """Return hits per use of the tokens after the prompts; None if there are none."""
        decode = self.hits[~self.trace.is_prompt]
        return float(decode.mean()) / self.trace.header.n_used if decode.size else None

    @property
    def read_bytes(self) -> float:
        """Return the bytes a token reads at home because experts have no slot, on average."""
        n_uses = self.trace.n_tokens * self.trace.header.n_used
        return self._per_token(n_uses - self.layer_hits)

    @property
    def copied_bytes(self) -> float:
        """Return the bytes copied into slots per token, on average."""
        return self._per_token(self.n_promoted)

    def _per_token(self, counts: NDArray[np.int64]) -> float:
        return float(counts @ np.array(self.trace.header.span_bytes)) / self.trace.n_tokens


class Misses(NamedTuple):
    """Splits misses by where they come from; together they are all misses."""

    compulsory: int  # first use of an expert that was not there from the start
    capacity: int  # any others that Belady's optimum with as many slots has too
    policy: int  # the rest. Negative where pins and residents beat what can be had on demand


def simulate(
    trace: Trace,
    settings: CacheSettings,
    pools: Sequence[PoolSpec],
    seed: NDArray[np.float64] | None = None,
    transfers: Transfers = PLAIN,
) -> SimulationResult:
    """Replay a trace on an empty cache; `seed` is a profile's counts, as `Residency` takes them.

    In stepped mode a layer is a submit, so that guesses of the next one are there in time.
    All sequences go through one cache, one after the other. A cache with room for all experts of
    all layers is none: they are resident in place, and every use is a hit.
    """
    space, n_used = trace.space, trace.header.n_used
    if _holds_all(trace, pools):
        hits = np.full((trace.n_tokens, space.n_layers), n_used, np.int64)
        everything = np.ones((space.n_layers, space.n_experts), np.bool_)
        return SimulationResult(trace, hits, np.zeros(space.n_layers, np.int64), everything)
    replay = _Replay(Residency(space, pools, settings, seed), transfers)
    start = replay.residency.present
    hits = np.empty((trace.n_tokens, space.n_layers), np.int64)
    for token, routing in enumerate(trace.routing):
        if token in trace.starts:
            replay.residency.reset_predictions()
        hits[token] = replay.token(routing)
    layers = np.array(replay.copied, np.int64) // space.n_experts
    n_copied = np.bincount(layers, minlength=space.n_layers)
    return SimulationResult(trace, hits, n_copied, start, replay.n_landed)


class _Replay:
    """Runs a cache whose copies land when their time has come."""

    def __init__(self, residency: Residency, transfers: Transfers) -> None:
        self.residency, self._transfers = residency, transfers
        self._stepped = residency.settings.executor == "stepped"
        self._n_experts = residency.space.n_experts
        self._late: list[Move] = []
        self.copied: list[int] = []
        self.n_landed = 0
        moves = residency.start()
        residency.arrived(moves)
        self.copied += [move.key for move in moves]

    def token(self, routing: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Run a token; returns its hits [n_layers]."""
        residency, transfers = self.residency, self._transfers
        if self._stepped:
            hits = np.stack([self._layer(layer, ids) for layer, ids in enumerate(routing)])
        else:
            hits = residency.hits(routing)
        missed = self._missed(routing, hits) if transfers.n_landing else []
        residency.observe(routing[None])
        moves = residency.decide(missed)
        kept = [move for move in moves if move.landed]
        self.n_landed += len(kept)
        residency.arrived(kept)
        copies = [move for move in moves if not move.landed]
        self.copied += [move.key for move in copies]
        residency.arrived(self._late)
        self._late = copies
        if not transfers.late:
            self._arrive()
        return np.asarray(np.count_nonzero(hits, axis=1), np.int64)

    def _layer(self, layer: int, ids: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Return the hits [n_used] of a layer; fetches what they let expect of the next."""
        hits: NDArray[np.bool_] = self.residency.present[layer, ids]
        keys = ids.astype(np.int64) + layer * self._n_experts
        self._arrive()
        guessed = self.residency.guess_next_layer(layer, ids)
        moves = self.residency.hint(guessed, keys)
        self.copied += [move.key for move in moves]
        self.residency.arrived(moves)
        return hits

    def _arrive(self) -> None:
        self.residency.arrived(self._late)
        self._late = []

    def _missed(self, routing: NDArray[np.uint32], hits: NDArray[np.bool_]) -> list[int]:
        """Return the first misses of each layer, by rank, as many as have a place to land."""
        missed = ~hits
        lands = missed & (missed.cumsum(axis=1) <= self._transfers.n_landing)
        layers, ranks = np.nonzero(lands)
        return [int(key) for key in layers * self._n_experts + routing[layers, ranks]]


def ceiling(
    trace: Trace, pools: Sequence[PoolSpec], start: NDArray[np.bool_] | None = None
) -> NDArray[np.int64]:
    """Return the most hits of each layer, [n_layers], for a cache that holds `start` at first."""
    if _holds_all(trace, pools):
        n_uses = trace.n_tokens * trace.header.n_used
        return np.full(trace.header.n_layers, n_uses, np.int64)
    hits = belady_hits(trace.routing, trace.space, pools, start)
    return np.asarray(hits.sum(axis=0), np.int64)


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


@dataclass(frozen=True, eq=False)
class Rung:
    """Holds the results for one number of slots per layer."""

    slots: int
    own: dict[PolicyName, SimulationResult]  # each layer with slots of its own
    shared: SimulationResult  # slots shared by layers of one size, the sweep's main policy
    own_best: NDArray[np.int64]  # [n_layers]: hits of Belady's optimum
    shared_best: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Sweep:
    """Holds all results; `main` is the policy looked at closely."""

    trace: Trace
    main: PolicyName
    rungs: tuple[Rung, ...]  # by rising slots
    curve: dict[int, SimulationResult]  # of `main` by slots, whatever the rungs; empty: too short


class _Job(NamedTuple):
    slots: int
    allocation: SlotSharing
    settings: CacheSettings
    transfers: Transfers


@dataclass(frozen=True)
class Wanted:
    """Says which caches to try on a trace; `settings(policy, slots)` are the rest of each.

    `main` is looked at closely, or the first of `policies` where it is none of them; `curve` are
    the slots that `bend_of_curve` chooses from.
    """

    slots: Sequence[int]  # per layer
    policies: Sequence[PolicyName]
    settings: Callable[[PolicyName, int], CacheSettings]
    main: PolicyName = "slru"
    curve: Sequence[int] = ()
    transfers: Transfers = PLAIN

    def own(self, n_slots: int, policy: PolicyName) -> _Job:
        return _Job(n_slots, "layer", self.settings(policy, n_slots), self.transfers)

    def shared(self, n_slots: int) -> _Job:
        return self.own(n_slots, self.main)._replace(allocation="global")


def ladder(n_experts: int, n_used: int) -> tuple[int, ...]:
    """Return slots per layer worth a look: what a token uses, doubled up to half, 3/4, all."""
    counts = {n_experts, max(1, n_experts // 2), max(1, n_experts * 3 // 4)}
    n = n_used
    while n <= n_experts // 2:
        counts.add(n)
        n *= 2
    return tuple(sorted(count for count in counts if count >= n_used))


def run_sweep(trace: Trace, wanted: Wanted, progress: Progress | None = None) -> Sweep:
    """Replay `trace` for each number of slots and policy."""
    main = wanted.main if wanted.main in wanted.policies else wanted.policies[0]
    wanted = replace(wanted, main=main)
    slots = sorted(set(wanted.slots))
    curve = sorted(wanted.curve) if trace.n_tokens >= ENOUGH_TOKENS else []
    jobs = [wanted.shared(n) for n in slots]  # the slowest first
    jobs += [wanted.own(n, policy) for n in slots for policy in wanted.policies]
    jobs += [wanted.own(n, main) for n in curve]
    jobs = list(dict.fromkeys(jobs))
    results: dict[_Job, SimulationResult] = {}
    with _replays(trace, jobs) as replies:
        for job, result in replies:
            results[job] = replace(result, trace=trace)  # a process has a copy of its own
            if progress is not None:
                progress(len(results), len(jobs))
    rungs = tuple(_rung(trace, n, wanted, results) for n in slots)
    return Sweep(trace, main, rungs, {n: results[wanted.own(n, main)] for n in curve})


def _rung(
    trace: Trace, n_slots: int, wanted: Wanted, results: Mapping[_Job, SimulationResult]
) -> Rung:
    own = {policy: results[wanted.own(n_slots, policy)] for policy in wanted.policies}
    shared = results[wanted.shared(n_slots)]
    return Rung(
        n_slots,
        own,
        shared,
        ceiling(trace, _pools(trace, n_slots, "layer"), own[wanted.main].start),
        ceiling(trace, _pools(trace, n_slots, "global"), shared.start),
    )


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
    return job, simulate(trace, job.settings, pools, transfers=job.transfers)


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
