"""Compares gather with its twin: every byte of the spans is copied, no other byte touched."""

from __future__ import annotations

import numpy as np

from vkmoe.gpu.program import Program, TensorRef, memory_range
from vkmoe.gpu.runner import SENTINEL, Runner
from vkmoe.ops.experts import LandingMemory, gather
from vkmoe.ops.router import RoutingLog
from vkmoe.reference.gather import gather as twin
from vkmoe.selftest.comparison import Checks

__all__ = ["GatherCase"]

N_LAYERS, LAYER = 3, 1
ALIGNMENT = 256


class GatherCase:
    """Checks gather on `n_used` experts, of which those of `misses` are copied.

    Homes come first in memory and landing places behind them, in another order, all with random
    bytes between.
    """

    def __init__(
        self, runner: Runner, span_bytes: int, n_used: int, misses: tuple[int, ...], seed: int = 0
    ) -> None:
        rng = np.random.default_rng([seed, span_bytes, n_used])
        self._runner, self._span_bytes, self._n_used = runner, span_bytes, n_used
        self._n_missed = len(misses)
        stride = -(-span_bytes // ALIGNMENT) * ALIGNMENT + ALIGNMENT
        self._memory = rng.integers(0, 256, 2 * n_used * stride, np.uint8)
        base = runner.place(self._memory)
        self._base, self._ids = base, rng.permutation(200)[:n_used].astype(np.uint32)
        homes, places = np.split(stride * np.arange(2 * n_used, dtype=np.uint64), 2)
        self._addresses, self._partners = homes.copy(), np.zeros(n_used, np.uint64)
        for slot, place in zip(misses, rng.permutation(places), strict=False):
            self._addresses[slot] = place
            self._partners[slot] = homes[slot] + ALIGNMENT
        self._addresses += np.uint64(ALIGNMENT)
        self._routing = TensorRef("routing", 6 * n_used)
        self._routing_log = RoutingLog(N_LAYERS, n_used)
        self._log, filled = self._routing_log.tensor, self._routing_log.filled(LAYER)
        half = memory_range(base, n_used * stride)
        landing = memory_range(half.end, n_used * stride)
        self.program = Program("gather")
        gather(
            self.program,
            self._routing,
            LandingMemory((landing,), self._log, filled),
            span_bytes,
            (half,),
            "gather",
        )

    def run(self, checks: Checks) -> None:
        (log,) = self._runner.run(self.program, {self._routing: self._routing_words()}, self._log)
        wanted = twin(self._memory, self._ids, self._addresses, self._partners, self._span_bytes)
        checks.equal("memory", self._runner.fetch(self._base, self._memory.size), wanted.memory)
        expected = np.full(self._log.n_words, SENTINEL, np.uint32)
        self._routing_log.views(expected).filled[0, LAYER] = wanted.filled
        checks.equal("log", log, expected)

    def time(self) -> float | None:
        """Measure GB copied per second, within device memory."""
        self._runner.run(self.program, {self._routing: self._routing_words()})
        runtime = self._runner.nanoseconds(self.program)
        return self._n_missed * self._span_bytes / runtime if runtime else None

    def _routing_words(self) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        """Make the words of the routing, as router_topk leaves them."""
        shift = np.uint64(self._base - ALIGNMENT)
        partners = np.where(self._partners, self._partners + shift, 0).astype(np.uint64)
        parts = (
            self._ids,
            np.ones(self._n_used, np.float32),
            self._addresses + shift,
            partners,
        )
        return np.concatenate([part.view(np.uint32) for part in parts])
