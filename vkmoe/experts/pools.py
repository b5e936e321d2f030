"""A pool of slots at work: its policy, and what is on its way into it.

Decides who gets a slot for whom; knows neither counts nor pins of its own, nor addresses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from vkmoe.experts.create import create_policy
from vkmoe.experts.frequency import DecayedCounts
from vkmoe.experts.keys import KeySpace
from vkmoe.experts.policy import Policy
from vkmoe.experts.settings import PolicyName, PoolSpec

__all__ = ["FREE", "Move", "Pool", "empty_pools"]

FREE = -1


class Move(NamedTuple):
    """An expert to copy from its home into a slot."""

    pool: int
    key: int  # its number
    victim: int  # whose slot it takes; FREE: one that nobody has


@dataclass(frozen=True, eq=False)
class Pool:
    """Slots of one size, and who holds them."""

    index: int
    spec: PoolSpec
    policy: Policy
    in_flight: set[int] = field(default_factory=set)  # hold a slot, and have not arrived in it

    @property
    def n_free(self) -> int:
        return self.spec.capacity - len(self.policy)

    def promote(self, newcomers: Iterable[int], needed: set[int]) -> list[Move]:
        """Give slots to newcomers, in order, as long as somebody may leave for them.

        Victims are never in `needed`, never in flight, never each other.
        """
        policy, moves = self.policy, []
        needed = needed | self.in_flight
        for key in newcomers:
            victim = FREE
            if not self.n_free:
                leaving = policy.victim(key, needed)
                if leaving is None:
                    continue
                victim = leaving
                policy.remove(victim)
            policy.insert(key)
            self.in_flight.add(key)
            needed.add(key)
            moves.append(Move(self.index, key, victim))
        return moves


def empty_pools(
    specs: Iterable[PoolSpec], name: PolicyName, space: KeySpace, counts: DecayedCounts
) -> list[Pool]:
    """Pools under the policy of that name, with nobody in a slot."""
    return [
        Pool(index, spec, create_policy(name, spec.capacity, space, counts, spec.floor))
        for index, spec in enumerate(specs)
    ]
