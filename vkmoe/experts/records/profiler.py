"""Counts, while a model runs, uses and hits of every expert; holds totals of caches and pools.

Pure NumPy. Does not decide anything; the decayed counts that do are in decide/keys.py. The totals
are filled in by what moves experts (store/).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.decide.keys import KeySpace

__all__ = ["CacheCounters", "ExpertProfiler", "PoolCounters", "Served", "Tally"]

_LOG_TOKENS = 32  # counted at once, which costs a few times as much as one token alone


class Tally(NamedTuple):
    """Counts uses of experts, and how many of them device memory served."""

    n_uses: int
    n_hits: int

    @property
    def hit_rate(self) -> float | None:
        """Return hits per use, from 0 to 1; None if nothing was used."""
        return self.n_hits / self.n_uses if self.n_uses else None


class Served(NamedTuple):
    """Splits a tally at warm-pinning; without any there is neither a before nor an after."""

    total: Tally
    before: Tally | None = None
    after: Tally | None = None


class ExpertProfiler:
    """Counts uses and hits of every expert since the model was loaded, whatever the placement.

    Layers count MoE layers from 0; `layer_numbers` are the model's own, for display. A token is
    only noted when it is recorded; it is counted with others, at the latest when counts are read.
    """

    def __init__(self, space: KeySpace, layer_numbers: Sequence[int]) -> None:
        assert len(layer_numbers) == space.n_layers, (layer_numbers, space)
        self.space = space
        self.layer_numbers = tuple(layer_numbers)
        self.n_tokens = 0
        self.n_tokens_before: int | None = None  # tokens before warm-pinning; None: not yet
        # One row of uses and one of hits; an expert's column is its number in the key space.
        self._counts = np.zeros((2, space.n_keys), np.uint64)
        self._before: NDArray[np.uint64] | None = None
        # Tokens not yet counted: routing, and which of it was found (or whether all was).
        self._log: list[tuple[NDArray[np.uint32], NDArray[np.bool_] | bool]] = []

    def record(self, routing: NDArray[np.uint32], hits: NDArray[np.bool_] | bool) -> None:
        """Count one token's routing [n_layers, n_used]; `hits` alike, or one bool for all of it.

        Must hold: ids are below n_experts, the experts of a layer are distinct, every token has as
        many, and the arrays are not written to any more.
        """
        self._log.append((routing, hits))
        self.n_tokens += 1
        if len(self._log) >= _LOG_TOKENS:
            self._count()

    def mark_warm(self) -> None:
        """Let all that was counted until now become "before": pins are chosen for the first time.

        Further calls change nothing.
        """
        if self._before is None:
            self._before = self._counted().copy()
            self.n_tokens_before = self.n_tokens

    @property
    def uses(self) -> NDArray[np.uint64]:
        """Return the counts [n_layers, n_experts]; a view that must not be written."""
        return self._shaped(self._counted()[0])

    @property
    def hits(self) -> NDArray[np.uint64]:
        """Return the counts [n_layers, n_experts]; a view that must not be written."""
        return self._shaped(self._counted()[1])

    def total(self, layer: int | None = None) -> Tally:
        """Return the tally of one layer or of all."""
        return self._tally(self._counted(), layer)

    def served(self, layer: int | None = None) -> Served:
        """Return the tally of one layer or of all, split at warm-pinning."""
        total = self.total(layer)
        if self._before is None:
            return Served(total)
        before = self._tally(self._before, layer)
        after = Tally(total.n_uses - before.n_uses, total.n_hits - before.n_hits)
        return Served(total, before, after)

    def hit_rate(self, layer: int | None = None) -> float | None:
        """Return hits per use, from 0 to 1; None if nothing was recorded."""
        return self.total(layer).hit_rate

    def top_experts(self, layer: int, n: int) -> tuple[tuple[int, int], ...]:
        """Return (id, uses) of the `n` most used experts of a layer; ties to the lower id."""
        uses = self.uses[layer].tolist()
        used = sorted(
            (expert for expert in range(len(uses)) if uses[expert]), key=lambda e: -uses[e]
        )
        return tuple((expert, uses[expert]) for expert in used[:n])

    def _counted(self) -> NDArray[np.uint64]:
        """Return the counts with all of the log in them: [2, n_keys]."""
        if self._log:
            self._count()
        return self._counts

    def _count(self) -> None:
        """Move the log into the counts."""
        log, self._log = self._log, []  # torn behind this, tokens are lost but none counts twice
        routing = np.stack([ids for ids, _ in log])
        keys = self.space.keys_of(routing)  # [n, n_layers, n_used]
        found = np.empty(keys.shape, np.bool_)
        for i, (_, hits) in enumerate(log):
            found[i] = hits
        for counts, used in zip(self._counts, (keys.reshape(-1), keys[found]), strict=True):
            counts += np.bincount(used, minlength=self.space.n_keys).astype(np.uint64)

    def _shaped(self, row: NDArray[np.uint64]) -> NDArray[np.uint64]:
        view = row.reshape(self.space.n_layers, self.space.n_experts)
        view.flags.writeable = False
        return view

    def _tally(self, counts: NDArray[np.uint64], layer: int | None) -> Tally:
        first = 0 if layer is None else layer * self.space.n_experts
        end = self.space.n_keys if layer is None else first + self.space.n_experts
        n_uses, n_hits = counts[:, first:end].sum(axis=1)
        return Tally(int(n_uses), int(n_hits))


@dataclass(frozen=True)
class CacheCounters:
    """Holds totals since the model was loaded; sizes in bytes, times in nanoseconds."""

    n_uploads: int = 0  # experts copied into a slot
    upload_bytes: int = 0
    n_evictions: int = 0  # experts that lost their slot to another
    missed_bytes: int = 0  # read from host memory because the expert had no slot
    n_table_writes: int = 0  # versions of the expert table written after the first
    n_failed_uploads: int = 0
    n_landed: int = 0  # experts that got their slot while they were read, without a copy
    n_hinted: int = 0  # uploads begun because a predictor guessed them
    n_cancelled: int = 0  # uploads taken back before they began
    stall_ns: int = 0  # waited for copies between two submits


@dataclass(frozen=True)
class PoolCounters:
    """Holds totals of a host pool smaller than the model; in bytes and nanoseconds."""

    n_uses: int = 0  # experts that tokens asked for and that had no slot
    n_hits: int = 0  # of them already in the pool
    n_reads: int = 0  # experts read from the file, those at the start too
    read_bytes: int = 0
    n_failed: int = 0
    n_hinted: int = 0  # reads begun because a predictor guessed them
    n_cancelled: int = 0
    stall_ns: int = 0  # waited for the file while a token was computed
    read_ns: int = 0  # that the reads took, without those at the start
    hidden: float | None = None  # the part of it while something was computed; None: no such read
    n_right: int = 0  # of n_hinted used by the very layer that the guess was about
