"""Names experts: by layer and id, or by one number, the key, over all of the model.

Layers count MoE layers only, from 0, as the expert table and the routing log do. Owns the types of
arrays over keys too, but nothing that is known of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

__all__ = ["NO_KEYS", "KeySpace", "Keys", "Mask", "Values"]

Keys = NDArray[np.int64]  # keys of experts
Mask = NDArray[np.bool_]  # a flag for each expert [n_keys]
Values = NDArray[np.float64]  # a figure for each expert [n_keys]
NO_KEYS: Keys = np.zeros(0, np.int64)


@dataclass(frozen=True)
class KeySpace:
    """Gives every expert of a model its key: layer * n_experts + id.

    Policies and counts use keys, because hundreds are looked up for every token.
    """

    n_layers: int
    n_experts: int

    @property
    def n_keys(self) -> int:
        return self.n_layers * self.n_experts

    def split(self, key: int) -> tuple[int, int]:
        """Return the layer and the id of an expert."""
        return divmod(key, self.n_experts)

    def keys(self, layer: int) -> Keys:
        """Return the keys of all experts of a layer."""
        return np.arange(layer * self.n_experts, (layer + 1) * self.n_experts, dtype=np.int64)

    def keys_of(self, ids: NDArray[np.uint32]) -> Keys:
        """Return the keys of experts that are given by their ids: [..., n_layers, n_used]."""
        return ids + self._first

    def layer(self, key: int) -> int:
        """Return the layer of an expert."""
        return key // self.n_experts

    @cached_property
    def _first(self) -> Keys:
        """Return the key of the first expert of each layer: [n_layers, 1]."""
        return np.arange(self.n_layers, dtype=np.int64)[:, None] * self.n_experts
