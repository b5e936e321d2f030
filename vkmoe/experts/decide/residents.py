"""Which experts hold the slots of each pool, which of them may leave, and for which newcomers.

Owns those facts, for all pools of a model at once with one array per fact, because a token asks for
hundreds of experts; and the answer that all deciding ends in, a `Move`. Does not rank the experts:
policies.py does.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from vkmoe.experts.decide.keys import Keys, KeySpace, Mask, Values
from vkmoe.experts.decide.settings import PoolSpec

__all__ = ["FREE", "NO_LIMITS", "NO_POOL", "Leaving", "Limits", "Move", "Residents"]

NO_POOL = -1
FREE = -1  # in place of a victim: a slot that no expert holds


class Move(NamedTuple):
    """Gives an expert a slot: it is copied there from its home, unless it has landed."""

    pool: int
    key: int  # its number
    victim: int  # the key that loses its slot to it; FREE: it takes a free slot
    landed: bool = False  # it keeps its landing slot, and the slot above is the next landing slot


class Residents:
    """Knows the experts in slots, by expert and by pool, and the pins, of other experts too."""

    def __init__(self, pools: Sequence[PoolSpec], space: KeySpace) -> None:
        assert all(pool.capacity >= 1 for pool in pools), pools
        self.pools, self.space = tuple(pools), space
        self.mask: Mask = np.zeros(space.n_keys, np.bool_)
        self.pinned: Mask = np.zeros(space.n_keys, np.bool_)  # resident or not
        # Residents without a pin; with an entry more, for places that are free.
        self.unpinned: Mask = np.zeros(space.n_keys + 1, np.bool_)
        self.pool_of: Keys = np.full(space.n_keys, NO_POOL, np.int64)
        for index, pool in enumerate(pools):
            for layer in pool.layers:
                self.pool_of[space.numbers(layer)] = index
        # Keys by place, n_keys where it is free: one row a pool, to look at many pools at once.
        n_widest = max((pool.capacity for pool in pools), default=0)
        self.holders: Keys = np.full((len(self.pools), n_widest), space.n_keys, np.int64)
        self._place_of: Keys = np.zeros(space.n_keys, np.int64)
        self._free = [list(range(pool.capacity))[::-1] for pool in pools]
        self._n_pinned: Keys | None = None  # None: to be counted

    def n_free(self, pool: int) -> int:
        """Return how many slots of a pool are free."""
        return len(self._free[pool])

    def of(self, pool: int) -> Keys:
        """Return the residents of a pool, ascending."""
        return np.flatnonzero(self.mask & (self.pool_of == pool))

    @property
    def n_pinned(self) -> Keys:
        """Return how many residents of each pool are pinned, [n_pools]."""
        if self._n_pinned is None:
            pools = self.pool_of[self.mask & self.pinned]
            self._n_pinned = np.bincount(pools, minlength=len(self.pools))
        return self._n_pinned

    def enter(self, keys: Keys, victims: Keys) -> None:
        """Give each key the slot of its victim, which leaves, or for FREE a free one."""
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
        """Take residents out of their slots; a pin stays noted for when its expert comes back."""
        assert self.mask[keys].all(), keys
        pools, places = self.pool_of[keys], self._place_of[keys]
        for pool, place in zip(pools.tolist(), places.tolist(), strict=True):
            self._free[pool].append(place)
        self.holders[pools, places] = self.space.n_keys
        self.mask[keys] = False
        self._note_pins(keys)

    def pin(self, keys: Keys, pinned: bool = True) -> None:
        """Note the pins of these experts, or take them back."""
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
        """Bring the facts on pins up to date for experts that came, went or were (un)pinned."""
        pinned = self.pinned[keys]
        self.unpinned[keys] = self.mask[keys] > pinned
        if pinned.any():
            self._n_pinned = None


class Leaving:
    """Gives a pool's slots to newcomers, one by one: free ones first, then in order of leaving.

    The expert inserted last leaves only if no other may, and none of a layer that has none to
    spare, unless for an expert of the same layer.
    """

    def __init__(
        self,
        n_free: int,
        order: list[int],
        newest: int,
        space: KeySpace,
        spare: list[int] | None = None,
    ) -> None:
        """List those that may leave in `order`, and how many each layer can spare [n_layers].

        Without `spare` it is all of them.
        """
        self._n_free, self._order, self._newest = n_free, order, newest
        self._space, self._spare = space, spare

    def first_for(self, newcomer: int) -> int | None:
        """Return the key whose slot it would take; FREE: a free one; None: there is none."""
        if self._n_free:
            return FREE
        last = None
        for key in self._order:
            if self._spare is not None and not self._is_spared(key, newcomer):
                continue
            if key != self._newest:
                return key
            last = key
        return last

    def take(self, victim: int, newcomer: int) -> None:
        """Let the newcomer take the slot that `first_for` answered."""
        self._newest = FREE  # it is the newcomer now, which cannot leave
        if victim == FREE:
            self._n_free -= 1
        else:
            self._order.remove(victim)
        if self._spare is not None:
            self._spare[self._space.layer(newcomer)] += 1
            if victim != FREE:
                self._spare[self._space.layer(victim)] -= 1

    def _is_spared(self, key: int, newcomer: int) -> bool:
        assert self._spare is not None
        layer = self._space.layer(key)
        return self._spare[layer] > 0 or layer == self._space.layer(newcomer)


class Limits(NamedTuple):
    """Lets newcomers in that bid more than their victim is worth, and pinned ones anyway.

    Copies into slots have at most `budget_bytes`; the first `n_landed` newcomers need none.
    """

    bids: Values | None = None  # [n newcomers]; None: all enter
    worth: Values | None = None  # [n_keys]; with bids
    budget_bytes: float = inf
    n_landed: int = 0

    def lets_in(self, newcomer: int, victim: int) -> bool:
        """Return whether a newcomer, by index, may take the victim's slot as far as worth goes."""
        if self.bids is None or self.worth is None:
            return True
        return self.bids.item(newcomer) > self.worth.item(victim)


NO_LIMITS = Limits()
