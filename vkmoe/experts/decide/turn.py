"""Notes what a token used, and decides what moves, in one call of the extension for each.

That is what residency.py does step by step, for the policy "forecast" and in the same arrays: so
either may have any turn, and both decide alike, bit for bit (tests/experts/decide/test_turn.py).
Owns which arrays these are; the work itself is native/turn.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts import _residency
from vkmoe.experts.decide.foresight import GUESS, LIKELY, Foresight
from vkmoe.experts.decide.keys import DecayedCounts, Keys
from vkmoe.experts.decide.locations import Derived, Locations, Move
from vkmoe.experts.decide.policies import Forecast
from vkmoe.experts.decide.token_table import Upcoming


class Asked(NamedTuple):
    """Holds what is to be decided on, as `Residency.decide` says."""

    missing: Keys  # that have no slot, each once
    landed: Sequence[int]  # of these
    used: Keys  # that may not leave
    budget_bytes: float
    host: Locations | None = None  # only what is present there can be copied
    backs: bool = False  # what is not present there may not leave


class Turn:
    """Works on the record of places, on a policy's record of uses, and on their counts."""

    def __init__(
        self,
        locations: Locations,
        policy: Forecast,
        counts: DecayedCounts,
        foresight: Foresight | None,
    ) -> None:
        """Work on arrays of these, which keep them; no `foresight`: there is nothing to decide."""
        self._locations, self._policy, self._foresight = locations, policy, foresight
        short = foresight.chances.short if foresight is not None else ()
        self._counts = (*short, counts)
        arrays = (*locations.record, *policy.record)
        raw, n_experts = [each.raw for each in self._counts], locations.space.n_experts
        self._native = _residency.Turn(*arrays, raw, n_experts, Move)
        self._derived: Derived | None = None  # what the extension works on

    def observe(self, ids: NDArray[np.uint32], is_late: bool) -> tuple[Keys, Keys]:
        """Note that a token used `ids` [n_layers, n_used]; return their keys, and those missing.

        `is_late`: chances are learned from it. Those missing are by rank, then by layer; layers
        that have no slots are left out.
        """
        *short, counts = self._counts
        chances = self._foresight.chances if self._foresight is not None and is_late else None
        if chances is not None:
            chances.advance()
        weights = [each.weight if chances is not None else 0.0 for each in short]
        weights.append(counts.weight)
        keys, missing = self._native.observe(ids, weights, self._policy.turns(ids.size))
        if chances is not None:
            chances.noted(keys.reshape(-1))
        return keys, missing

    def decide(self, upcoming: Upcoming, asked: Asked) -> tuple[list[Move], list[int]] | None:
        """Give slots to experts; return the moves in order, and the keys that were guessed.

        None, with nothing done, where too little is known for that.
        """
        foresight, policy, missing = self._foresight, self._policy, asked.missing
        looked_at = foresight.looked_at(upcoming) if foresight is not None else None
        if foresight is None or looked_at is None:
            return None
        derived = self._locations.derived
        if derived is not self._derived:
            self._native.derive(*derived[:-1])
            self._derived = derived
        most = foresight.most_guessed
        bounds = (
            None if asked.host is None else asked.host.record.state,
            asked.backs,
            (foresight.toll, GUESS),
            (LIKELY, most),
            asked.budget_bytes,
            policy.turns(len(missing) + most),
        )
        needed = (missing, asked.landed, asked.used.reshape(-1))
        found = self._native.decide(looked_at, needed, bounds)
        policy.worth, foresight.scores, moves, guessed, is_stale = found
        if is_stale:
            self._locations.derive_anew()
        return moves, guessed
