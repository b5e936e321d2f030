"""The cache policies by name. A new policy is one line here and one class."""

from __future__ import annotations

from collections.abc import Mapping

from vkmoe.errors import UsageError
from vkmoe.experts.frequency import DecayedCounts
from vkmoe.experts.keys import KeySpace
from vkmoe.experts.lfru import Lfru
from vkmoe.experts.lru import Lru
from vkmoe.experts.members import Members
from vkmoe.experts.policy import Policy
from vkmoe.experts.settings import PolicyName
from vkmoe.experts.slru import Slru

__all__ = ["POLICIES", "create_policy"]

POLICIES: Mapping[PolicyName, type[Members]] = {"lru": Lru, "slru": Slru, "lfru": Lfru}


def create_policy(
    name: PolicyName, capacity: int, space: KeySpace, counts: DecayedCounts, floor: int = 0
) -> Policy:
    """An empty policy. Raises UsageError for a name that is none of POLICIES."""
    if name not in POLICIES:
        raise UsageError(f"no cache policy is called '{name}'", f"use one of {', '.join(POLICIES)}")
    return POLICIES[name](capacity, space, counts, floor)
