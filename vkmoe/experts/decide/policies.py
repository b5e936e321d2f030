"""Cache policies rank the experts in a pool of slots: the lowest leaves first for another one.

Owns whether a newcomer gets a slot, the contract that all policies share
(tests/experts/decide/test_policy_contract.py) and the policies. A new one is a class, a line in
POLICIES and its name in choices.py. Which experts should enter is decided in residency.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.choices import PolicyName
from vkmoe.experts import _residency
from vkmoe.experts.decide.keys import DecayedCounts, Keys, Mask, Values
from vkmoe.experts.decide.locations import FREE, Locations, Move

# The share of a pool that Slru protects. On traces of the demo model larger shares hit less, and
# smaller ones hardly more; where the subject changes, a share keeps what is in use now.
PROTECTED_SHARE = 0.25

_ROOMY = -1  # in place of a pool: it has a free slot for each newcomer
_MAX_CLOCK = (1 << 31) - 2  # recency is an int32
_NO_RECENCY = np.iinfo(np.int32).max  # a recency that no expert has


class Limits(NamedTuple):
    """Lets newcomers in that bid more than the value of their victim, and pinned ones anyway.

    Copies into slots have at most `budget_bytes`; the first `n_landed` newcomers need none.
    """

    bids: Values | None = None  # [n newcomers], in the unit of the policy's values; None: all enter
    budget_bytes: float = inf
    n_landed: int = 0


NO_LIMITS = Limits()


class Uses(NamedTuple):
    """Names the arrays of a policy, which stay the same ones."""

    last: NDArray[np.int32]  # how recent the last use of each expert is [n_keys + 1]
    again: Mask  # used again since it got its slot [n_keys + 1]
    newest: Keys  # the key that was inserted last [n_pools]
    floors: Keys  # [n_pools]
    slot_bytes: Keys  # [n_pools]


class Policy(ABC):
    """Orders the experts that hold the slots of each pool by which would leave first.

    A subclass adds a rank. All else is common: no pinned expert leaves, nor one that is needed; the
    one inserted last leaves only if no other of its pool may; and none whose layer has no more
    slots than the pool's floor, unless for an expert of the same layer.
    """

    def __init__(self, locations: Locations, counts: DecayedCounts) -> None:
        self.locations, self.counts = locations, counts
        self.pools, self.space = locations.pools, locations.space
        # What experts are worth to the tokens to come [n_keys], where that is forecast and known.
        self.worth: Values | None = None
        # Like all that is looked up by holder, it has an entry more, for slots that are free.
        # It rises with each use.
        self._last: NDArray[np.int32] = np.zeros(self.space.n_keys + 1, np.int32)
        self._clock = 1  # 0 stands for experts that were never used
        self._newest: Keys = np.full(len(self.pools), FREE, np.int64)  # inserted last
        self._floors: Keys = np.array([pool.floor for pool in self.pools], np.int64)
        self._slot_bytes: Keys = np.array([pool.slot_bytes for pool in self.pools], np.int64)

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
        if limits.bids is not None:
            bids = np.where(self.locations.pins[keys] != 0, inf, limits.bids)
            limits = limits._replace(bids=bids)
        moves = self._admit(keys, needed, limits)
        if moves:
            entering = np.array([move.key for move in moves], np.int64)
            self.enter(entering, np.array([move.victim for move in moves], np.int64))
        return moves

    def enter(self, keys: Keys, victims: Keys) -> None:
        """Give each key the slot of its victim, whatever that is worth, or for FREE a free one."""
        self._note_entry(keys)
        self.locations.enter(keys, victims)  # last: an expert with a slot has its recency

    def leaving_order(self) -> Keys:
        """Order the experts of each pool, the next to leave first: [n_pools, widest pool].

        Pinned ones come last, and n_keys behind the last expert.
        """
        pools = [*range(len(self.pools))]
        holders, unpinned = self.locations.holders(pools), self.locations.all_unpinned
        values = self._value(holders, unpinned[holders], pools)
        stays = np.where(holders == self.space.n_keys, 2, ~unpinned[holders])  # 1: pinned, 2: none
        order = np.lexsort((self._last[holders], values.astype(np.float32), stays), axis=-1)
        found: Keys = np.take_along_axis(holders, order, axis=1)
        return found

    def pin(self, keys: Keys, rule: int = 1) -> Keys:
        """Pin these keys, and no others, by a rule; return those that may leave again.

        Those that are not resident stay from their next insertion on.
        """
        return self.locations.pin(keys, rule)

    def take_over(self, other: Policy) -> None:
        """Go on from where another policy over the same record ends: with its order of uses."""
        self._last[:], self._clock, self._newest[:] = other._last, other._clock, other._newest

    def check_integrity(self) -> None:
        """Raise AssertionError if the policy contradicts itself (tests)."""
        self.locations.check_integrity()
        recency = self._last[:-1][self.locations.resident]
        assert len(np.unique(recency)) == len(recency), "recency is not an order"

    # ----- what a policy adds -----

    @abstractmethod
    def _value(self, keys: Keys, unpinned: Mask, pools: Sequence[int]) -> Values:
        """Value residents: [n_pools, n], the lowest leaves first, of equals the least recent.

        `keys` [n_pools, n] are in the slots of these pools, n_keys where one is free; `unpinned`
        are those without a pin. The values of the others mean nothing. Those are equal that are as
        float32.
        """

    def _note_entry(self, keys: Keys) -> None:
        """Note that these keys are about to get slots."""
        self._newest[self.locations.pool_of[keys]] = keys  # the last one of each pool stays
        self._touch(keys)

    def turns(self, n: int) -> int:
        """Return the first of `n` numbers in a row, each higher than all that were given before.

        They say how recent a use or an entry is. Mutates.
        """
        if self._clock + n > _MAX_CLOCK:
            self._last[:] = self._last.argsort(kind="stable").argsort()
            self._clock = len(self._last)
        first = self._clock
        self._clock += n
        return first

    # ----- inside -----

    def _touch(self, keys: Keys) -> None:
        """Make these keys the most recent, the last one most of all."""
        first = self.turns(len(keys))
        self._last[keys] = np.arange(first, first + len(keys))

    def _admit(self, keys: Keys, needed: Mask, limits: Limits) -> list[Move]:
        """Return which of these keys, in their turns, get a slot, and which leave for them."""
        if not keys.size:
            return []
        pools = self.locations.pool_of[keys]
        n_waiting = np.bincount(pools, minlength=len(self.pools))
        n_free = self.locations.n_free_of_all
        (full,) = (n_waiting > n_free).nonzero()
        rows = np.full(len(self.pools), _ROOMY, np.int64)
        rows[full] = np.arange(len(full))
        holders = self.locations.holders(full)
        values = self._value(holders, self.locations.all_unpinned[holders], full.tolist())
        found = _residency.admit(
            keys,
            limits.bids,
            rows[pools],
            self._slot_bytes[pools],
            limits.n_landed,
            limits.budget_bytes,
            holders,
            values,
            n_free[full],
            self._newest[full],
            self._floors[full],
            self.locations.all_unpinned,
            needed,
            self._last,
            self.space.n_experts,
        )
        taken, of_pool = keys.tolist(), pools.tolist()
        return [
            Move(of_pool[turn], taken[turn], victim, turn < limits.n_landed)
            for turn, victim in found
        ]


class Lru(Policy):
    """The least recently used leaves first: the plain policy that the others are measured by.

    An insertion counts as a use; a pinned key keeps its place in the order.
    """

    def _value(self, keys: Keys, unpinned: Mask, pools: Sequence[int]) -> Values:
        return np.zeros(keys.shape)


class Slru(Policy):
    """Segmented LRU that looks at how often an expert was used.

    A newcomer is on probation until it is used again; only then it is protected. The least used on
    probation leaves, the least recent of equals, so a passing expert does not push out a steady
    one. Where none of them may leave, the least recently used protected one does.

    Protected are the most recently used of those used again, up to a share of the pool. Pinned ones
    come first in that share, however many they are.
    """

    def __init__(self, locations: Locations, counts: DecayedCounts) -> None:
        super().__init__(locations, counts)
        self._again: Mask = np.zeros(self.space.n_keys + 1, np.bool_)  # used again since entry

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

    def _value(self, keys: Keys, unpinned: Mask, pools: Sequence[int]) -> Values:
        values = self.counts.of(keys)
        values[self._protected(keys, unpinned, pools)] = np.inf
        return values

    def _protected(self, keys: Keys, unpinned: Mask, pools: Sequence[int]) -> Mask:
        """Return which are protected, [n_pools, n]; arguments as for `_value`."""
        n_protected = (self.locations.capacities * PROTECTED_SHARE).astype(np.int64)
        room = (n_protected - self.locations.n_pinned)[pools]
        recency = self._last[keys] * (self._again[keys] & unpinned)  # 0: cannot be protected
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

    def take_over(self, other: Policy) -> None:
        """Go on from another policy; experts count as used now: when they were is not known."""
        super().take_over(other)
        self._used_at[:] = self.counts.now

    def note_use(self, keys: Keys) -> None:
        self._used_at[keys] = self.counts.now
        super().note_use(keys)

    def _note_entry(self, keys: Keys) -> None:
        super()._note_entry(keys)
        self._used_at[keys] = self.counts.now

    def _value(self, keys: Keys, unpinned: Mask, pools: Sequence[int]) -> Values:
        since = self.counts.now - self._used_at[keys]
        values: Values = self.counts.of(keys) / (1 + since)
        return values


class Forecast(Slru):
    """The one that is worth least to the tokens to come leaves first: see foresight.py.

    Where nothing is forecast, as in a pool of host memory, experts leave as `Slru` says.
    """

    @property
    def record(self) -> Uses:
        """Return the arrays that the order of leaving follows from, besides counts."""
        return Uses(self._last, self._again, self._newest, self._floors, self._slot_bytes)

    def _value(self, keys: Keys, unpinned: Mask, pools: Sequence[int]) -> Values:
        if self.worth is None:
            return super()._value(keys, unpinned, pools)
        return self.worth.take(keys, mode="clip")


POLICIES: Mapping[PolicyName, type[Policy]] = {
    "lru": Lru,
    "slru": Slru,
    "lfru": Lfru,
    "forecast": Forecast,
}
