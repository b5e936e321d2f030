"""How experts are named: by layer and index, or by one number in the key space of the model.

Layers count MoE layers only, from 0, as the expert table and the routing log do. Owns the types of
arrays over those numbers too, but nothing that is known of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["NO_KEYS", "ExpertKey", "KeySpace", "Keys", "Mask", "Values"]

Keys = NDArray[np.int64]  # numbers of experts
Mask = NDArray[np.bool_]  # a flag for each expert [n_keys]
Values = NDArray[np.float64]  # a figure for each expert [n_keys]
NO_KEYS: Keys = np.zeros(0, np.int64)


class ExpertKey(NamedTuple):
    """Names one routed expert."""

    layer: int
    expert: int


@dataclass(frozen=True)
class KeySpace:
    """Numbers all experts of a model: layer * n_experts + expert.

    Policies and counts use numbers, because hundreds are looked up for every token.
    """

    n_layers: int
    n_experts: int

    @property
    def n_keys(self) -> int:
        return self.n_layers * self.n_experts

    def number(self, key: ExpertKey) -> int:
        return key.layer * self.n_experts + key.expert

    def key(self, number: int) -> ExpertKey:
        return ExpertKey(*divmod(number, self.n_experts))

    def numbers(self, layer: int) -> Keys:
        """Return the numbers of all experts of a layer."""
        return np.arange(layer * self.n_experts, (layer + 1) * self.n_experts, dtype=np.int64)

    def numbers_of(self, ids: NDArray[np.uint32]) -> Keys:
        """Return the numbers of experts that are given by their ids: [..., n_layers, n_used]."""
        return ids + self._first

    def layer(self, number: int) -> int:
        return number // self.n_experts

    @cached_property
    def _first(self) -> Keys:
        """Return the number of the first expert of each layer: [n_layers, 1]."""
        return np.arange(self.n_layers, dtype=np.int64)[:, None] * self.n_experts
