"""Follows which experts the tokens use, in every mode: counts, profile, and the cache if there is
one.

The engine brackets each submit with `begin` and `end`, and tells `after_token` what was used. Where
all experts are resident, or all are at home, nothing moves and only the counting is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.cache import ExpertCache
from vkmoe.experts.decide.residency import Residency
from vkmoe.experts.records.overlap import Interval, Overlap
from vkmoe.experts.records.profiler import ExpertProfiler
from vkmoe.experts.store.copies import CopyBudget
from vkmoe.experts.store.table import ExpertTable

__all__ = ["ExpertTracker"]


class ExpertTracker:
    """What the host does about experts between two submits."""

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
        """Without a cache, `on_device` says where all experts are. `checks` is for tests.

        `budget` and `overlap` are told of tokens; they are there where copies overlap with these.
        """
        self.residency, self.cache = residency, cache
        self.profiler = ExpertProfiler(residency.space, layer_numbers)
        self._table, self._on_device, self._checks = table, on_device, checks
        self._budget, self.overlap = budget, overlap
        self._host_ns = 0  # of the last token
        self._began_ns = 0  # the last submit
        self._note_pins()

    def begin(self, first: bool = True) -> int:
        """The number to end the next submit with, of a token's `first` or a later one.

        Raises DeviceLostError.

        Must hold: no submit is in flight, not even one that was interrupted.
        """
        self._table.end_all()
        reader = self.cache.begin(first) if self.cache is not None else self._table.begin()
        self._began_ns = perf_counter_ns()
        return reader

    def end(self, reader: int) -> None:
        """That submit is over. One that was interrupted or failed needs no ending."""
        if self.cache is not None and self.cache.pool is not None:
            self.cache.pool.computed((self._began_ns, perf_counter_ns()))
        self._table.end(reader)

    def timed(self, submits: Sequence[Interval], host: Interval) -> None:
        """A token is over that ran in these submits, between `host`'s begin and end.

        In nanoseconds of the device's and of the host's clock. To be told before `after_token`.
        """
        self._host_ns = host[1] - host[0]
        if self.overlap is not None:
            self.overlap.computed(submits, host)

    def need(self, layer: int, experts: NDArray[np.uint32]) -> None:
        """The next submit uses these experts [n_used] of a MoE layer: have them where it can read.

        Raises ModelFileError where they have to be read from the file and cannot.
        """
        if self.cache is not None:
            self.cache.need(layer, experts)

    def after_token(
        self, routing: NDArray[np.uint32], filled: NDArray[np.bool_] | None = None
    ) -> None:
        """A token is over; it used `routing` [n MoE layers, n_used], which is kept.

        `filled` [n MoE layers, n_used]: who was stored where it was to land; None: nobody.
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
            self.profiler.mark_warm(self.residency.pinned)
