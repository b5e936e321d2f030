"""Counts uses and hits of every expert while a model runs, and times what copying hid.

Pure NumPy. Does not decide anything; the decayed counts that do are in decide/keys.py. The totals
of caches and pools are filled in by what moves experts (store/).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.decide.keys import KeySpace

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
        self._counts = np.zeros((2, space.n_layers, space.n_experts), np.uint64)
        self._before: NDArray[np.uint64] | None = None
        self._together: dict[int, Tally] = {}
        # Tokens not yet counted: routing, and which of it was found.
        self._log: list[tuple[NDArray[np.uint32], NDArray[np.bool_]]] = []

    def record(self, routing: NDArray[np.uint32], hits: NDArray[np.bool_]) -> None:
        """Count one token's routing [n_layers, n_used] and its hits, alike.

        Must hold: ids are below n_experts, the experts of a layer are distinct, every token has as
        many, and the arrays are not written to any more.
        """
        self._log.append((routing, hits))
        self.n_tokens += 1
        if len(self._log) >= _LOG_TOKENS:
            self._count()

    def note_together(self, n_sequences: int, tally: Tally) -> None:
        """Count what tokens of so many sequences used, one batch that decodes them together."""
        n_uses, n_hits = self._together.get(n_sequences, (0, 0))
        self._together[n_sequences] = Tally(n_uses + tally.n_uses, n_hits + tally.n_hits)

    @property
    def together(self) -> dict[int, Tally]:
        """Return the tallies of tokens that were decoded, by the sequences of their batches."""
        return dict(sorted(self._together.items()))

    def mark_warm(self) -> None:
        """Let all that was counted until now become "before": pins are chosen for the first time.

        Further calls change nothing.
        """
        if self._before is None:
            self._before = self.counts.copy()
            self.n_tokens_before = self.n_tokens

    @property
    def counts(self) -> NDArray[np.uint64]:
        """Return uses and hits, [2, n_layers, n_experts]; must not be written to."""
        if self._log:
            self._count()
        return self._counts

    def served(self, layer: int | None = None) -> Served:
        """Return the tally of one layer or of all, split at warm-pinning."""
        total = _tally(self.counts, layer)
        if self._before is None:
            return Served(total)
        before = _tally(self._before, layer)
        after = Tally(total.n_uses - before.n_uses, total.n_hits - before.n_hits)
        return Served(total, before, after)

    def top_experts(self, layer: int, n: int) -> tuple[tuple[int, int], ...]:
        """Return (id, uses) of the `n` most used experts of a layer; ties to the lower id."""
        uses = self.counts[0, layer]
        best = np.argsort(-uses.astype(np.int64), kind="stable")[:n].tolist()
        return tuple((expert, int(uses[expert])) for expert in best if uses[expert])

    def _count(self) -> None:
        """Move the log into the counts."""
        log, self._log = self._log, []  # torn behind this, tokens are lost but none counts twice
        keys = self.space.keys_of(np.stack([ids for ids, _ in log]))  # [n, n_layers, n_used]
        found = np.stack([hits for _, hits in log])
        for counts, used in zip(self._counts, (keys.reshape(-1), keys[found]), strict=True):
            new = np.bincount(used, minlength=self.space.n_keys).astype(np.uint64)
            counts += new.reshape(counts.shape)


def _tally(counts: NDArray[np.uint64], layer: int | None) -> Tally:
    n_uses, n_hits = (counts if layer is None else counts[:, layer]).reshape(2, -1).sum(axis=1)
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
    n_written_back: int = 0  # experts copied from their slots to host memory, to leave later
    written_back_bytes: int = 0


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


# ----- how much of the copying was hidden behind computing -----

Interval: TypeAlias = tuple[int, int]  # begin, end
MAX_COMPUTED = 256  # intervals that are remembered: of a few tokens that stop at 48 routers
MAX_WAITING = 256  # copies whose computing may not all be known yet
SLACK_NS = 1_000_000  # that two clocks may drift apart between two tokens


class Overlap:
    """Adds up how long was copied, and how much of that time something was computed.

    All times are integer nanoseconds. The device's clock and the host's have different origins; a
    copy must lie where the host saw it happen, or the answer is "unknown". A bounded part of the
    past is remembered.
    """

    def __init__(self, comparable: bool = True) -> None:
        """Begin at zero; `comparable`: one clock times computing and copying."""
        self.copied_ns = self.overlapped_ns = 0
        self.n_unknown = 0  # copies that are in neither
        self._comparable = comparable
        self._computed: deque[Interval] = deque(maxlen=MAX_COMPUTED)  # disjoint, ascending
        # Copies by the clock of their queue, and by when the host began them and saw them done.
        self._waiting: deque[tuple[Interval, Interval]] = deque()
        # The device's clock less the host's is at least and at most this, by the last token.
        self._offset: Interval | None = None

    @property
    def fraction(self) -> float | None:
        """Return the part of copying that was overlapped; None: not known, or nothing copied."""
        self._settle(all_of_them=True)
        if not self._comparable or not self.copied_ns:
            return None
        return self.overlapped_ns / self.copied_ns

    def begin_anew(self) -> None:
        """Forget what was copied until now."""
        self.copied_ns = self.overlapped_ns = self.n_unknown = 0
        self._waiting.clear()

    def computed(self, submits: Sequence[Interval], host: Interval) -> None:
        """Note a token that ran in these submits, between begin and end as the `host` saw it.

        Tokens come in their order.
        """
        for begin, end in submits:
            if end < begin or (self._computed and begin < self._computed[-1][0]):
                self._comparable = False  # a counter began anew
            elif self._computed and begin <= self._computed[-1][1]:
                first, last = self._computed.pop()
                self._computed.append((first, max(last, end)))
            else:
                self._computed.append((begin, end))
        if submits:
            self._offset = (submits[-1][1] - host[1], submits[0][0] - host[0])
        self._settle()

    def copied(self, interval: Interval | None, host: Interval) -> None:
        """Note a copy in `interval` (None: not known), between `host`'s begin and end."""
        if interval is None or interval[1] < interval[0]:
            self.n_unknown += 1
            return
        self._waiting.append((interval, host))
        if len(self._waiting) > MAX_WAITING:
            interval, host = self._waiting.popleft()
            self._add(interval, host)

    def _settle(self, all_of_them: bool = False) -> None:
        """Add up the copies behind whose end something was computed, or all that wait."""
        known_until = self._computed[-1][0] if self._computed else 0
        waiting, self._waiting = self._waiting, deque()
        for interval, host in waiting:
            if all_of_them or interval[1] <= known_until:
                self._add(interval, host)
            else:
                self._waiting.append((interval, host))

    def _add(self, interval: Interval, host: Interval) -> None:
        begin, end = interval
        if len(self._computed) == MAX_COMPUTED and begin < self._computed[0][0]:
            self.n_unknown += 1  # what was computed then is forgotten
            return
        if self._offset is not None:
            least, most = self._offset
            if begin - host[0] < least - SLACK_NS or end - host[1] > most + SLACK_NS:
                self._comparable = False  # it cannot have run when the host saw it
        self.copied_ns += end - begin
        for first, last in reversed(self._computed):
            if last <= begin:
                break
            self.overlapped_ns += max(0, min(end, last) - max(begin, first))
