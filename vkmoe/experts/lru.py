"""Least recently used leaves first: the plain policy that the others are measured by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.decide.keys import Keys
from vkmoe.experts.policy import Policy, Ranks

__all__ = ["Lru"]


class Lru(Policy):
    """Recency alone. An insertion counts as a use; a pinned key keeps its place in the order."""

    def _rank(self, keys: Keys, unpinned: NDArray[np.bool_], pools: Sequence[int]) -> Ranks:
        return self._last[keys].astype(np.int64)
