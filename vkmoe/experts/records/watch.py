"""Watches where experts are and what uses them, for a view that asks a few times a second.

Exists only while a view asks: without one, nothing is noted. It looks once a run, while the device
computes, and keeps a bounded part of what it saw. Owns the letters for places. Knows no words of
JSON (vkmoe/view/), and moves nothing.
"""

from __future__ import annotations

from collections import deque
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.decide.reasons import Reasons
from vkmoe.experts.decide.residency import PoolResidency, Residency
from vkmoe.experts.records.profiler import Tally

# Where an expert is read from: device memory, host memory, the file alone; or it is the CPU's.
IN_DEVICE, IN_HOST, IN_FILE, BY_CPU = (ord(letter) for letter in "dhfc")
MAX_RUNS, MAX_ROWS = 16, 8  # whose uses are kept: the last runs, and of each the last rows
MAX_LOOKS = 1024
LEAST_CHANGES = 4096  # that are kept in all, or twice as many as there are experts
MAX_TALLIES = 1024  # runs that the rate of the last second goes by
IDLE_S = 10.0  # after which a view that does not ask counts as gone

Places = NDArray[np.uint8]  # a letter for each expert [n_keys]
Routing = NDArray[np.uint32]  # [n_tokens, n_layers, n_used]


class Change(NamedTuple):
    """Says where an expert is read from now, and why it moved."""

    key: int
    place: int
    reason: str


class Use(NamedTuple):
    """Holds what the last tokens of a run used, and whether it was found on the device."""

    routing: Routing
    hits: NDArray[np.bool_]  # alike


class _Look(NamedTuple):
    """Holds what a look found changed."""

    version: int
    changes: list[Change]
    n_uses: int  # of all runs until then, since the watch began


class ExpertWatch:
    """Numbers what changes: `version` rises with each look that finds something new."""

    def __init__(
        self,
        residency: Residency,
        pool: PoolResidency | None,
        elsewhere: Places,
        first_version: int = 0,
    ) -> None:
        """Begin to watch; `elsewhere` [n_keys] says where experts are that have no slot."""
        self._residency, self._pool, self._elsewhere = residency, pool, elsewhere
        residency.reasons = self._reasons = Reasons(residency.space)
        self._pool_reasons = Reasons(residency.space)
        if pool is not None:
            pool.reasons = self._pool_reasons
        self.version = self.first_version = first_version  # all that came later is known
        self.settings_version = first_version  # when pins, slots or the policy changed last
        self.runs_version = first_version  # when there was a run last
        self._places = self._look_up()
        self._settings = self._current_settings()
        self._looks: deque[_Look] = deque()
        self._n_changes, self._most = 0, max(LEAST_CHANGES, 2 * residency.space.n_keys)
        self._runs: deque[tuple[int, Use]] = deque(maxlen=MAX_RUNS)  # by version
        self._n_runs = self._seen_runs = 0
        self._n_uses = self._first_uses = 0  # until now, and until the first version
        self._tallies: deque[tuple[float, Tally]] = deque(maxlen=MAX_TALLIES)
        self._asked_at = monotonic()

    def stop(self) -> None:
        """End the watch: nothing notes reasons any more."""
        self._residency.reasons = None
        if self._pool is not None:
            self._pool.reasons = None

    # ----- what is noted of runs -----

    def ran(self, routing: Routing, hits: NDArray[np.bool_]) -> bool:
        """Note what tokens used, which is kept; return False if the view seems to be gone."""
        now, tally = monotonic(), Tally(routing.size, int(np.count_nonzero(hits)))
        if len(routing) > MAX_ROWS:  # a copy: a part of it would keep all
            routing, hits = routing[-MAX_ROWS:].copy(), hits[-MAX_ROWS:].copy()
        self._n_uses += tally.n_uses
        self._runs.append((self.version + 1, Use(routing, hits)))
        self._tallies.append((now, tally))
        self._n_runs += 1
        return now - self._asked_at < IDLE_S

    def look(self) -> None:
        """Note what changed since the last look. Must hold: the record of places is at rest."""
        places, settings = self._look_up(), self._current_settings()
        changed = np.flatnonzero(places != self._places).tolist()
        is_set = any(a is not b for a, b in zip(settings, self._settings, strict=True))
        has_run = self._n_runs != self._seen_runs
        if not (changed or is_set or has_run):
            return
        found = [self._change(key, self._places.item(key), places.item(key)) for key in changed]
        self._places, self._settings, self._seen_runs = places, settings, self._n_runs
        self.version += 1
        self._looks.append(_Look(self.version, found, self._n_uses))
        self._n_changes += len(found)
        while self._n_changes > self._most or len(self._looks) > MAX_LOOKS:
            dropped = self._looks.popleft()
            self._n_changes -= len(dropped.changes)
            self.first_version, self._first_uses = dropped.version, dropped.n_uses
        if is_set:
            self.settings_version = self.version
        if has_run:
            self.runs_version = self.version

    # ----- what is asked -----

    def ask(self) -> None:
        """Note that the view asks, and look."""
        self._asked_at = monotonic()
        self.look()

    @property
    def places(self) -> Places:
        """Return where each expert was read from at the last look [n_keys]."""
        return self._places

    def knows(self, version: int) -> bool:
        """Say whether all that changed since a version is still remembered."""
        return self.first_version <= version <= self.version

    def changes(self, since: int) -> list[Change]:
        """Return the moves since a version, in order. Must hold: it `knows` that."""
        return [change for look in self._looks if look.version > since for change in look.changes]

    def uses(self, since: int) -> list[Use]:
        """Return what the last runs used since a version."""
        return [use for version, use in self._runs if since < version <= self.version]

    def n_uses(self, since: int) -> int:
        """Count the uses since a version, also those that are not kept."""
        before = [look.n_uses for look in self._looks if look.version <= since]
        now = self._looks[-1].n_uses if self._looks else self._first_uses
        return now - (before[-1] if before else self._first_uses)

    def tally_of(self, seconds: float) -> Tally:
        """Return the uses and hits of the last so many seconds, as far as they are remembered."""
        since = monotonic() - seconds
        recent = [tally for at, tally in self._tallies if at >= since]
        return Tally(sum(tally.n_uses for tally in recent), sum(tally.n_hits for tally in recent))

    # ----- inside -----

    def _look_up(self) -> Places:
        places = self._elsewhere.copy()
        if self._pool is not None:
            places[self._pool.locations.present] = IN_HOST
        places[self._residency.locations.present] = IN_DEVICE
        return places

    def _current_settings(self) -> tuple[Any, ...]:
        """Return what is replaced, and never written to, when pins, slots or the policy change."""
        locations = self._residency.locations
        return locations.pins, locations.capacities, self._residency.settings

    def _change(self, key: int, before: int, now: int) -> Change:
        if now == IN_DEVICE:
            return Change(key, now, self._reasons.of_coming(key))
        if before == IN_DEVICE:
            return Change(key, now, self._reasons.of_leaving(key))
        if now == IN_HOST:
            return Change(key, now, self._pool_reasons.of_coming(key))
        return Change(key, now, self._pool_reasons.of_leaving(key))
