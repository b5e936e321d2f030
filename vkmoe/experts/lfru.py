"""Least frequently and least recently used leaves first, both in one score.

    score = decayed uses / (1 + tokens since the last use)

The score of vLLM's CachedWeightProvider (pull request 37190).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.decide.counts import DecayedCounts
from vkmoe.experts.decide.keys import Keys, KeySpace
from vkmoe.experts.decide.settings import PoolSpec
from vkmoe.experts.policy import Policy, Ranks, rank_by

__all__ = ["Lfru"]


class Lfru(Policy):
    """The lowest score leaves first; of equals, the least recent. An insertion counts as a use."""

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
        return rank_by(self.counts.of(keys) / (1 + since), self._last[keys])
