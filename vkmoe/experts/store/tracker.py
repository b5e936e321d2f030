"""Does what the host has to do about experts round the submits of a run, and counts their uses.

That is done also where nothing moves. What moves, and how, is the subject of cache.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts import _residency
from vkmoe.experts.decide.keys import NO_KEYS, Keys, Mask
from vkmoe.experts.decide.residency import Residency
from vkmoe.experts.decide.token_table import Upcoming
from vkmoe.experts.records.profiler import ExpertProfiler, Interval, Overlap, Tally
from vkmoe.experts.records.timing import Totals
from vkmoe.experts.records.watch import ExpertWatch
from vkmoe.experts.store.cache import ExpertCache
from vkmoe.experts.store.table import ExpertTable


class ExpertTracker:
    """Does what the host has to do about experts round the submits of a run (`HostActions`)."""

    def __init__(
        self,
        layer_numbers: Sequence[int],
        table: ExpertTable,
        residency: Residency,
        cache: ExpertCache | None = None,
        resident: Mask | None = None,
        checks: bool = False,
        absent_bytes: Keys = NO_KEYS,
    ) -> None:
        """Begin to count; `checks`: in tests.

        No cache: `resident` [n_layers] marks the layers whose experts are on the device, and
        `absent_bytes` [n_layers] are those of an expert of the others.
        """
        self.residency, self.cache = residency, cache
        self.profiler = ExpertProfiler(residency.space, layer_numbers)
        self._table, self._checks = table, checks
        self._resident = np.zeros(len(layer_numbers), np.bool_) if resident is None else resident
        self._host_ns = 0  # of the last token
        self._began_ns = 0  # the last submit
        self._reader = 0  # the number that the table gave to it
        self._absent_bytes = absent_bytes
        self._read_bytes = 0  # of experts that were not on the device, without a cache
        self.tally = Tally(0, 0)  # of all runs
        self.watch: ExpertWatch | None = None  # of the view of experts, while that is looked at
        self._note_pins()

    @property
    def overlap(self) -> Overlap | None:
        """Return how much of the copying is hidden; None where nothing is copied beside tokens."""
        return self.cache.overlap if self.cache is not None else None

    def meanwhile(self) -> None:
        """Learn from the last run while the first submit of the next one is computed."""
        if self.cache is not None:
            self.cache.meanwhile()
        else:
            self.residency.learn()
        if self.watch is not None:
            self.watch.look()

    @property
    def totals(self) -> Totals:
        """Return what runs have missed, and how long they waited for copies and the file."""
        cache = self.cache
        return cache.totals if cache is not None else Totals(self._read_bytes, 0, 0)

    def begin(self, first: bool = True) -> int:
        """Return the address of the table for the next submit, a run's `first` or a later one.

        Must hold: no submit is in flight, nor one that was interrupted. Raises DeviceLostError.
        """
        table, cache = self._table, self.cache
        table.end_all()
        self._reader = cache.begin(first) if cache is not None else table.begin()
        self._began_ns = perf_counter_ns()
        return table.address

    def end(self) -> None:
        """Note that the submit is over. One that was interrupted or failed needs no ending."""
        if self.cache is not None and self.cache.pool is not None:
            self.cache.pool.computed((self._began_ns, perf_counter_ns()))
        self._table.end(self._reader)

    def timed(self, submits: Sequence[Interval], host: Interval) -> None:
        """Note when a token ran: its submits by the device's clock, begin and end by the host's.

        Comes before `after_run`.
        """
        self._host_ns = host[1] - host[0]
        if self.overlap is not None:
            by_host = self.cache is not None and self.cache.copies_by_host
            self.overlap.computed([host] if by_host else submits, host)

    def give_back(self, n_bytes: int) -> tuple[int, int]:
        """Free slots until so many bytes are free, as `ExpertCache.give_back` does.

        Must hold: no submit is in flight.
        """
        self._table.end_all()
        return self.cache.give_back(n_bytes) if self.cache is not None else (0, 0)

    def give_back_places(self, n_bytes: int) -> tuple[int, int]:
        """Free places of host memory, as `ExpertCache.give_back_places` does.

        Must hold: there is a cache that has a host pool, and no submit is in flight.
        """
        assert self.cache is not None
        self._table.end_all()
        return self.cache.give_back_places(n_bytes)

    def take_back(self, n_bytes: int, of_host: bool = False) -> tuple[int, int]:
        """Take memory back that was given, as `ExpertCache.take_back` does.

        Must hold: no submit is in flight.
        """
        self._table.end_all()
        return self.cache.take_back(n_bytes, of_host) if self.cache is not None else (0, 0)

    def regain(self) -> bool:
        """Bring experts back to memory that was taken back, as `ExpertCache.regain` does.

        Returns whether experts may still be in the file alone. Must hold: no submit is in flight.
        """
        self._table.end_all()
        if self.cache is None:
            return False
        self.cache.regain()
        return self.cache.reads_file

    def resize(self, capacities: Sequence[int]) -> None:
        """Use so many slots of each pool from now on, as `ExpertCache.resize` does.

        Must hold: there is a cache, and no submit is in flight.
        """
        assert self.cache is not None, "there are no slots"
        self._table.end_all()
        self.cache.resize(capacities)

    def bring(self, layer: int, experts: NDArray[np.uint32], guess: bool = True) -> None:
        """Ensure that a MoE layer's experts are where the next submit, which uses them, reads.

        They are [n_tokens, n_used], by which the next layer's are guessed if they are to. Raises
        ModelFileError where they have to be read from the file and cannot.
        """
        if self.cache is not None:
            self.cache.need(layer, experts, guess)

    @property
    def n_at_once(self) -> int:
        """Count the experts of a layer that can be in memory together, whatever else is there."""
        cache = self.cache
        if cache is None or cache.pool is None or self.residency.backing is not None:
            return self.residency.space.n_experts
        return cache.pool.residency.n_at_once

    def groups(self, experts: NDArray[np.uint32]) -> list[NDArray[np.uint32]]:
        """Split distinct experts of a layer into groups that can be in memory together."""
        n_groups = -(-len(experts) // self.n_at_once)
        return np.array_split(experts, n_groups)

    def after_run(
        self,
        routing: NDArray[np.uint32],
        filled: NDArray[np.bool_] | None = None,
        n_decoded: int = 0,
        tokens: Sequence[int | None] | None = None,
    ) -> None:
        """Note tokens that are over: they used `routing` [n_tokens, n MoE layers, n_used].

        It is kept. `filled`, alike, marks experts that kernels stored whole where they were to
        land; None: none. `n_decoded`: the sequences that were decoded; 0 if these were prompts.
        `tokens` are their ids.
        """
        if self.cache is not None:
            # Chunks of prompts take much longer than the tokens that copies run beside.
            host_ns = self._host_ns if n_decoded else 0
            hits = self.cache.after_run(routing, filled, host_ns, tokens)
        else:
            keys = self.residency.observe(routing, tokens)
            self.residency.leave()
            hits = np.empty(routing.shape, np.bool_)
            hits[:] = self._resident[:, None]
            if self._absent_bytes.any():
                state = self.residency.locations.record.state
                found = _residency.misses(keys, state, hits, None, self._absent_bytes, 0)
                self._read_bytes += found[1]
        for ids, found in zip(routing, hits, strict=True):
            self.profiler.record(ids, found)
        n_hits = int(np.count_nonzero(hits))
        self.tally = Tally(self.tally.n_uses + routing.size, self.tally.n_hits + n_hits)
        if n_decoded:
            self.profiler.note_together(n_decoded, Tally(routing.size, n_hits))
        if self.watch is not None and not self.watch.ran(routing, hits):
            self.unwatch()

    def unwatch(self) -> None:
        """Note for no view any more why experts move, and which are used."""
        if self.watch is not None:
            self.watch.stop()
            self.watch = None

    def before_run(self, upcoming: Upcoming, decodes: bool = True) -> None:
        """Decide what moves after the last run, now that the ids `upcoming` are known.

        They are to be decoded, or a prompt's.
        """
        if self.cache is not None:
            self.cache.decide(upcoming, decodes)
            self._note_pins()
            if self._checks:
                self.cache.check_integrity()

    def _note_pins(self) -> None:
        if self.residency.warm_at == self.residency.n_tokens:
            self.profiler.mark_warm()
