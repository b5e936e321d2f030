"""Keeps when the last runs began and ended, and what each spent its time on, in nanoseconds.

Noting a run is a few additions, so that it is always done; what follows from it is added up when
asked. Says nothing in words: that is view/why.py.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import NamedTuple

from vkmoe.experts.records.profiler import Interval

MAX_RUNS = 65  # that are remembered: differences between 64 pairs
MAX_GAP_NS = 1_000_000_000  # between two runs of a reply; more is time in which nothing was asked


class Totals(NamedTuple):
    """Holds totals since the start, of experts that runs missed, and of waiting for them."""

    missed_bytes: int
    copies_ns: int  # waited for copies into slots
    file_ns: int  # waited for the model file


class Computing(NamedTuple):
    """Says how long was computed; the last two are totals since the start, by the host's clock."""

    intervals: list[Interval]  # submits of the last run, by the device's clock, if that is known
    n_submits: int  # of the last run
    submitted_ns: int  # from submitting to the end
    cpu_ns: int  # the CPU computed experts beside a GPU

    @property
    def device_ns(self) -> int | None:
        """Return how long the device computed in the last run; None: not known."""
        if not self.n_submits or len(self.intervals) < self.n_submits:
            return None
        return sum(end - begin for begin, end in self.intervals)

    @property
    def span_ns(self) -> int | None:
        """Return how long the last run took from the first submit's begin to the last one's end."""
        return None if self.device_ns is None else self.intervals[-1][1] - self.intervals[0][0]


class Step(NamedTuple):
    """Says what a run that decoded took, from the end of the run before it to its own end."""

    n_rows: int  # tokens that it decoded
    total_ns: int
    device_ns: int | None
    submitted_ns: int
    cpu_ns: int
    copies_ns: int
    file_ns: int
    missed_bytes: int


class _Run(NamedTuple):
    """Notes a run; `totals` and the last two of `computing` are sums of all runs so far."""

    n_decoded: int  # rows; 0: a prompt
    began_ns: int
    ended_ns: int
    computing: Computing
    totals: Totals


class RunTimes:
    """Remembers the last runs."""

    def __init__(self) -> None:
        """Begin with no runs."""
        self._runs: deque[_Run] = deque(maxlen=MAX_RUNS)

    def note(
        self, n_decoded: int, host: tuple[int, int], computing: Computing, totals: Totals
    ) -> None:
        """Note a run between begin and end by the `host`'s clock; 0 decoded rows: a prompt."""
        self._runs.append(_Run(n_decoded, host[0], host[1], computing, totals))

    def steps(self) -> list[Step]:
        """Return what the runs that decoded took, in order.

        The first run that is remembered is left out, as nothing is known of what was before it.
        """
        return [_step(before, run) for before, run in pairwise(self._runs) if run.n_decoded]


def _step(before: _Run, run: _Run) -> Step:
    gap_ns = run.began_ns - before.ended_ns
    took_ns = run.ended_ns - run.began_ns
    return Step(
        run.n_decoded,
        took_ns + (gap_ns if gap_ns < MAX_GAP_NS else 0),
        run.computing.device_ns,
        run.computing.submitted_ns - before.computing.submitted_ns,
        run.computing.cpu_ns - before.computing.cpu_ns,
        run.totals.copies_ns - before.totals.copies_ns,
        run.totals.file_ns - before.totals.file_ns,
        run.totals.missed_bytes - before.totals.missed_bytes,
    )
