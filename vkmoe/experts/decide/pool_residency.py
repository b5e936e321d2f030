"""Decides which experts are in a host pool that is smaller than the model, without GPU or file.

Owns the pool's policy and the record of what is in it. The experts of a layer are needed while its
token runs, so here a miss is waited for. Does not read: it answers with moves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vkmoe.choices import PolicyName
from vkmoe.experts.decide.counts import DecayedCounts
from vkmoe.experts.decide.keys import Keys, KeySpace, Mask
from vkmoe.experts.decide.locations import Locations, Move
from vkmoe.experts.decide.policies import create_policy
from vkmoe.experts.decide.settings import PoolSpec

__all__ = ["PoolResidency"]


class PoolResidency:
    """Orders experts into host slots.

    An expert in the pool that also has a device slot is the first to leave: it is not read there.
    """

    def __init__(
        self,
        space: KeySpace,
        pools: Sequence[PoolSpec],
        policy: PolicyName,
        counts: DecayedCounts,
    ) -> None:
        """Begin with an empty pool; the owner of `counts` counts. All layers have host slots."""
        assert {layer for pool in pools for layer in pool.layers} == set(range(space.n_layers))
        self.space, self.pools = space, tuple(pools)
        self.locations, self._counts = Locations(space, pools), counts
        self._policy = create_policy(policy, self.locations, counts)

    @property
    def n_at_once(self) -> int:
        """Return how many experts of one size can always be here together.

        What other layers keep in any case, although it is not needed now, leaves no room for them.
        """
        return min(pool.capacity - pool.floor * (len(pool.layers) - 1) for pool in self.pools)

    def use(self, keys: Keys) -> Keys:
        """Note that a layer uses these; returns those that are neither here nor on their way."""
        return self._policy.use(keys)

    def bring(self, keys: Sequence[int], kept: Mask, in_slots: Mask) -> list[Move]:
        """Give host slots to these distinct keys, in order, as long as others may leave for them.

        `kept` [n_keys] may not leave, nor may those on the way; `in_slots` leave first.
        """
        moves: list[Move] = []
        busy = kept | self.locations.arriving
        for pool in range(len(self.pools)):
            coming = [key for key in keys if self.locations.pool_of[key] == pool]
            if coming:
                moves += self._bring(pool, coming, busy, in_slots)
        return moves

    def first_fill(self, in_slots: Mask) -> list[int]:
        """List what to read before the first token: the most used, else as many of each layer.

        Experts `in_slots` [n_keys] are left out: they are not read here.
        """
        values = self._counts.values().reshape(self.space.n_layers, -1)
        wanted: list[int] = []
        for index, pool in enumerate(self.pools):
            layers = list(pool.layers)
            ranks = np.argsort(np.argsort(-values[layers], axis=1, kind="stable"), axis=1)
            rows = np.stack([self.space.keys(layer) for layer in layers])
            order = np.lexsort((-values[layers].ravel(), ranks.ravel()))
            ranked = rows.ravel()[order]
            absent = [
                key for key in ranked[~in_slots[ranked]].tolist() if self.locations.is_absent(key)
            ]
            wanted += absent[: self.locations.n_free[index]]
        return sorted(wanted)  # as they lie in the file

    def check_integrity(self) -> None:
        """Raise AssertionError if the record or the policy contradicts itself (tests)."""
        self._policy.check_integrity()

    # ----- inside -----

    def _bring(self, pool: int, coming: list[int], busy: Mask, in_slots: Mask) -> list[Move]:
        policy, locations = self._policy, self.locations
        n_short = len(coming) - locations.n_free[pool]
        leaving: list[int] = []
        if n_short > 0:
            twice = locations.present & in_slots & ~busy & (locations.pool_of == pool)
            leaving = np.flatnonzero(twice)[:n_short].tolist()
        moves = [Move(pool, key, victim) for key, victim in zip(coming, leaving, strict=False)]
        if moves:
            policy.replace([move.key for move in moves], leaving)
            busy[[move.key for move in moves]] = True  # the others' victims are none of these
        return moves + policy.promote(coming[len(moves) :], busy)
