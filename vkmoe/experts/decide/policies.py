"""Cache policies decide which resident of a pool of slots leaves first for another expert.

Owns whether a newcomer gets a slot, the contract that all policies share
(tests/experts/decide/test_policy_contract.py), the policies and their names; a new one is a class
and a line in POLICIES. Which experts should enter is decided in residency.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.choices import PolicyName
from vkmoe.experts.decide.keys import DecayedCounts, Keys, KeySpace, Mask, Values
from vkmoe.experts.decide.locations import FREE, Locations, Move

__all__ = [
    "NO_LIMITS",
    "POLICIES",
    "PROTECTED_SHARE",
    "Leaving",
    "Lfru",
    "Limits",
    "Lru",
    "Policy",
    "Slru",
]

# The share of a pool that Slru protects. On traces of the demo model larger shares hit less, and
# smaller ones hardly more; where the subject changes, a share keeps what is in use now.
PROTECTED_SHARE = 0.25

Ranks = NDArray[np.int64]
_NEVER = np.iinfo(np.int64).max  # the rank of those that may not leave
_MAX_CLOCK = (1 << 31) - 2  # recency is an int32
_NO_RECENCY = np.iinfo(np.int32).max  # a recency that no expert has


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
        """List those that may leave in `order`, and how many each layer can spare; None: all."""
        self._n_free, self._order, self._newest = n_free, order, newest
        self._space, self._spare = space, spare

    def first_for(self, newcomer: int) -> int | None:
        """Return the key whose slot the newcomer takes; FREE: a free one; None: there is none."""
        if self._n_free:
            return FREE
        last, spare, layer_of = None, self._spare, self._space.layer
        for key in self._order:
            if spare is not None:
                layer = layer_of(key)
                if spare[layer] <= 0 and layer != layer_of(newcomer):
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


class Limits(NamedTuple):
    """Lets newcomers in that bid more than their victim is worth, and pinned ones anyway.

    Copies into slots have at most `budget_bytes`; the first `n_landed` newcomers need none. With
    `ranks` the one that is worth least leaves first, whatever the policy says.
    """

    bids: Values | None = None  # [n newcomers]; None: all enter
    worth: Values | None = None  # [n_keys]; with bids
    budget_bytes: float = inf
    n_landed: int = 0
    ranks: bool = False

    def lets_in(self, newcomer: int, victim: int) -> bool:
        """Return whether a newcomer, by index, may take the victim's slot as far as worth goes."""
        if self.bids is None or self.worth is None:
            return True
        return self.bids.item(newcomer) > self.worth.item(victim)


NO_LIMITS = Limits()


class Policy(ABC):
    """Orders the experts that hold the slots of each pool by which would leave first.

    A subclass adds a rank. All else is common: no pinned expert leaves, nor one that is needed; the
    one inserted last leaves only if no other of its pool may; and none whose layer has no more
    slots than the pool's floor, unless for an expert of the same layer.
    """

    def __init__(self, locations: Locations, counts: DecayedCounts) -> None:
        self.locations, self.counts = locations, counts
        self.pools, self.space = locations.pools, locations.space
        # Like all that is looked up by holder, it has an entry more, for slots that are free.
        # It rises with each use.
        self._last: NDArray[np.int32] = np.zeros(self.space.n_keys + 1, np.int32)
        self._clock = 1  # 0 stands for experts that were never used
        self._newest: Keys = np.full(len(self.pools), FREE, np.int64)  # inserted last

    def use(self, keys: Keys) -> Keys:
        """Note that a token used these keys, all in pools, the most important first.

        Once per token, when `counts` has counted it. Returns those that are not resident, in order.
        """
        here = self.locations.are_resident(keys)
        self.note_use(keys[here])
        return keys[~here]

    def note_use(self, keys: Keys) -> None:
        """Note that a token used these, which were resident; otherwise as `use`."""
        self._touch(keys)

    def promote(
        self, newcomers: Sequence[int] | Keys, needed: Mask, limits: Limits = NO_LIMITS
    ) -> list[Move]:
        """Give slots to newcomers, in order, as long as others may leave for them.

        Where they bid, the highest bid comes first, and pinned ones before all. Returns the
        moves in that order. Victims are never `needed` (what the token uses, what is being copied)
        and never newcomers.
        """
        keys = np.array(newcomers, np.int64)
        turns = range(len(keys))
        if limits.bids is not None:
            bids = np.where(self.locations.pins[keys] != 0, inf, limits.bids)
            turns = np.argsort(-bids, kind="stable").tolist()
            limits = limits._replace(bids=bids)
        pools = self.locations.pool_of[keys].tolist()
        moves = self._admit(keys.tolist(), pools, turns, needed, limits)
        if moves:
            entering = np.array([move.key for move in moves], np.int64)
            self.enter(entering, np.array([move.victim for move in moves], np.int64))
        return moves

    def enter(self, keys: Keys, victims: Keys) -> None:
        """Give each key the slot of its victim, whatever that is worth, or for FREE a free one."""
        self._note_entry(keys)
        self.locations.enter(keys, victims)  # last: an expert with a slot has its recency

    def pin(self, keys: Keys, rule: int = 1) -> Keys:
        """Pin these keys, and no others, by a rule; return those that may leave again.

        Those that are not resident stay from their next insertion on.
        """
        return self.locations.pin(keys, rule)

    def check_integrity(self) -> None:
        """Raise AssertionError if the policy contradicts itself (tests)."""
        self.locations.check_integrity()
        recency = self._last[:-1][self.locations.resident]
        assert len(np.unique(recency)) == len(recency), "recency is not an order"

    # ----- what a policy adds -----

    @abstractmethod
    def _rank(self, keys: Keys, unpinned: Mask, pools: Sequence[int]) -> Ranks:
        """Rank residents: [n_pools, n], the lowest leaves first, and no two in a row are equal.

        `keys` [n_pools, n] are in the slots of these pools, n_keys where one is free; `unpinned`
        are those without a pin. The ranks of the others mean nothing.
        """

    def _note_entry(self, keys: Keys) -> None:
        """Note that these keys are about to get slots."""
        self._newest[self.locations.pool_of[keys]] = keys  # the last one of each pool stays
        self._touch(keys)

    # ----- inside -----

    def _touch(self, keys: Keys) -> None:
        """Make these keys the most recent, the last one most of all."""
        if self._clock + len(keys) > _MAX_CLOCK:
            self._last = self._last.argsort(kind="stable").argsort().astype(np.int32)
            self._clock = len(self._last)
        first = self._clock
        self._clock += len(keys)  # first: no recency is given twice
        self._last[keys] = np.arange(first, self._clock)

    def _admit(
        self,
        keys: Sequence[int],
        pools: Sequence[int],
        turns: Sequence[int],
        needed: Mask,
        limits: Limits,
    ) -> list[Move]:
        """Return which of these keys, in their turns, get a slot, and which leave for them."""
        leaving = self._leaving_for(Counter(pools), needed, limits.worth if limits.ranks else None)
        left = limits.budget_bytes
        closed: set[int] = set()  # pools where the others bid less, and better ones would leave
        moves: list[Move] = []
        for turn in turns:
            key, pool = keys[turn], pools[turn]
            victim = leaving[pool].first_for(key) if pool in leaving else FREE
            if victim is None or pool in closed:
                continue
            if victim != FREE and not limits.lets_in(turn, victim):
                closed.add(pool)
                continue
            landed = turn < limits.n_landed
            if not landed:
                left -= self.pools[pool].slot_bytes
                if left < 0:  # and stays so
                    continue
            if pool in leaving:
                leaving[pool].take(victim, key)
            moves.append(Move(pool, key, victim, landed))
        return moves

    def _leaving_for(
        self, n_waiting: Mapping[int, int], needed: Mask, worth: Values | None
    ) -> Mapping[int, Leaving]:
        """Return what leaves each of these pools with fewer free slots than experts that wait.

        By `worth` [n_keys], the least first; None: as the policy ranks them.
        """
        n_free = self.locations.n_free
        full = [pool for pool, n in n_waiting.items() if n > n_free(pool)]
        if not full:
            return {}
        n_most = None  # a floor may ask for any of them
        if not any(self.pools[pool].floor for pool in full):
            n_most = max(n_waiting[pool] for pool in full) + 1  # one to choose from
        orders = self._orders(full, needed, n_most, worth)
        return {
            pool: Leaving(n_free(pool), order, newest, self.space, self._spare(pool))
            for pool, order, newest in zip(full, orders, self._newest[full].tolist(), strict=True)
        }

    def _orders(
        self,
        pools: Sequence[int],
        needed: Mask,
        n_most: int | None = None,
        worth: Values | None = None,
    ) -> list[list[int]]:
        """Return the first `n_most` that may leave each pool, whatever its floor and newest are."""
        keys = self.locations.holders(pools)
        unpinned = self.locations.unpinned(keys)
        allowed = unpinned > needed.take(keys, mode="clip")
        if worth is None:
            ranks = self._rank(keys, unpinned, pools)
        else:
            ranks = _rank_by(worth.take(keys, mode="clip"), self._last[keys])
        ranks = np.where(allowed, ranks, _NEVER)
        first = ranks.argsort(axis=1)[:, :n_most]
        rows = keys[np.arange(len(pools))[:, None], first].tolist()
        n_allowed = allowed.sum(axis=1).tolist()
        return [row[:n] for row, n in zip(rows, n_allowed, strict=True)]

    def _spare(self, pool: int) -> list[int] | None:
        """Return how many residents each layer has above the pool's floor, if that has one."""
        if not (floor := self.pools[pool].floor):
            return None
        layers = self.locations.of(pool) // self.space.n_experts
        n_spare: list[int] = (np.bincount(layers, minlength=self.space.n_layers) - floor).tolist()
        return n_spare


class Lru(Policy):
    """The least recently used leaves first: the plain policy that the others are measured by.

    An insertion counts as a use; a pinned key keeps its place in the order.
    """

    def _rank(self, keys: Keys, unpinned: Mask, pools: Sequence[int]) -> Ranks:
        return self._last[keys].astype(np.int64)


class Slru(Policy):
    """Is the default policy: segmented LRU that looks at how often an expert was used.

    A newcomer is on probation until it is used again; only then it is protected. The least used on
    probation leaves, the least recent of equals, so a passing expert does not push out a steady
    one. Where none of them may leave, the least recently used protected one does.

    Protected are the most recently used of those used again, up to a share of the pool. Pinned ones
    come first in that share, however many they are. With `frequency` off the least recent on
    probation leaves, for comparison.
    """

    def __init__(
        self,
        locations: Locations,
        counts: DecayedCounts,
        share: float = PROTECTED_SHARE,
        frequency: bool = True,
    ) -> None:
        super().__init__(locations, counts)
        assert 0 <= share <= 1, share
        self.frequency = frequency
        self._again: Mask = np.zeros(self.space.n_keys + 1, np.bool_)  # used again since entry
        # At least one slot is on probation: a newcomer could not stay otherwise.
        sizes = [min(int(pool.capacity * share), pool.capacity - 1) for pool in self.pools]
        self._n_protected = np.array(sizes, np.int64)

    def note_use(self, keys: Keys) -> None:
        self._again[keys] = True
        super().note_use(keys)

    def pin(self, keys: Keys, rule: int = 1) -> Keys:
        """Pin as any policy does; those that had a pin stay protected, as if they were used now."""
        freed = super().pin(keys, rule)
        here = freed[self.locations.are_resident(freed)]
        self._touch(here)
        self._again[here] = True
        return freed

    def _note_entry(self, keys: Keys) -> None:
        super()._note_entry(keys)
        self._again[keys] = False

    def _rank(self, keys: Keys, unpinned: Mask, pools: Sequence[int]) -> Ranks:
        last = self._last[keys]
        values = self.counts.of(keys) if self.frequency else np.zeros(keys.shape)
        values[self._protected(keys, unpinned, pools, last)] = np.inf
        return _rank_by(values, last)

    def _protected(
        self,
        keys: Keys,
        unpinned: Mask,
        pools: Sequence[int],
        last: NDArray[np.int32],
    ) -> Mask:
        """Return which are protected, [n_pools, n]; arguments as for `_rank`, and their recency."""
        room = (self._n_protected - self.locations.n_pinned)[pools]
        recency = last * (self._again[keys] & unpinned)  # 0: cannot be protected
        column = keys.shape[1] - np.maximum(1, room)
        lowest = np.maximum(1, np.sort(recency, axis=1)[np.arange(len(pools)), column])
        lowest[room <= 0] = _NO_RECENCY
        found: Mask = recency >= lowest[:, None]
        return found


class Lfru(Policy):
    """The lowest score leaves first; of equals, the least recent. An insertion counts as a use.

        score = decayed uses / (1 + tokens since the last use)

    The score is that of vLLM's CachedWeightProvider (pull request 37190).
    """

    def __init__(self, locations: Locations, counts: DecayedCounts) -> None:
        super().__init__(locations, counts)
        self._used_at: Keys = np.zeros(self.space.n_keys + 1, np.int64)  # tokens

    def note_use(self, keys: Keys) -> None:
        self._used_at[keys] = self.counts.now
        super().note_use(keys)

    def _note_entry(self, keys: Keys) -> None:
        super()._note_entry(keys)
        self._used_at[keys] = self.counts.now

    def _rank(self, keys: Keys, unpinned: Mask, pools: Sequence[int]) -> Ranks:
        since = self.counts.now - self._used_at[keys]
        return _rank_by(self.counts.of(keys) / (1 + since), self._last[keys])


def _rank_by(values: Values, recency: NDArray[np.int32]) -> Ranks:
    """Join values and recency in one rank: the lowest value first, of equals the least recent.

    The bits of a float32, as an integer, rise with it where it is not negative; values are equal
    if they are as float32.
    """
    bits = values.astype(np.float32).view(np.int32).astype(np.int64)
    return (bits << 32) | recency


POLICIES: Mapping[PolicyName, type[Policy]] = {"lru": Lru, "slru": Slru, "lfru": Lfru}
