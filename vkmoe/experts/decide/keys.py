"""Names experts by one number each, the key, over all of the model; counts their uses.

Layers count MoE layers only, from 0, as the expert table and the routing log do. Owns the types of
arrays over keys too. Does not decide anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]  # keys of experts
Mask = NDArray[np.bool_]  # a flag for each expert [n_keys]
Values = NDArray[np.float64]  # a figure for each expert [n_keys]
NO_KEYS: Keys = np.zeros(0, np.int64)
HALF_LIFE = 64.0  # tokens after which a use counts half, unless another is given
_RESCALE_ABOVE = 1e100


@dataclass(frozen=True)
class KeySpace:
    """Gives every expert of a model its key: layer * n_experts + id."""

    n_layers: int
    n_experts: int

    @property
    def n_keys(self) -> int:
        return self.n_layers * self.n_experts

    def layer(self, key: int) -> int:
        """Return the layer of an expert."""
        return key // self.n_experts

    def keys(self, layer: int) -> Keys:
        """Return the keys of all experts of a layer."""
        return np.arange(layer * self.n_experts, (layer + 1) * self.n_experts, dtype=np.int64)

    def keys_of(self, ids: NDArray[np.uint32]) -> Keys:
        """Return the keys of experts that are given by their ids: [..., n_layers, n_used]."""
        return ids + self._first

    @cached_property
    def _first(self) -> Keys:
        """Return the key of the first expert of each layer: [n_layers, 1]."""
        return np.arange(self.n_layers, dtype=np.int64)[:, None] * self.n_experts


class DecayedCounts:
    """Counts the uses of each expert, where old ones count less; one `advance()` per token.

    A count halves every `half_life` tokens, so a cache follows the subject of the text. Instead of
    decaying every count, new uses weigh more and more; values are scaled on reading.
    """

    def __init__(self, n_keys: int, half_life: float = HALF_LIFE) -> None:
        """Begin with no uses; `half_life` is in tokens."""
        assert half_life > 0, half_life
        # `values()` are raw / weight: sums over many counts read these.
        self.raw: Values = np.zeros(n_keys, np.float64)
        self.weight = 1.0  # of a use now
        self._growth = 2.0 ** (1.0 / half_life)
        self.now = 0  # tokens seen

    def use(self, keys: Keys) -> None:
        """Count one use of each key, and as many of a key that is repeated."""
        np.add.at(self.raw, keys, self.weight)

    def advance(self) -> None:
        """Note that a token has passed."""
        self.now += 1
        self.weight *= self._growth
        if self.weight > _RESCALE_ABOVE:
            self.raw /= self.weight
            self.weight = 1.0

    def values(self) -> Values:
        """Return the decayed counts of now: [n_keys], where a use of this moment counts 1."""
        return self.raw / self.weight

    def of(self, keys: Keys) -> Values:
        """Return `values()` of keys in an array of any shape; too high a key is the last one."""
        found: Values = self.raw.take(keys, mode="clip") / self.weight
        return found

    def restore(self, values: Values) -> None:
        """Begin from counts such as `values()` gave."""
        assert values.shape == self.raw.shape, values.shape
        self.raw[:] = values * self.weight
