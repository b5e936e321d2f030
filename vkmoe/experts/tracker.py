"""Follows which experts the tokens use, in every mode: counts, profile, and the cache if there is
one.

The engine brackets each submit with `begin_token` and `end_token`. Where all experts are resident,
or all are at home, nothing moves and only the counting is left.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.cache import ExpertCache
from vkmoe.experts.profiler import ExpertProfiler
from vkmoe.experts.residency import Residency
from vkmoe.experts.table import ExpertTable

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
    ) -> None:
        """Without a cache, `on_device` says where all experts are. `checks` is for tests."""
        self.residency, self.cache = residency, cache
        self.profiler = ExpertProfiler(residency.space, layer_numbers)
        self._table, self._on_device, self._checks = table, on_device, checks
        self._note_pins()

    def begin_token(self) -> int:
        """The number to end the next submit with. Raises DeviceLostError.

        Must hold: no submit is in flight, not even one that was interrupted.
        """
        self._table.end_all()
        return self.cache.begin_token() if self.cache is not None else self._table.begin()

    def end_token(self, reader: int, routing: NDArray[np.uint32]) -> None:
        """That submit is over; it used `routing` [n MoE layers, n_used], which is kept.

        One that was interrupted or failed needs no ending: what it used is not known.
        """
        if self.cache is not None:
            self.profiler.record(routing, self.cache.end_token(reader, routing))
        else:
            self._table.end(reader)
            self.residency.use(routing)
            self.profiler.record(routing, self._on_device)
        self._note_pins()
        if self._checks and self.cache is not None:
            self.cache.check_integrity()

    def _note_pins(self) -> None:
        if self.residency.warm_at == self.residency.n_tokens:
            self.profiler.mark_warm(self.residency.pinned)
