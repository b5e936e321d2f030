"""Replays a trace through the engine's own decisions, without a GPU.

`simulate` gives hit counts equal to the engine's for the same routing, settings and pools. Where
misses come from is told by comparing them with Belady's optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.belady import belady_hits, first_uses
from vkmoe.experts.residency import Residency
from vkmoe.experts.settings import CacheSettings, PoolSpec
from vkmoe.experts.trace import Trace

__all__ = ["Misses", "SimulationResult", "ceiling", "misses", "simulate"]


@dataclass(frozen=True, eq=False)
class SimulationResult:
    """What a cache would have done on a trace."""

    trace: Trace
    hits: NDArray[np.int64]  # [n_tokens, n_layers]: uses served from slots
    n_promoted: NDArray[np.int64]  # [n_layers]: experts copied into slots
    start: NDArray[np.bool_]  # [n_layers, n_experts]: in slots before the first token

    @property
    def layer_hits(self) -> NDArray[np.int64]:
        """[n_layers]."""
        return np.asarray(self.hits.sum(axis=0), np.int64)

    @property
    def layer_rates(self) -> NDArray[np.float64]:
        """Hits per use of each layer, from 0 to 1."""
        return self.layer_hits / (self.trace.n_tokens * self.trace.header.n_used)

    @property
    def hit_rate(self) -> float:
        """Hits per use of all layers, from 0 to 1."""
        return float(self.layer_rates.mean())

    @property
    def worst_rate(self) -> float:
        """Of the layer with the fewest hits."""
        return float(self.layer_rates.min())

    @property
    def decode_rate(self) -> float | None:
        """Of the tokens after the prompts; None if there are none."""
        decode = self.hits[~self.trace.is_prompt]
        return float(decode.mean()) / self.trace.header.n_used if decode.size else None

    @property
    def read_bytes(self) -> float:
        """Bytes a token reads from host memory because experts have no slot, on average."""
        n_uses = self.trace.n_tokens * self.trace.header.n_used
        return self._per_token(n_uses - self.layer_hits)

    @property
    def copied_bytes(self) -> float:
        """Bytes copied into slots per token, on average."""
        return self._per_token(self.n_promoted)

    def _per_token(self, counts: NDArray[np.int64]) -> float:
        return float(counts @ np.array(self.trace.header.span_bytes)) / self.trace.n_tokens


class Misses(NamedTuple):
    """Where misses come from; together all of them."""

    compulsory: int  # first use of an expert that was not there from the start
    capacity: int  # any others that Belady's optimum with as many slots has too
    policy: int  # the rest. Negative where pins and residents beat what can be had on demand


def simulate(
    trace: Trace,
    settings: CacheSettings,
    pools: Sequence[PoolSpec],
    seed: NDArray[np.float64] | None = None,
) -> SimulationResult:
    """Replay a trace on an empty cache; `seed` is a profile's counts, as `Residency` takes them.

    All sequences go through one cache, one after the other. A cache with room for all experts of
    all layers is none: they are resident in place, and every use is a hit.
    """
    space, n_used = trace.space, trace.header.n_used
    if _holds_all(trace, pools):
        hits = np.full((trace.n_tokens, space.n_layers), n_used, np.int64)
        everything = np.ones((space.n_layers, space.n_experts), np.bool_)
        return SimulationResult(trace, hits, np.zeros(space.n_layers, np.int64), everything)
    residency = Residency(space, pools, settings, seed)
    promoted: list[int] = []
    moves = residency.start()
    residency.landed(moves)
    promoted += [move.key for move in moves]
    start = residency.published.copy()
    hits = np.empty((trace.n_tokens, space.n_layers), np.int64)
    for token, routing in enumerate(trace.routing):
        hits[token] = np.count_nonzero(residency.hits(routing), axis=1)
        moves = residency.use(routing)
        residency.landed(moves)  # the engine waits for its copies before the next token
        promoted += [move.key for move in moves]
    layers = np.array(promoted, np.int64) // space.n_experts
    return SimulationResult(trace, hits, np.bincount(layers, minlength=space.n_layers), start)


def ceiling(
    trace: Trace, pools: Sequence[PoolSpec], start: NDArray[np.bool_] | None = None
) -> NDArray[np.int64]:
    """The most hits of each layer, [n_layers], for a cache that holds `start` at the beginning."""
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
