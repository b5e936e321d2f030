"""The cache policies by name. A new policy is one line here and one class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vkmoe.errors import UsageError
from vkmoe.experts.decide.counts import DecayedCounts
from vkmoe.experts.decide.keys import KeySpace
from vkmoe.experts.decide.settings import PolicyName, PoolSpec
from vkmoe.experts.lfru import Lfru
from vkmoe.experts.lru import Lru
from vkmoe.experts.policy import Policy
from vkmoe.experts.slru import Slru

__all__ = ["POLICIES", "create_policy"]

POLICIES: Mapping[PolicyName, type[Policy]] = {"lru": Lru, "slru": Slru, "lfru": Lfru}


def create_policy(
    name: PolicyName, pools: Sequence[PoolSpec], space: KeySpace, counts: DecayedCounts
) -> Policy:
    """A policy of empty pools. Raises UsageError for a name that is none of POLICIES."""
    if name not in POLICIES:
        raise UsageError(f"no cache policy is called '{name}'", f"use one of {', '.join(POLICIES)}")
    return POLICIES[name](pools, space, counts)
