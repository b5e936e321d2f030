"""Names of experts: a layer and an expert in it, also as one number.

Layers count MoE layers only, from 0, as the expert table and the routing log do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["ExpertKey", "KeySpace"]


class ExpertKey(NamedTuple):
    """One routed expert."""

    layer: int
    expert: int


@dataclass(frozen=True)
class KeySpace:
    """All experts of a model. An expert's number in it: layer * n_experts + expert.

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

    def numbers(self, layer: int) -> NDArray[np.int64]:
        """The numbers of all experts of a layer."""
        return np.arange(layer * self.n_experts, (layer + 1) * self.n_experts, dtype=np.int64)

    def layer(self, number: int) -> int:
        return number // self.n_experts
