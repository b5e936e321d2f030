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
    """An expert that gets a slot: to copy from its home, unless it has landed."""

    pool: int
    key: int  # its number
    victim: int  # whose slot it takes; FREE: one that nobody has
    landed: bool = False  # it keeps its landing slot, and the slot above is the next landing slot


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


class Leaving:
    """A pool's free slots first; then who leaves, in order.

    The one inserted last leaves only if nobody else may, and none of a layer that has nobody to
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
        """`order` are those that may leave; `spare` [n_layers] how many each layer can do without,
        None: all.
        """
        self._n_free, self._order, self._newest = n_free, order, newest
        self._space, self._spare = space, spare

    def first_for(self, newcomer: int) -> int | None:
        """Whose slot it would take; FREE: one that nobody holds; None: there is none."""
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
        """The newcomer takes the slot that `first_for` said."""
        self._newest = FREE  # it is the newcomer now, who cannot leave
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
    """Newcomers enter whose bid is more than what their victim is worth; pinned ones anyway.

    Copies into slots have at most `budget_bytes`; the first `n_landed` newcomers need none.
    """

    bids: Values | None = None  # [n newcomers]; None: everybody enters
    worth: Values | None = None  # [n_keys]; with bids
    budget_bytes: float = inf
    n_landed: int = 0

    def lets_in(self, newcomer: int, victim: int) -> bool:
        """Whether the newcomer of this index may take the victim's slot, as far as worth goes."""
        if self.bids is None or self.worth is None:
            return True
        return self.bids.item(newcomer) > self.worth.item(victim)


NO_LIMITS = Limits()
