"""One trace replayed with many numbers of slots and policies, and how many slots pay off.

Long sweeps use all cores: the replays know nothing of each other.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.decide.settings import (
    Allocation,
    CacheSettings,
    PolicyName,
    PoolSpec,
    PredictorName,
    make_pools,
)
from vkmoe.experts.decide.worth import PredictionCounts
from vkmoe.experts.simulate import PLAIN, SimulationResult, Transfers, ceiling, simulate
from vkmoe.experts.study.trace import Trace

__all__ = ["ENOUGH_TOKENS", "GUESSES", "Rung", "Sweep", "bend_of_curve", "ladder", "run_sweep"]

ENOUGH_TOKENS = 200  # with fewer, the first use of each expert hides where the curve bends
SERIAL_USES = 200_000  # of experts in all replays, below which starting processes costs more

Progress = Callable[[int, int], None]  # replays done, replays in all
# Of a result all but the trace, which every process has.
Replies = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_], int, PredictionCounts]
GUESSES: tuple[PredictorName, ...] = ("none", "previous", "correlation", "frequency")


@dataclass(frozen=True, eq=False)
class Rung:
    """The results for one number of slots per layer."""

    slots: int
    own: dict[PolicyName, SimulationResult]  # each layer with slots of its own
    shared: SimulationResult  # slots shared by layers of one size, the sweep's main policy
    own_best: NDArray[np.int64]  # [n_layers]: hits of Belady's optimum
    shared_best: NDArray[np.int64]
    unweighed: SimulationResult  # main policy, nobody guessed and every missed expert let in
    guessing: dict[PredictorName, SimulationResult]  # main policy with each predictor


@dataclass(frozen=True, eq=False)
class Sweep:
    """All results; `main` is the policy looked at closely."""

    trace: Trace
    main: PolicyName
    rungs: tuple[Rung, ...]  # by rising slots
    curve: dict[int, SimulationResult]  # of `main` by slots, whatever the rungs; empty: too short
    settings: CacheSettings  # of the first rung, with `main`


class _Job(NamedTuple):
    slots: int
    allocation: Allocation
    settings: CacheSettings
    transfers: Transfers


class _Jobs(NamedTuple):
    """What there is to replay, by what it is for."""

    settings: Callable[[PolicyName, int], CacheSettings]
    main: PolicyName
    transfers: Transfers

    def own(self, n_slots: int, policy: PolicyName) -> _Job:
        return _Job(n_slots, "layer", self.settings(policy, n_slots), self.transfers)

    def shared(self, n_slots: int) -> _Job:
        return self.own(n_slots, self.main)._replace(allocation="global")

    def guessing(self, n_slots: int, name: PredictorName) -> _Job:
        job = self.own(n_slots, self.main)
        return job._replace(settings=replace(job.settings, predictor=name))

    def unweighed(self, n_slots: int) -> _Job:
        job = self.own(n_slots, self.main)
        return job._replace(settings=replace(job.settings, predictor="none", admission=False))


def ladder(n_experts: int, n_used: int) -> tuple[int, ...]:
    """Slots per layer worth looking at: what a token uses, doubled up to half of all, 3/4, all."""
    counts = {n_experts, max(1, n_experts // 2), max(1, n_experts * 3 // 4)}
    n = n_used
    while n <= n_experts // 2:
        counts.add(n)
        n *= 2
    return tuple(sorted(count for count in counts if count >= n_used))


def run_sweep(
    trace: Trace,
    slots: Sequence[int],
    settings: Callable[[PolicyName, int], CacheSettings],
    policies: Sequence[PolicyName],
    progress: Progress | None = None,
    *,
    main: PolicyName = "slru",
    curve: Sequence[int] = (),
    transfers: Transfers = PLAIN,
) -> Sweep:
    """Replay `trace` for each number of slots and policy; `settings(policy, slots)` are the rest.

    `main` is looked at closely, or the first of `policies` where it is none of them; `curve` are
    the slots that `bend_of_curve` chooses from.
    """
    if main not in policies:
        main = policies[0]
    slots = sorted(set(slots))
    if trace.n_tokens < ENOUGH_TOKENS:
        curve = ()
    jobs = _Jobs(settings, main, transfers)
    wanted = [jobs.shared(n) for n in slots]  # the slowest first
    wanted += [jobs.own(n, policy) for n in slots for policy in policies]
    wanted += [jobs.guessing(n, name) for n in slots for name in GUESSES]
    wanted += [jobs.unweighed(n) for n in slots] + [jobs.own(n, main) for n in curve]
    wanted = list(dict.fromkeys(wanted))
    results = {}
    with _replays(trace, wanted) as replies:
        for job, reply in replies:
            results[job] = SimulationResult(trace, *reply)
            if progress is not None:
                progress(len(results), len(wanted))
    rungs = tuple(_rung(trace, n, jobs, policies, results) for n in slots)
    points = {n: results[jobs.own(n, main)] for n in sorted(curve)}
    return Sweep(trace, main, rungs, points, settings(main, slots[0]))


def _rung(
    trace: Trace,
    n_slots: int,
    jobs: _Jobs,
    policies: Sequence[PolicyName],
    results: Mapping[_Job, SimulationResult],
) -> Rung:
    own = {policy: results[jobs.own(n_slots, policy)] for policy in policies}
    shared = results[jobs.shared(n_slots)]
    return Rung(
        n_slots,
        own,
        shared,
        ceiling(trace, _pools(trace, n_slots, "layer"), own[jobs.main].start),
        ceiling(trace, _pools(trace, n_slots, "global"), shared.start),
        results[jobs.unweighed(n_slots)],
        {name: results[jobs.guessing(n_slots, name)] for name in GUESSES},
    )


def bend_of_curve(sweep: Sweep) -> int | None:
    """The slots per layer with the most hits above what as many experts picked blindly would have.

    Blindly picked ones serve slots / n_experts of the uses, so this is where the curve of the main
    policy bends: fewer give up slots that earn more than an average one, more add such as earn
    less. All experts: it does not bend. None: there is no curve.
    """
    n_experts, curve = sweep.trace.header.n_experts, sweep.curve
    return max(curve, key=lambda n: curve[n].hit_rate - n / n_experts, default=None)


# ----- replaying -----


def _pools(trace: Trace, n_slots: int, allocation: Allocation) -> tuple[PoolSpec, ...]:
    header = trace.header
    return make_pools([n_slots] * header.n_layers, header.span_bytes, header.n_used, allocation)


def _replay(trace: Trace, job: _Job) -> tuple[_Job, Replies]:
    pools = _pools(trace, job.slots, job.allocation)
    found = simulate(trace, job.settings, pools, transfers=job.transfers)
    return job, (found.hits, found.n_promoted, found.start, found.n_landed, found.guesses)


@contextmanager
def _replays(trace: Trace, jobs: Sequence[_Job]) -> Iterator[Iterator[tuple[_Job, Replies]]]:
    """The results of jobs as they are done, in any order."""
    n_workers = min(len(os.sched_getaffinity(0)), len(jobs))
    if n_workers == 1 or trace.routing.size * len(jobs) < SERIAL_USES:
        yield (_replay(trace, job) for job in jobs)
        return
    # A fresh interpreter each: forking a process that has threads (a progress bar) can hang.
    context = multiprocessing.get_context("spawn")
    resource_tracker.ensure_running()  # on starting, it would lift the mask below
    with ExitStack() as stack:
        with _ctrl_c_waits():
            pool = stack.enter_context(context.Pool(n_workers, _begin_worker, (trace,)))
        yield pool.imap_unordered(_replay_in_worker, jobs)


@contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """Ctrl-C takes effect at the end. Processes begun meanwhile never hear of it: they inherit
    the mask, and the parent ends them.
    """
    # The mask is this thread's alone: one of NumPy's may take the signal, hence the handler.
    caught: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: caught.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
        if caught:
            signal.raise_signal(signal.SIGINT)


_trace_of_worker: list[Trace] = []


def _begin_worker(trace: Trace) -> None:
    _trace_of_worker.append(trace)


def _replay_in_worker(job: _Job) -> tuple[_Job, Replies]:
    return _replay(_trace_of_worker[0], job)
