"""Computes how much of the copying is hidden behind computing, from intervals, without a device.

All times are integer nanoseconds. The device's clock and the host's have different origins; a copy
must lie where the host saw it happen, or the answer is "unknown".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

__all__ = ["Interval", "Overlap", "first_overlap"]

Interval: TypeAlias = tuple[int, int]  # begin, end
MAX_COMPUTED = 256  # intervals that are remembered: of a few tokens that stop at 48 routers
MAX_WAITING = 256  # copies whose computing may not all be known yet
SLACK_NS = 1_000_000  # that two clocks may drift apart between two tokens


class _Copy(NamedTuple):
    """Times a copy by the clock of its queue, and by when the host began it and saw it done."""

    interval: Interval
    host: Interval


class Overlap:
    """Adds up how long was copied, and how much of that time something was computed.

    Remembers a bounded part of the past, so that it may run for ever.
    """

    def __init__(self, comparable: bool = True) -> None:
        """Begin at zero; `comparable`: one clock times computing and copying."""
        self.copied_ns = self.overlapped_ns = 0
        self.n_unknown = 0  # copies that are in neither
        self._comparable = comparable
        self._computed: deque[Interval] = deque(maxlen=MAX_COMPUTED)  # disjoint, ascending
        self._forgotten = False  # whether something of the past is not there any more
        self._waiting: deque[_Copy] = deque()
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
                self._forgotten |= len(self._computed) == MAX_COMPUTED
                self._computed.append((begin, end))
        if submits:
            self._offset = (submits[-1][1] - host[1], submits[0][0] - host[0])
        self._settle()

    def copied(self, interval: Interval | None, host: Interval) -> None:
        """Note a copy in `interval` (None: not known), between `host`'s begin and end."""
        if interval is None or interval[1] < interval[0]:
            self.n_unknown += 1
            return
        self._waiting.append(_Copy(interval, host))
        if len(self._waiting) > MAX_WAITING:
            self._add(self._waiting.popleft())

    def _settle(self, all_of_them: bool = False) -> None:
        """Add up the copies behind whose end something was computed, or all that wait."""
        if not self._waiting:
            return
        known_until = self._computed[-1][0] if self._computed else 0
        waiting, self._waiting = self._waiting, deque()
        for copy in waiting:
            if all_of_them or copy.interval[1] <= known_until:
                self._add(copy)
            else:
                self._waiting.append(copy)

    def _add(self, copy: _Copy) -> None:
        begin, end = copy.interval
        if self._forgotten and begin < self._computed[0][0]:
            self.n_unknown += 1
            return
        if not self._fits(copy):
            self._comparable = False
        self.copied_ns += end - begin
        for first, last in reversed(self._computed):
            if last <= begin:
                break
            self.overlapped_ns += max(0, min(end, last) - max(begin, first))

    def _fits(self, copy: _Copy) -> bool:
        """Return whether a copy can have run when the host saw it, by the clock of the tokens."""
        if self._offset is None:
            return True
        least, most = self._offset
        (begin, end), (started, collected) = copy
        return begin - started >= least - SLACK_NS and end - collected <= most + SLACK_NS


def first_overlap(intervals: Iterable[Interval]) -> tuple[Interval, Interval] | None:
    """Return two intervals that overlap in time; None if each ended before the next began.

    On one queue nothing may: give it what was computed and copied there, together.
    """
    for earlier, later in pairwise(sorted(intervals)):
        if later[0] < earlier[1]:
            return earlier, later
    return None
