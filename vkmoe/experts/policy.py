"""What a cache policy is: it orders the residents of every pool of slots, and says who leaves.

A policy sees numbers of experts (keys.py), never a buffer. All pools of a model are one object with
one array per fact, because a token asks for hundreds of experts at once. All policies pass one
contract test, tests/experts/test_policy_contract.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.frequency import DecayedCounts
from vkmoe.experts.keys import KeySpace
from vkmoe.experts.limits import NO_LIMITS, Limits, Proposals
from vkmoe.experts.moves import FREE, Move
from vkmoe.experts.settings import PoolSpec

__all__ = ["NO_POOL", "Keys", "Mask", "Policy", "Ranks", "rank_by"]

NO_POOL = -1
NOBODY = -1

Keys = NDArray[np.int64]  # numbers of experts
Mask = NDArray[np.bool_]  # [n_keys]
Ranks = NDArray[np.int64]

_NEVER = np.iinfo(np.int64).max  # the rank of those that may not leave
_MAX_CLOCK = (1 << 31) - 2  # recency is an int32


class Policy(ABC):
    """Who holds the slots of each pool, and who of them would leave first.

    A subclass adds a rank. Everything else is alike: no pinned expert leaves, nor one that is
    needed; the one inserted last only if nobody else of its pool may; and none whose layer has no
    more slots than the pool's floor, unless for an expert of the same layer.
    """

    def __init__(self, pools: Sequence[PoolSpec], space: KeySpace, counts: DecayedCounts) -> None:
        assert all(pool.capacity >= 1 for pool in pools), pools
        self.pools, self.space, self.counts = tuple(pools), space, counts
        self.resident: Mask = np.zeros(space.n_keys, np.bool_)
        self._pinned: Mask = np.zeros(space.n_keys, np.bool_)  # resident or not
        # With an entry for the place that nobody holds, as all that is asked place by place.
        self._unpinned: Mask = np.zeros(space.n_keys + 1, np.bool_)  # residents without a pin
        self._last: NDArray[np.int32] = np.zeros(space.n_keys + 1, np.int32)  # rises with each use
        self._clock = 0
        self._newest: list[int | None] = [None] * len(self.pools)  # inserted last, while resident
        self.pool_of: Keys = np.full(space.n_keys, NO_POOL, np.int64)
        for index, pool in enumerate(pools):
            for layer in pool.layers:
                self.pool_of[space.numbers(layer)] = index
        # Who holds the places of each pool, n_keys for nobody: rows to ask many pools at once.
        n_widest = max((pool.capacity for pool in pools), default=0)
        self._holders: Keys = np.full((len(self.pools), n_widest), space.n_keys, np.int64)
        self._place_of: Keys = np.zeros(space.n_keys, np.int64)
        self._slot_bytes = np.array([pool.slot_bytes for pool in pools], np.int64)
        self._has_floors = any(pool.floor for pool in pools)
        self._free = [list(range(pool.capacity))[::-1] for pool in pools]

    # ----- asked -----

    def n_free(self, pool: int) -> int:
        """Slots that nobody holds."""
        return len(self._free[pool])

    def is_pinned(self, key: int) -> bool:
        return bool(self._pinned[key])

    def order(self, pool: int) -> list[int]:
        """The residents of a pool: those that would leave first in front, the pinned ones last."""
        nobody = np.zeros(self.space.n_keys, np.bool_)
        order = self._leaving(pool, nobody)
        newest = self._newest[pool]
        if newest in order:
            order.remove(newest)
            order.append(newest)
        pinned = self.resident & self._pinned & (self.pool_of == pool)
        return [*order, *np.flatnonzero(pinned).tolist()]

    def victim(self, newcomer: int, needed: Mask) -> int | None:
        """Who would leave for `newcomer` were its pool full; None if nobody. Changes nothing."""
        pool = int(self.pool_of[newcomer])
        order = self._leaving(pool, needed)
        return self._choose(order, newcomer, self._newest[pool], self._spare(pool))

    # ----- told -----

    def use(self, keys: Keys) -> Keys:
        """A token used these distinct keys, all of them in pools, the most important first.

        Once per token, when `counts` has counted it. Returns those that are not resident, in order.
        """
        here = self.resident[keys]
        self._touch(keys[here])
        return keys[~here]

    def promote(
        self, newcomers: Sequence[int] | Keys, needed: Mask, limits: Limits = NO_LIMITS
    ) -> list[Move]:
        """Give slots to newcomers, in order, as long as somebody may leave for them.

        Where they bid, the highest bid of a pool comes first, and pinned ones before all. Returns
        who got one, by pool. Victims are never `needed` (what the token uses, what is being copied)
        and never newcomers.
        """
        keys = np.array(newcomers, np.int64)
        turns = np.arange(len(keys))
        if limits.bids is not None:
            turns = np.argsort(-np.where(self._pinned[keys], inf, limits.bids), kind="stable")
        propose = self._propose_above_floors if self._has_floors else self._propose
        taken = propose(keys, turns, needed).within(limits, self._pinned, self._slot_bytes)
        if not taken.keys.size:
            return []
        self.remove(taken.victims[taken.victims != FREE])
        self.insert(taken.keys)
        return list(map(Move, taken.pools.tolist(), taken.keys.tolist(), taken.victims.tolist()))

    def insert(self, keys: Keys) -> None:
        """Keys that are not resident take free slots of their pools."""
        assert not self.resident[keys].any(), keys
        pools = self.pool_of[keys]
        places = []
        for key, pool in zip(keys.tolist(), pools.tolist(), strict=True):
            assert self._free[pool], (key, self.pools[pool])
            places.append(self._free[pool].pop())
            self._newest[pool] = key
        self._place_of[keys] = places
        self._holders[pools, places] = keys
        self.resident[keys] = True
        self._touch(keys)
        self._note_pins(keys)

    def remove(self, keys: Keys) -> None:
        """Residents leave their slots. A pin of one stays noted for when it comes back."""
        assert self.resident[keys].all(), keys
        pools, places = self.pool_of[keys], self._place_of[keys]
        for key, pool, place in zip(keys.tolist(), pools.tolist(), places.tolist(), strict=True):
            self._free[pool].append(place)
            if self._newest[pool] == key:
                self._newest[pool] = None
        self._holders[pools, places] = self.space.n_keys
        self.resident[keys] = False
        self._note_pins(keys)

    def pin(self, keys: Keys) -> None:
        """Never let these leave; those that are not resident, from their next insertion on."""
        self._pinned[keys] = True
        self._note_pins(keys)

    def unpin(self, keys: Keys) -> None:
        """Take pins back; does nothing to keys without."""
        self._pinned[keys] = False
        self._note_pins(keys)

    def check_integrity(self) -> None:
        """Raises AssertionError if the policy contradicts itself (tests)."""
        assert (self.pool_of[self.resident] != NO_POOL).all(), "resident without a pool"
        for index, pool in enumerate(self.pools):
            residents = np.flatnonzero(self.resident & (self.pool_of == index)).tolist()
            assert len(residents) == pool.capacity - self.n_free(index), (pool, residents)
            holders = self._holders[index, : pool.capacity]
            assert sorted(holders[holders < self.space.n_keys].tolist()) == residents, pool
            assert (holders[self._free[index]] == self.space.n_keys).all(), "held and free"
            assert (holders[self._place_of[residents]] == residents).all(), "places differ"
            assert self._newest[index] in (None, *residents), (pool, self._newest[index])
            assert sorted(self.order(index)) == residents, (pool, residents)
        assert (self._unpinned[:-1] == (self.resident & ~self._pinned)).all(), "pins differ"
        recency = self._last[:-1][self.resident]
        assert len(np.unique(recency)) == len(recency), "recency is not an order"

    # ----- what a policy adds -----

    @abstractmethod
    def _rank(self, keys: Keys, unpinned: NDArray[np.bool_], pools: Sequence[int]) -> Ranks:
        """Who would leave first: [n_pools, n], the lowest first; no two alike in a row.

        `keys` [n_pools, n] are who holds the places of these pools, n_keys for nobody; `unpinned`,
        who has no pin. The ranks of the others mean nothing.
        """

    # ----- inside -----

    def _touch(self, keys: Keys) -> None:
        """Make these the most recent, the last one most of all."""
        if self._clock + len(keys) > _MAX_CLOCK:
            self._last = self._last.argsort(kind="stable").argsort().astype(np.int32)
            self._clock = len(self._last)
        end = self._clock + len(keys)
        self._last[keys] = np.arange(self._clock, end)
        self._clock = end

    def _note_pins(self, keys: Keys) -> None:
        """These came, went, were pinned or set free."""
        self._unpinned[keys] = self.resident[keys] > self._pinned[keys]

    def _leaving_rows(self, pools: Sequence[int], needed: Mask) -> Keys:
        """Who may leave each of these pools, the floor aside, those that would first in front.

        [n_pools, n], NOBODY after the last.
        """
        keys = self._holders[pools]
        unpinned = self._unpinned[keys]
        allowed = unpinned > needed.take(keys, mode="clip")
        ranks = np.where(allowed, self._rank(keys, unpinned, pools), _NEVER)
        rows: Keys = np.where(allowed, keys, NOBODY)
        rows = rows[np.arange(len(pools))[:, None], ranks.argsort(axis=1)]
        return rows

    def _leaving(self, pool: int, needed: Mask) -> list[int]:
        return [key for key in self._leaving_rows([pool], needed)[0].tolist() if key != NOBODY]

    def _propose(self, newcomers: Keys, turns: Keys, needed: Mask) -> Proposals:
        """In each pool free slots first, then those of whoever leaves. Must hold: no floors."""
        turns = turns[np.argsort(self.pool_of[newcomers[turns]], kind="stable")]
        pool_of = self.pool_of[newcomers[turns]]
        first = np.ones(len(pool_of), np.bool_)  # in its pool
        first[1:] = pool_of[1:] != pool_of[:-1]
        begins, row = first.nonzero()[0], first.cumsum() - 1
        pools, n_waiting = pool_of[begins], np.bincount(row)
        n_free = np.array([len(self._free[pool]) for pool in pools.tolist()], np.int64)
        place = np.arange(len(turns)) - (begins + n_free)[row]
        victims = np.full(len(turns), FREE, np.int64)
        late = place >= 0  # who finds no free slot
        full = np.flatnonzero(n_waiting > n_free)
        found = ~late
        if full.size:
            leaving = self._leaving_rows(pools[full].tolist(), needed)
            self._spare_newest(pools[full].tolist(), n_free[full], leaving)
            row_of = np.zeros(len(pools), np.int64)
            row_of[full] = np.arange(len(full))
            late &= place < leaving.shape[1]
            victims[late] = leaving[row_of[row[late]], place[late]]
            found |= late & (victims != NOBODY)
        proposals = Proposals(pool_of, newcomers[turns], victims, turns)
        return proposals.chosen(found)

    def _spare_newest(self, pools: Sequence[int], n_free: Keys, leaving: Keys) -> None:
        """The inserted last leaves a full pool second, if there is a second."""
        newest = [self._newest[pool] for pool in pools]
        first = np.array([NOBODY if key is None else key for key in newest], np.int64)
        if leaving.shape[1] < 2:
            return
        swapped = (leaving[:, 0] == first) & (leaving[:, 1] != NOBODY) & (n_free == 0)
        leaving[swapped, :2] = leaving[swapped, 1::-1]

    def _propose_above_floors(self, newcomers: Keys, turns: Keys, needed: Mask) -> Proposals:
        """The same one by one, because who may leave depends on who came before."""
        found: list[tuple[int, int, int, int]] = []
        pool_of = self.pool_of[newcomers[turns]]
        for pool in sorted(set(pool_of.tolist())):
            n_free, spare = len(self._free[pool]), self._spare(pool)
            order = self._leaving(pool, needed)
            newest = self._newest[pool] if not n_free else None
            n_before = len(found)
            for turn in turns[pool_of == pool].tolist():
                key, victim = int(newcomers[turn]), FREE
                if len(found) - n_before >= n_free:
                    chosen = self._choose(order, key, newest, spare)
                    if chosen is None:
                        continue
                    victim = chosen
                    order.remove(victim)
                    spare[self.space.layer(victim)] -= 1
                newest = None
                spare[self.space.layer(key)] += 1
                found.append((pool, key, victim, turn))
        return Proposals(*np.array(found, np.int64).reshape(-1, 4).T)

    def _choose(
        self, order: Sequence[int], newcomer: int, newest: int | None, spare: Sequence[int]
    ) -> int | None:
        """The first in `order` that may leave; the newest only where nobody else may."""
        last = None
        for key in order:
            layer = self.space.layer(key)
            if spare[layer] <= 0 and layer != self.space.layer(newcomer):
                continue
            if key != newest:
                return key
            last = key
        return last

    def _spare(self, pool: int) -> list[int]:
        """How many residents each layer has above the floor [n_layers]."""
        floor = self.pools[pool].floor
        layers = np.flatnonzero(self.resident & (self.pool_of == pool)) // self.space.n_experts
        n_resident = np.bincount(layers, minlength=self.space.n_layers)
        return [int(n) - floor for n in n_resident]


def rank_by(values: NDArray[np.float64], recency: NDArray[np.int32]) -> Ranks:
    """The lowest value first, the least recent of equals: one number for both.

    The bits of a float32, as an integer, rise with it where it is not negative; values are equal
    if they are as float32.
    """
    bits = values.astype(np.float32).view(np.int32).astype(np.int64)
    return (bits << 32) | recency
