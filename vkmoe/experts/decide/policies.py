"""Cache policies: which resident of a pool of slots leaves first when another expert needs a slot.

Owns the contract that all policies share (tests/experts/decide/test_policy_contract.py), the three
policies and their names; a new one is a class and a line in POLICIES. Policies see numbers of
experts, never a buffer. Which experts should enter is decided in residency.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from vkmoe.choices import PolicyName
from vkmoe.errors import UsageError
from vkmoe.experts.decide.counts import DecayedCounts
from vkmoe.experts.decide.keys import Keys, KeySpace, Mask
from vkmoe.experts.decide.residents import FREE, NO_LIMITS, Leaving, Limits, Move, Residents
from vkmoe.experts.decide.settings import PoolSpec

__all__ = ["POLICIES", "PROTECTED_SHARE", "Lfru", "Lru", "Policy", "Slru", "create_policy"]

# The share of a pool that Slru protects. On traces of the demo model larger shares hit less, and
# smaller ones hardly more; where the subject changes, a share keeps what is in use now.
PROTECTED_SHARE = 0.25

Ranks = NDArray[np.int64]
_NEVER = np.iinfo(np.int64).max  # the rank of those that may not leave
_MAX_CLOCK = (1 << 31) - 2  # recency is an int32
_NO_RECENCY = np.iinfo(np.int32).max  # a recency that no expert has


class Policy(ABC):
    """Orders the experts that hold the slots of each pool by which would leave first.

    A subclass adds a rank. All else is common: no pinned expert leaves, nor one that is needed; the
    one inserted last leaves only if no other of its pool may; and none whose layer has no more
    slots than the pool's floor, unless for an expert of the same layer.
    """

    def __init__(self, pools: Sequence[PoolSpec], space: KeySpace, counts: DecayedCounts) -> None:
        self.pools, self.space, self.counts = tuple(pools), space, counts
        self._residents = Residents(pools, space)
        self.resident: Mask = self._residents.mask
        self.pool_of: Keys = self._residents.pool_of
        # Like all that is looked up by place, it has an entry more, for places that are free.
        self._last: NDArray[np.int32] = np.zeros(space.n_keys + 1, np.int32)  # rises with each use
        self._clock = 1  # 0 stands for experts that were never used
        self._newest: Keys = np.full(len(self.pools), FREE, np.int64)  # inserted last

    # ----- questions -----

    def n_free(self, pool: int) -> int:
        """Return how many slots of a pool are free."""
        return self._residents.n_free(pool)

    def is_pinned(self, key: int) -> bool:
        return bool(self._residents.pinned[key])

    def order(self, pool: int) -> list[int]:
        """List the residents of a pool: those that would leave first in front, pinned ones last."""
        none_needed = np.zeros(self.space.n_keys, np.bool_)
        order = self._orders([pool], none_needed)[0]
        newest = int(self._newest[pool])
        if newest in order:
            order.remove(newest)
            order.append(newest)
        residents = self._residents.of(pool)
        return [*order, *residents[self._residents.pinned[residents]].tolist()]

    def victim(self, newcomer: int, needed: Mask) -> int | None:
        """Return which key would leave for `newcomer` were its pool full; None if none may."""
        pool = int(self.pool_of[newcomer])
        return self._leaving(pool, 0, self._orders([pool], needed)[0]).first_for(newcomer)

    # ----- changes -----

    def use(self, keys: Keys) -> Keys:
        """Note that a token used these distinct keys, all in pools, the most important first.

        Once per token, when `counts` has counted it. Returns those that are not resident, in order.
        """
        here = self.resident[keys]
        self._touch(keys[here])
        return keys[~here]

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
            bids = np.where(self._residents.pinned[keys], inf, limits.bids)
            turns = np.argsort(-bids, kind="stable").tolist()
            limits = limits._replace(bids=bids)
        moves = self._admit(keys.tolist(), self.pool_of[keys].tolist(), turns, needed, limits)
        if moves:
            entering = np.array([move.key for move in moves], np.int64)
            self._enter(entering, np.array([move.victim for move in moves], np.int64))
        return moves

    def insert(self, keys: Keys) -> None:
        """Put keys that are not resident into free slots of their pools."""
        self._enter(keys, np.full(len(keys), FREE, np.int64))

    def remove(self, keys: Keys) -> None:
        """Take residents out of their slots; a pin stays noted for when its expert comes back."""
        self._residents.leave(keys)

    def pin(self, keys: Keys) -> None:
        """Never let these leave; those that are not resident, from their next insertion on."""
        self._residents.pin(keys)

    def unpin(self, keys: Keys) -> None:
        """Take pins back; does nothing to keys without."""
        self._residents.pin(keys, False)

    def check_integrity(self) -> None:
        """Raises AssertionError if the policy contradicts itself (tests)."""
        self._residents.check_integrity()
        for pool in range(len(self.pools)):
            assert sorted(self.order(pool)) == self._residents.of(pool).tolist(), pool
        recency = self._last[:-1][self.resident]
        assert len(np.unique(recency)) == len(recency), "recency is not an order"

    # ----- what a policy adds -----

    @abstractmethod
    def _rank(self, keys: Keys, unpinned: NDArray[np.bool_], pools: Sequence[int]) -> Ranks:
        """Rank residents: [n_pools, n], the lowest leaves first, and no two in a row are equal.

        `keys` [n_pools, n] hold the places of these pools, n_keys where one is free; `unpinned` are
        those without a pin. The ranks of the others mean nothing.
        """

    def _enter(self, keys: Keys, victims: Keys) -> None:
        """Give each key the slot of its victim, which leaves, or for FREE a free one."""
        self._residents.enter(keys, victims)
        self._newest[self.pool_of[keys]] = keys  # the last one of each pool stays
        self._touch(keys)

    # ----- inside -----

    def _touch(self, keys: Keys) -> None:
        """Make these the most recent, the last one most of all."""
        if self._clock + len(keys) > _MAX_CLOCK:
            self._last = self._last.argsort(kind="stable").argsort().astype(np.int32)
            self._clock = len(self._last)
        end = self._clock + len(keys)
        self._last[keys] = np.arange(self._clock, end)
        self._clock = end

    def _admit(
        self,
        keys: Sequence[int],
        pools: Sequence[int],
        turns: Sequence[int],
        needed: Mask,
        limits: Limits,
    ) -> list[Move]:
        """Return which of these keys, in their turns, get a slot, and which leave for them."""
        leaving = self._leaving_for(Counter(pools), needed)
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

    def _leaving_for(self, n_waiting: Mapping[int, int], needed: Mask) -> Mapping[int, Leaving]:
        """Return what leaves each of these pools with fewer free slots than experts that wait."""
        full = [pool for pool, n in n_waiting.items() if n > self.n_free(pool)]
        if not full:
            return {}
        n_most = None  # a floor may ask for any of them
        if not any(self.pools[pool].floor for pool in full):
            n_most = max(n_waiting[pool] for pool in full) + 1  # one to choose from
        orders = self._orders(full, needed, n_most)
        return {
            pool: self._leaving(pool, self.n_free(pool), order)
            for pool, order in zip(full, orders, strict=True)
        }

    def _leaving(self, pool: int, n_free: int, order: list[int]) -> Leaving:
        spare = self._spare(pool) if self.pools[pool].floor else None
        return Leaving(n_free, order, int(self._newest[pool]), self.space, spare)

    def _orders(
        self, pools: Sequence[int], needed: Mask, n_most: int | None = None
    ) -> list[list[int]]:
        """Return the first `n_most` that may leave each pool, whatever its floor and newest are."""
        keys = self._residents.holders[pools]
        unpinned = self._residents.unpinned[keys]
        allowed = unpinned > needed.take(keys, mode="clip")
        ranks = np.where(allowed, self._rank(keys, unpinned, pools), _NEVER)
        first = ranks.argsort(axis=1)[:, :n_most]
        rows = keys[np.arange(len(pools))[:, None], first].tolist()
        n_allowed = allowed.sum(axis=1).tolist()
        return [row[:n] for row, n in zip(rows, n_allowed, strict=True)]

    def _spare(self, pool: int) -> list[int]:
        """Return how many residents each layer has above the pool's floor [n_layers]."""
        layers = self._residents.of(pool) // self.space.n_experts
        n_resident = np.bincount(layers, minlength=self.space.n_layers)
        return [int(n) - self.pools[pool].floor for n in n_resident]


class Lru(Policy):
    """The least recently used leaves first: the plain policy that the others are measured by.

    An insertion counts as a use; a pinned key keeps its place in the order.
    """

    def _rank(self, keys: Keys, unpinned: NDArray[np.bool_], pools: Sequence[int]) -> Ranks:
        return self._last[keys].astype(np.int64)


class Slru(Policy):
    """The default policy: segmented LRU that looks at how often an expert was used.

    A newcomer is on probation until it is used again; only then it is protected. The least used on
    probation leaves, the least recent of equals, so a passing expert does not push out a steady
    one. Where none of them may leave, the least recently used protected one does.

    Protected are the most recently used of those used again, up to a share of the pool. Pinned ones
    come first in that share, however many they are. With `frequency` off the least recent on
    probation leaves, for comparison.
    """

    def __init__(
        self,
        pools: Sequence[PoolSpec],
        space: KeySpace,
        counts: DecayedCounts,
        share: float = PROTECTED_SHARE,
        frequency: bool = True,
    ) -> None:
        super().__init__(pools, space, counts)
        assert 0 <= share <= 1, share
        self.frequency = frequency
        self._again: Mask = np.zeros(space.n_keys + 1, np.bool_)  # used again since insertion
        # At least one slot is on probation: a newcomer could not stay otherwise.
        sizes = [min(int(pool.capacity * share), pool.capacity - 1) for pool in pools]
        self._n_protected = np.array(sizes, np.int64)

    def protected(self, pool: int) -> set[int]:
        """Return the protected residents of a pool, pinned ones among them."""
        keys, residents = self._residents.holders[[pool]], self._residents.of(pool)
        unpinned = self._residents.unpinned[keys]
        protected = self._protected(keys, unpinned, [pool], self._last[keys])
        pinned = residents[self._residents.pinned[residents]]
        return {*keys[protected].tolist(), *pinned.tolist()}

    def use(self, keys: Keys) -> Keys:
        self._again[keys] = True  # also of those that will be inserted, which takes it back
        return super().use(keys)

    def unpin(self, keys: Keys) -> None:
        """Take pins back; the experts that had one stay protected, as if they were used now."""
        freed = keys[self.resident[keys] & self._residents.pinned[keys]]
        super().unpin(keys)
        self._touch(freed)
        self._again[freed] = True

    def _enter(self, keys: Keys, victims: Keys) -> None:
        super()._enter(keys, victims)
        self._again[keys] = False

    def _rank(self, keys: Keys, unpinned: NDArray[np.bool_], pools: Sequence[int]) -> Ranks:
        last = self._last[keys]
        values = self.counts.of(keys) if self.frequency else np.zeros(keys.shape)
        values[self._protected(keys, unpinned, pools, last)] = np.inf
        return _rank_by(values, last)

    def _protected(
        self,
        keys: Keys,
        unpinned: NDArray[np.bool_],
        pools: Sequence[int],
        last: NDArray[np.int32],
    ) -> NDArray[np.bool_]:
        """Return which are protected, [n_pools, n]; arguments as for `_rank`, and their recency."""
        room = (self._n_protected - self._residents.n_pinned)[pools]
        recency = last * (self._again[keys] & unpinned)  # 0: cannot be protected
        column = keys.shape[1] - np.maximum(1, room)
        lowest = np.maximum(1, np.sort(recency, axis=1)[np.arange(len(pools)), column])
        lowest[room <= 0] = _NO_RECENCY
        found: NDArray[np.bool_] = recency >= lowest[:, None]
        return found


class Lfru(Policy):
    """The lowest score leaves first; of equals, the least recent. An insertion counts as a use.

        score = decayed uses / (1 + tokens since the last use)

    The score is that of vLLM's CachedWeightProvider (pull request 37190).
    """

    def __init__(self, pools: Sequence[PoolSpec], space: KeySpace, counts: DecayedCounts) -> None:
        super().__init__(pools, space, counts)
        self._used_at: Keys = np.zeros(space.n_keys + 1, np.int64)  # tokens

    def use(self, keys: Keys) -> Keys:
        self._used_at[keys] = self.counts.now
        return super().use(keys)

    def _enter(self, keys: Keys, victims: Keys) -> None:
        super()._enter(keys, victims)
        self._used_at[keys] = self.counts.now

    def _rank(self, keys: Keys, unpinned: NDArray[np.bool_], pools: Sequence[int]) -> Ranks:
        since = self.counts.now - self._used_at[keys]
        return _rank_by(self.counts.of(keys) / (1 + since), self._last[keys])


def _rank_by(values: NDArray[np.float64], recency: NDArray[np.int32]) -> Ranks:
    """Join values and recency in one rank: the lowest value first, of equals the least recent.

    The bits of a float32, as an integer, rise with it where it is not negative; values are equal
    if they are as float32.
    """
    bits = values.astype(np.float32).view(np.int32).astype(np.int64)
    return (bits << 32) | recency


POLICIES: Mapping[PolicyName, type[Policy]] = {"lru": Lru, "slru": Slru, "lfru": Lfru}


def create_policy(
    name: PolicyName, pools: Sequence[PoolSpec], space: KeySpace, counts: DecayedCounts
) -> Policy:
    """Make a policy of empty pools. Raises UsageError for a name that is none of POLICIES."""
    if name not in POLICIES:
        raise UsageError(f"no cache policy is called '{name}'", f"use one of {', '.join(POLICIES)}")
    return POLICIES[name](pools, space, counts)
