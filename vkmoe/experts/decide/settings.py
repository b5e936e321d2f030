"""Describes how an expert cache is laid out and what was chosen for it, as plain data.

Made from the config and the memory plan for the engine, from options for the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vkmoe.choices import Executor, PolicyName, PredictorName, SlotSharing
from vkmoe.config import Pins

__all__ = [
    "CacheSettings",
    "PoolSpec",
    "make_pools",
]


@dataclass(frozen=True)
class PoolSpec:
    """Describes slots of one size that the experts of some layers share."""

    layers: tuple[int, ...]  # MoE layers
    capacity: int  # slots
    floor: int  # slots a layer is left with when other layers want more
    slot_bytes: int

    def n_slots(self, n_landing: int) -> int:
        """Return how many slots there are, with `n_landing` for each layer to land in."""
        return self.capacity + n_landing * len(self.layers)


@dataclass(frozen=True)
class CacheSettings:
    """Holds all that decides where experts are: equal settings and routing, equal decisions."""

    policy: PolicyName = "slru"
    half_life: float = 64.0  # tokens, of the counts
    pins: tuple[Pins, ...] = ()  # with their numbers; those chosen `again` come last
    admission: bool = False  # a newcomer enters only if it is worth more than its victim
    predictor: PredictorName = "none"  # what guesses experts, to fetch them before they are used
    executor: Executor = "fused"  # what the predictor guesses: a token to come, or the next layer
    # Fused: the token to come that a copy begun now is there for; 2 if it overlaps one.
    lag: int = 1


def make_pools(
    slots: Sequence[int], slot_bytes: Sequence[int], n_used: int, allocation: SlotSharing
) -> tuple[PoolSpec, ...]:
    """Make pools of `slots[layer]` slots of `slot_bytes[layer]` bytes; layers without get none.

    "layer": each layer keeps its own. "global": layers whose experts have the same size share
    theirs, each with a floor of `n_used` slots, or an even share where there are fewer.
    """
    if allocation == "layer":
        return tuple(
            PoolSpec((layer,), n_slots, 0, size)
            for layer, (n_slots, size) in enumerate(zip(slots, slot_bytes, strict=True))
            if n_slots
        )
    pools = []
    for size in dict.fromkeys(slot_bytes):
        layers = tuple(i for i, other in enumerate(slot_bytes) if other == size)
        capacity = sum(slots[layer] for layer in layers)
        if capacity:
            pools.append(PoolSpec(layers, capacity, min(n_used, capacity // len(layers)), size))
    return tuple(pools)
