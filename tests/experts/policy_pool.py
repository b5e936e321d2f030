"""One pool of slots at work: a policy, its counts and the plain way of promoting misses."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from unittest.mock import PropertyMock, patch

import numpy as np

from vkmoe.choices import PolicyName
from vkmoe.experts.decide.keys import DecayedCounts, Keys, KeySpace, Mask
from vkmoe.experts.decide.locations import FREE, Locations
from vkmoe.experts.decide.policies import NO_LIMITS, POLICIES, Policy
from vkmoe.experts.decide.settings import PoolSpec

N_USED = 4


def held_of(locations: Locations, pool: int) -> Keys:
    """The experts with slots of a pool, ascending."""
    return np.flatnonzero(locations.resident & (locations.pool_of == pool))


def order(policy: Policy, pool: int) -> list[int]:
    """The residents of a pool: those that would leave first in front, pinned ones last."""
    keys = policy.locations.holders([pool])
    unpinned = policy.locations.all_unpinned[keys]
    values = policy._value(keys, unpinned, [pool]).astype(np.float32)
    by_value = np.lexsort((policy._last[keys[0]], values[0]))
    found = [int(key) for key in keys[0, by_value[unpinned[0, by_value]]]]
    newest, residents = int(policy._newest[pool]), held_of(policy.locations, pool)
    found.sort(key=lambda key: key == newest)  # it leaves only if no other may
    return [*found, *residents[policy.locations.pins[residents] != 0].tolist()]


class OnePool:
    """A policy of one pool that all layers share, asked about single keys."""

    def __init__(
        self,
        name: PolicyName,
        capacity: int,
        space: KeySpace,
        counts: DecayedCounts,
        floor: int = 0,
    ) -> None:
        pool = PoolSpec(tuple(range(space.n_layers)), capacity, floor, 256)
        self.locations = Locations(space, [pool])
        self.all = POLICIES[name](self.locations, counts)
        self.capacity, self._n_keys = capacity, space.n_keys

    def use(self, keys: Sequence[int]) -> list[int]:
        return [int(key) for key in self.all.use(_keys(*keys))]

    def victim(self, newcomer: int, needed: Iterable[int]) -> int | None:
        """Who would leave for `newcomer` were the pool full; None if nobody may."""
        full = PropertyMock(return_value=np.zeros(1, np.int64))
        with patch.object(Locations, "n_free_of_all", full):
            moves = self.all._admit(_keys(newcomer), self.mask(needed), NO_LIMITS)
        return moves[0].victim if moves else None

    def insert(self, key: int) -> None:
        self.all.enter(_keys(key), _keys(FREE))

    def remove(self, key: int) -> None:
        self.locations.leave(_keys(key))

    def pin(self, key: int) -> None:
        self.all.pin(_keys(*self._pinned(), key))

    def unpin(self, key: int) -> None:
        self.all.pin(_keys(*[other for other in self._pinned() if other != key]))

    def is_pinned(self, key: int) -> bool:
        return key in self._pinned()

    def _pinned(self) -> list[int]:
        return [int(key) for key in np.flatnonzero(self.locations.pins)]

    def check_integrity(self) -> None:
        self.all.check_integrity()
        assert sorted(self) == held_of(self.locations, 0).tolist()

    def mask(self, keys: Iterable[int]) -> Mask:
        mask = np.zeros(self._n_keys, np.bool_)
        mask[list(keys)] = True
        return mask

    def __contains__(self, key: int) -> bool:
        return bool(self.locations.resident[key])

    def __len__(self) -> int:
        return self.capacity - self.locations.n_free(0)

    def __iter__(self) -> Iterator[int]:
        """Those that would leave first in front."""
        return iter(order(self.all, 0))


def _keys(*keys: int) -> Keys:
    return np.array(keys, np.int64)


class PolicyPool:
    """A token uses keys; those that miss are inserted as long as somebody may leave."""

    def __init__(
        self,
        policy: PolicyName,
        capacity: int,
        n_layers: int = 1,
        n_experts: int = 64,
        floor: int = 0,
        half_life: float = 64.0,
    ) -> None:
        self.space = KeySpace(n_layers, n_experts)
        self.counts = DecayedCounts(self.space.n_keys, half_life)
        self.policy = OnePool(policy, capacity, self.space, self.counts, floor)

    def token(self, keys: Sequence[int]) -> int:
        """Returns the hits."""
        self.counts.use(np.array(keys, np.int64))
        missing = self.policy.use(keys)
        for key in missing:
            self.promote(key, keys)
        self.counts.advance()
        return len(keys) - len(missing)

    def tokens(self, each: Iterable[Sequence[int]]) -> int:
        """Returns the hits of all."""
        return sum(self.token(keys) for keys in each)

    def promote(self, key: int, needed: Sequence[int] = ()) -> int | None:
        """Give `key` a slot if it can have one. Returns who had to leave."""
        victim = None
        if len(self.policy) == self.policy.capacity:
            victim = self.policy.victim(key, needed)
            if victim is None:
                return None
            self.policy.remove(victim)
        self.policy.insert(key)
        self.policy.check_integrity()
        return victim

    def victim(self, needed: Sequence[int] = ()) -> int | None:
        """Who would leave for the last expert of layer 0."""
        return self.policy.victim(self.space.n_experts - 1, needed)


def random_tokens(seed: int, n_tokens: int, n_experts: int = 64) -> list[list[int]]:
    """Tokens that use four experts each."""
    rng = random.Random(seed)
    return [rng.sample(range(n_experts), N_USED) for _ in range(n_tokens)]
