"""Segmented LRU that looks at how often an expert was used: the default policy.

A newcomer is on probation until it is used again; only then it is protected. Of those on
probation the least used leaves, so a passing expert does not push out a steady one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.decide.counts import DecayedCounts
from vkmoe.experts.decide.keys import Keys, KeySpace, Mask
from vkmoe.experts.decide.settings import PoolSpec
from vkmoe.experts.policy import Policy, Ranks, rank_by

__all__ = ["PROTECTED_SHARE", "Slru"]

# Of the capacity. On traces of the demo model larger shares hit less, and smaller ones hardly more;
# where the subject changes, a share keeps what is in use now beside what once was.
PROTECTED_SHARE = 0.25

_NOBODY = np.iinfo(np.int32).max  # a recency that nobody has


class Slru(Policy):
    """The least used on probation leaves, the least recent of equals; where none of them may
    leave, the least recently used protected one.

    Protected are those used again since their insertion, the most recent of them up to a share of
    the pool. Pinned ones come first in that share, however many they are. With `frequency` off the
    least recent on probation leaves, for comparison.
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
        """The protected residents of a pool, pinned ones among them."""
        keys, residents = self._residents.holders[[pool]], self._residents.of(pool)
        unpinned = self._residents.unpinned[keys]
        protected = self._protected(keys, unpinned, [pool], self._last[keys])
        pinned = residents[self._residents.pinned[residents]]
        return {*keys[protected].tolist(), *pinned.tolist()}

    def use(self, keys: Keys) -> Keys:
        self._again[keys] = True  # also of those that will be inserted, which takes it back
        return super().use(keys)

    def unpin(self, keys: Keys) -> None:
        """Those that had a pin stay protected, as if they were used now."""
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
        return rank_by(values, last)

    def _protected(
        self,
        keys: Keys,
        unpinned: NDArray[np.bool_],
        pools: Sequence[int],
        last: NDArray[np.int32],
    ) -> NDArray[np.bool_]:
        """Which of them are, [n_pools, n]; arguments as of `_rank`, and their recency."""
        room = (self._n_protected - self._residents.n_pinned)[pools]
        recency = last * (self._again[keys] & unpinned)  # 0: cannot be protected
        column = keys.shape[1] - np.maximum(1, room)
        lowest = np.maximum(1, np.sort(recency, axis=1)[np.arange(len(pools)), column])
        lowest[room <= 0] = _NOBODY
        found: NDArray[np.bool_] = recency >= lowest[:, None]
        return found
