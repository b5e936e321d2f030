"""Replays what becomes of host places where experts exchange them: which of them are taken, when.

It calls what the engine calls, in the same order (store/cache.py, store/exchange.py), with copies
that are there for the next decision.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vkmoe.experts.decide.keys import Keys
from vkmoe.experts.decide.locations import Move
from vkmoe.experts.decide.residency import PoolResidency, Residency
from vkmoe.experts.decide.settings import PoolSpec


class HostPlaces:
    """Holds the places of experts in host memory, too few for all of them."""

    def __init__(self, residency: Residency, pools: Sequence[PoolSpec]) -> None:
        """Begin with empty places. Must hold: with all slots they hold all experts."""
        self._residency = residency
        policy = residency.settings.policy
        self._pool = PoolResidency(residency.space, pools, policy, residency.counts)
        self._written: list[int] = []  # back, for the next decision

    def start(self) -> list[Move]:
        """Load all experts: through host places into their slots, then the others.

        Return the moves into slots.
        """
        residency, n_at_once = self._residency, self._pool.n_at_once
        moves = residency.start()
        for first in range(0, len(moves), n_at_once):
            batch = moves[first : first + n_at_once]
            self._read(np.array([move.key for move in batch], np.int64))
            residency.arrived(batch)
        in_slots, host = residency.locations.present, self._pool.locations
        host.leave(self._pool.crowding(in_slots))
        none = np.zeros(residency.space.n_keys, np.bool_)
        filling = self._pool.bring(self._pool.first_fill(in_slots), none, in_slots)
        host.arrive([move.key for move in filling])
        assert (in_slots | host.present).all(), "slots and host places do not hold all experts"
        residency.exchange_with(host)
        return moves

    def before_decision(self) -> None:
        """Note that what was written back is there."""
        if self._written:
            self._pool.locations.arrive(self._written)
            self._written = []

    def look_ahead(self) -> None:
        """Begin to write back the experts that are next to leave."""
        moves = self._residency.to_back()
        if moves:
            self._pool.enter(moves)
            self._written = [move.key for move in moves]

    def _read(self, keys: Keys) -> None:
        """Read experts that are to be copied to slots."""
        absent = self._pool.use(keys)
        kept = np.zeros(self._residency.space.n_keys, np.bool_)
        kept[keys] = True
        moves = self._pool.bring(absent.tolist(), kept, self._residency.locations.present)
        self._pool.locations.arrive([move.key for move in moves])
