"""Counts how often each expert was used, where old uses count less.

A count halves every `half_life` tokens, so a cache follows the subject of the text. Does not
decide anything.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["DecayedCounts"]

_RESCALE_ABOVE = 1e100


class DecayedCounts:
    """Keeps the decayed uses of the experts of a model; one `advance()` per token.

    Instead of decaying every count, new uses weigh more and more; values are scaled on reading.
    """

    def __init__(self, n_keys: int, half_life: float) -> None:
        """Begin with no uses; `half_life` is in tokens."""
        assert half_life > 0, half_life
        # `values()` are raw / weight: sums over many counts read these.
        self.raw = np.zeros(n_keys, np.float64)
        self.weight = 1.0  # of a use now
        self._growth = 2.0 ** (1.0 / half_life)
        self.now = 0  # tokens seen

    def use(self, keys: NDArray[np.int64]) -> None:
        """Count one use of each key, and as many of a key that is repeated."""
        np.add.at(self.raw, keys, self.weight)

    def advance(self) -> None:
        """Note that a token has passed."""
        self.now += 1
        self.weight *= self._growth
        if self.weight > _RESCALE_ABOVE:
            self.raw /= self.weight
            self.weight = 1.0

    def values(self) -> NDArray[np.float64]:
        """Return the decayed counts of now: [n_keys], where a use of this moment counts 1."""
        return self.raw / self.weight

    def of(self, keys: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return `values()` of keys in an array of any shape; too high a key is the last one."""
        found: NDArray[np.float64] = self.raw.take(keys, mode="clip") / self.weight
        return found

    def restore(self, values: NDArray[np.float64]) -> None:
        """Begin from counts such as `values()` gave."""
        assert values.shape == self.raw.shape, values.shape
        self.raw[:] = values * self.weight
