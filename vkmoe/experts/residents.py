"""Who holds the slots of each pool, and who of them is pinned.

All pools of a model are one object with one array per fact, because a token asks for hundreds of
experts at once. Decides nothing: policy.py does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.decide.keys import KeySpace
from vkmoe.experts.decide.settings import PoolSpec
from vkmoe.experts.moves import FREE

__all__ = ["NO_POOL", "Keys", "Mask", "Residents"]

NO_POOL = -1

Keys = NDArray[np.int64]  # numbers of experts
Mask = NDArray[np.bool_]  # [n_keys]


class Residents:
    """The experts in slots, by expert and by pool. A pin is noted of others too."""

    def __init__(self, pools: Sequence[PoolSpec], space: KeySpace) -> None:
        assert all(pool.capacity >= 1 for pool in pools), pools
        self.pools, self.space = tuple(pools), space
        self.mask: Mask = np.zeros(space.n_keys, np.bool_)
        self.pinned: Mask = np.zeros(space.n_keys, np.bool_)  # resident or not
        # Residents without a pin; with an entry for the place that nobody holds.
        self.unpinned: Mask = np.zeros(space.n_keys + 1, np.bool_)
        self.pool_of: Keys = np.full(space.n_keys, NO_POOL, np.int64)
        for index, pool in enumerate(pools):
            for layer in pool.layers:
                self.pool_of[space.numbers(layer)] = index
        # Who holds the places of each pool, n_keys for nobody: rows to ask many pools at once.
        n_widest = max((pool.capacity for pool in pools), default=0)
        self.holders: Keys = np.full((len(self.pools), n_widest), space.n_keys, np.int64)
        self._place_of: Keys = np.zeros(space.n_keys, np.int64)
        self._free = [list(range(pool.capacity))[::-1] for pool in pools]
        self._n_pinned: Keys | None = None  # None: to be counted

    def n_free(self, pool: int) -> int:
        """Slots that nobody holds."""
        return len(self._free[pool])

    def of(self, pool: int) -> Keys:
        """The residents of a pool, ascending."""
        return np.flatnonzero(self.mask & (self.pool_of == pool))

    @property
    def n_pinned(self) -> Keys:
        """How many residents of each pool are pinned, [n_pools]."""
        if self._n_pinned is None:
            pools = self.pool_of[self.mask & self.pinned]
            self._n_pinned = np.bincount(pools, minlength=len(self.pools))
        return self._n_pinned

    def enter(self, keys: Keys, victims: Keys) -> None:
        """Each takes the slot of its victim, who leaves, or for FREE one that nobody holds."""
        assert not self.mask[keys].any(), keys
        pools, places = self.pool_of[keys], self._place_of[victims]
        held = victims != FREE
        leaving = victims[held]
        assert self.mask[leaving].all(), leaving
        free = pools[~held].tolist()
        assert all(map(self._free.__getitem__, free)), "no slot is free"
        places[~held] = [self._free[pool].pop() for pool in free]
        self.mask[leaving] = False
        self.mask[keys] = True
        self._place_of[keys] = places
        self.holders[pools, places] = keys
        self._note_pins(leaving)
        self._note_pins(keys)

    def leave(self, keys: Keys) -> None:
        """Residents leave their slots. A pin of one stays noted for when it comes back."""
        assert self.mask[keys].all(), keys
        pools, places = self.pool_of[keys], self._place_of[keys]
        for pool, place in zip(pools.tolist(), places.tolist(), strict=True):
            self._free[pool].append(place)
        self.holders[pools, places] = self.space.n_keys
        self.mask[keys] = False
        self._note_pins(keys)

    def pin(self, keys: Keys, pinned: bool = True) -> None:
        """Note the pins of these, or take them back."""
        self.pinned[keys] = pinned
        self._n_pinned = None
        self._note_pins(keys)

    def check_integrity(self) -> None:
        """Raises AssertionError if the facts contradict each other (tests)."""
        assert (self.pool_of[self.mask] != NO_POOL).all(), "resident without a pool"
        for index, pool in enumerate(self.pools):
            residents = self.of(index).tolist()
            assert len(residents) == pool.capacity - self.n_free(index), (pool, residents)
            holders = self.holders[index, : pool.capacity]
            assert sorted(holders[holders < self.space.n_keys].tolist()) == residents, pool
            assert (holders[self._free[index]] == self.space.n_keys).all(), "held and free"
            assert (holders[self._place_of[residents]] == residents).all(), "places differ"
        assert (self.unpinned[:-1] == (self.mask & ~self.pinned)).all(), "pins differ"
        n_pinned = [int(self.pinned[self.of(pool)].sum()) for pool in range(len(self.pools))]
        assert self.n_pinned.tolist() == n_pinned, "pins are miscounted"

    def _note_pins(self, keys: Keys) -> None:
        """These came, went, were pinned or set free."""
        pinned = self.pinned[keys]
        self.unpinned[keys] = self.mask[keys] > pinned
        if pinned.any():
            self._n_pinned = None
