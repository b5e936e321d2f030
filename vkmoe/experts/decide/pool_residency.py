"""Decides which experts are in a host pool that is smaller than the model, without GPU or file.

Owns the pool's policy. The experts of a layer are needed while its token runs, so here a miss is
waited for. Does not own places, addresses or reading: it answers with moves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vkmoe.choices import PolicyName
from vkmoe.experts.decide.counts import DecayedCounts
from vkmoe.experts.decide.keys import Keys, KeySpace, Mask
from vkmoe.experts.decide.policies import create_policy
from vkmoe.experts.decide.residents import FREE, Move
from vkmoe.experts.decide.settings import PoolSpec

__all__ = ["PoolResidency"]


class PoolResidency:
    """Orders experts into places of host memory.

    An expert in the pool that also has a device slot is the first to leave: it is not read there.
    """

    def __init__(
        self,
        space: KeySpace,
        pools: Sequence[PoolSpec],
        policy: PolicyName,
        counts: DecayedCounts,
    ) -> None:
        """Begin with an empty pool; the owner of `counts` counts. All layers have places."""
        assert {layer for pool in pools for layer in pool.layers} == set(range(space.n_layers))
        self.space, self.pools = space, tuple(pools)
        self._name, self._counts = policy, counts
        self.published: Mask = np.zeros(space.n_keys, np.bool_)
        self._begin_empty()

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
        """Give places to these, in order, as long as others may leave for them.

        `kept` [n_keys] may not leave, nor may those on the way; `in_slots` leave first.
        """
        moves: list[Move] = []
        busy = kept | self._in_flight
        for pool in range(len(self.pools)):
            coming = [key for key in keys if self._policy.pool_of[key] == pool]
            if coming:
                moves += self._bring(pool, coming, busy, in_slots)
        arriving = [move.key for move in moves]
        self._in_flight[arriving] = True
        self.published[[move.victim for move in moves if move.victim != FREE]] = False
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
            numbers = np.stack([self.space.numbers(layer) for layer in layers])
            order = np.lexsort((-values[layers].ravel(), ranks.ravel()))
            ranked = numbers.ravel()[order]
            absent = [key for key in ranked[~in_slots[ranked]].tolist() if self.is_absent(key)]
            wanted += absent[: self._policy.n_free(index)]
        return sorted(wanted)  # as they lie in the file

    def is_absent(self, key: int) -> bool:
        """Return whether an expert is neither here nor on its way."""
        return not self._policy.resident[key]

    def landed(self, moves: Sequence[Move]) -> None:
        """Publish experts that have been read."""
        keys = [move.key for move in moves]
        self._in_flight[keys] = False
        self.published[keys] = True

    def failed(self, moves: Sequence[Move]) -> None:
        """Free the places of experts that could not be read."""
        keys = np.array([move.key for move in moves], np.int64)
        self._in_flight[keys] = False
        self._policy.remove(keys)

    def left(self, keys: Keys) -> None:
        """Free the places of experts that left the pool while no other took them."""
        self.published[keys] = False
        self._policy.remove(keys)

    def reset(self) -> None:
        """Empty the pool."""
        self._begin_empty()
        self.published[:] = False

    def check_integrity(self) -> None:
        """Raises AssertionError if the policy and what is published contradict each other."""
        self._policy.check_integrity()
        resident = self._policy.resident
        assert not (self._in_flight & ~resident).any(), "on the way without a place"
        assert ((resident & ~self._in_flight) == self.published).all(), "published and resident"

    # ----- inside -----

    def _begin_empty(self) -> None:
        self._policy = create_policy(self._name, self.pools, self.space, self._counts)
        self._in_flight: Mask = np.zeros(self.space.n_keys, np.bool_)

    def _bring(self, pool: int, coming: list[int], busy: Mask, in_slots: Mask) -> list[Move]:
        policy = self._policy
        n_short = len(coming) - policy.n_free(pool)
        leaving: list[int] = []
        if n_short > 0:
            twice = policy.resident & in_slots & ~busy & (policy.pool_of == pool)
            leaving = np.flatnonzero(twice)[:n_short].tolist()
        moves = [Move(pool, key, victim) for key, victim in zip(coming, leaving, strict=False)]
        if moves:
            policy.remove(np.array(leaving, np.int64))
            policy.insert(np.array([move.key for move in moves], np.int64))
            busy[[move.key for move in moves]] = True  # the others' victims are none of these
        return moves + policy.promote(coming[len(moves) :], busy)
