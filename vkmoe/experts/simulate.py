"""Replays a trace through the engine's own decisions, without a GPU.

`simulate` gives hit counts equal to the engine's for the same routing, settings and pools. Where
misses come from is told by comparing them with Belady's optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.belady import belady_hits, first_uses
from vkmoe.experts.decide.residency import Residency
from vkmoe.experts.decide.residents import Move
from vkmoe.experts.decide.settings import CacheSettings, PoolSpec
from vkmoe.experts.decide.worth import PredictionCounts
from vkmoe.experts.study.trace import Trace

__all__ = ["PLAIN", "Misses", "SimulationResult", "Transfers", "ceiling", "misses", "simulate"]


class Transfers(NamedTuple):
    """How experts get into slots. The plain way: all that was decided is there in time."""

    late: bool = False  # copies are not there for the next submit, but for the one after it
    n_landing: int = 0  # missed experts of a layer that are in a slot for having been read
    budget_bytes: float = inf  # of copies per token


PLAIN = Transfers()


@dataclass(frozen=True, eq=False)
class SimulationResult:
    """What a cache would have done on a trace."""

    trace: Trace
    hits: NDArray[np.int64]  # [n_tokens, n_layers]: uses served from slots
    n_promoted: NDArray[np.int64]  # [n_layers]: experts copied into slots
    start: NDArray[np.bool_]  # [n_layers, n_experts]: in slots before the first token
    n_landed: int = 0  # experts that got a slot without a copy
    guesses: PredictionCounts = field(default_factory=PredictionCounts)

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
    start = replay.residency.published.copy()
    hits = np.empty((trace.n_tokens, space.n_layers), np.int64)
    for token, routing in enumerate(trace.routing):
        if token in trace.starts:
            replay.residency.reset_predictions()
        hits[token] = replay.token(routing)
    layers = np.array(replay.copied, np.int64) // space.n_experts
    n_copied = np.bincount(layers, minlength=space.n_layers)
    guesses = replay.residency.predictions
    return SimulationResult(trace, hits, n_copied, start, replay.n_landed, guesses)


class _Replay:
    """A cache whose copies are told to have landed when their time has come."""

    def __init__(self, residency: Residency, transfers: Transfers) -> None:
        self.residency, self._transfers = residency, transfers
        self._stepped = residency.settings.executor == "stepped"
        self._n_experts = residency.space.n_experts
        self._late: list[Move] = []
        self.copied: list[int] = []
        self.n_landed = 0
        moves = residency.start()
        residency.landed(moves)
        self.copied += [move.key for move in moves]

    def token(self, routing: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Run one; returns its hits [n_layers]."""
        residency, transfers = self.residency, self._transfers
        if self._stepped:
            hits = np.stack([self._layer(layer, ids) for layer, ids in enumerate(routing)])
        else:
            hits = residency.hits(routing)
        missed = self._missed(routing, hits) if transfers.n_landing else []
        moves = residency.use(routing, missed, transfers.budget_bytes)
        kept = [move for move in moves if move.landed]
        self.n_landed += len(kept)
        residency.landed(kept)
        copies = [move for move in moves if not move.landed]
        self.copied += [move.key for move in copies]
        residency.landed(self._late)
        self._late = copies
        if not transfers.late:
            self._arrive()
        return np.asarray(np.count_nonzero(hits, axis=1), np.int64)

    def _layer(self, layer: int, ids: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Its hits [n_used]; fetches what they let expect of the layer after it."""
        hits: NDArray[np.bool_] = self.residency.published[layer, ids]
        keys = ids.astype(np.int64) + layer * self._n_experts
        self._arrive()
        guessed = self.residency.guess_next_layer(layer, ids)
        moves = self.residency.hint(guessed, keys, self._transfers.budget_bytes)
        self.copied += [move.key for move in moves]
        self.residency.landed(moves)
        return hits

    def _arrive(self) -> None:
        self.residency.landed(self._late)
        self._late = []

    def _missed(self, routing: NDArray[np.uint32], hits: NDArray[np.bool_]) -> list[int]:
        """The first of each layer, by rank, as many as have a place to land."""
        missed = ~hits
        lands = missed & (missed.cumsum(axis=1) <= self._transfers.n_landing)
        layers, ranks = np.nonzero(lands)
        return [int(key) for key in layers * self._n_experts + routing[layers, ranks]]


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
