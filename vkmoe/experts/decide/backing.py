"""Chooses which experts with a slot have a home too, where host memory has no room for all homes.

Card and host memory hold the model together then: an expert has a slot, a home, or both. Only an
expert with both is *backed*: it can leave its slot at once. The places that are neither an expert's
only one are *spare*; there are always as many as experts that are backed, and free places. Owns the
choice alone: `Residency` lets no expert leave that is not backed, store/exchange.py copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vkmoe.experts.decide.keys import Keys, Mask, Values
from vkmoe.experts.decide.locations import FREE, Locations, Move

# Experts of a pool that are backed ahead, of those next to leave: as many as a pool gives up in a
# few tokens. Each costs a copy to host memory once, and a place that no other expert can have.
DEPTH = 8


class _Class(NamedTuple):
    """Names a pool of host places, and the pools of slots for experts of its size."""

    host: int
    device: Keys


class Backing:
    """Backs the experts that are next to leave, with places of those that stay longest."""

    def __init__(self, device: Locations, host: Locations) -> None:
        """Choose by the records of what has slots, and of what has homes; changes neither."""
        self._device, self._host, self._space = device, host, device.space
        first = self._space.n_experts * np.array([pool.layers[0] for pool in device.pools], int)
        hosts = host.pool_of[first]
        self._classes = [
            _Class(index, np.flatnonzero(hosts == index)) for index in range(len(host.pools))
        ]
        self._waited: Values = np.ones(len(device.pools))  # calls since a pool had its turn

    @property
    def unbacked(self) -> Mask:
        """Return which experts are in slots alone [n_keys]."""
        found: Mask = self._device.resident & ~self._host.present
        return found

    @property
    def n_spare(self) -> list[int]:
        """Return how many places of each host pool are no expert's only one."""
        twice = self._device.present & self._host.resident
        n_twice = np.bincount(self._host.pool_of[twice], minlength=len(self._host.pools))
        found: list[int] = (n_twice + self._host.n_free_of_all).tolist()
        return found

    def without_place(self, keys: Keys) -> Keys:
        """Return which of these experts in slots have no place at home, nor one to come."""
        return keys[self._device.are_resident(keys) & ~self._host.are_resident(keys)]

    def has_room(self, keys: Keys) -> bool:
        """Return whether these experts can leave their slots, once all copies have ended."""
        twice = self._device.present & self._host.resident
        twice[keys] = False
        pools, homeless = self._host.pool_of, self.without_place(keys)
        n_pools = len(self._host.pools)
        n_free = self._host.n_free_of_all + np.bincount(pools[twice], minlength=n_pools)
        return bool((np.bincount(pools[homeless], minlength=n_pools) <= n_free).all())

    def moves(self, order: Keys, missed: Values) -> list[Move]:
        """Return which experts are to be backed now, and whose places they get.

        `order` [n_pools, n] are the experts of each pool, the next to leave first, n_keys behind
        the last; `missed` [n_pools] says how much each pool misses. Where there is less spare than
        two places for each pool, pools take turns: those that miss much have theirs more often.
        """
        found: list[Move] = []
        for (host, ours), n_spare in zip(self._classes, self.n_spare, strict=True):
            if not n_spare or not ours.size:
                continue
            depth = min(DEPTH, n_spare // (2 * len(ours)))
            if depth:
                first = order[ours, :depth].T.ravel()  # by rank, then by pool
            else:
                turns = ours[np.argsort(-(missed * self._waited)[ours], kind="stable")]
                turns = turns[: max(1, n_spare // 2)]
                self._waited[ours] += 1
                self._waited[turns] = 1
                first = order[turns, 0]
            first = first[first < self._space.n_keys]
            is_alone = self._device.are_present(first) & ~self._host.are_resident(first)
            found += self._paired(host, first[is_alone], order[ours], first)
        return found

    def for_leaving(self, keys: Keys, order: Keys) -> list[Move]:
        """Return the moves that back these experts, as far as can be, so that all can leave.

        `order` is that of `moves`.
        """
        homeless = self.without_place(keys)
        found: list[Move] = []
        for host, ours in self._classes:
            wanted = homeless[self._host.pool_of[homeless] == host]
            found += self._paired(host, wanted, order[ours], keys)
        return found

    def _paired(self, host: int, wanted: Keys, order: Keys, kept: Keys) -> list[Move]:
        """Give free places to `wanted` experts, then those of the others but `kept`, last first."""
        if not wanted.size:
            return []
        givers = order[:, ::-1].T.ravel()
        givers = givers[givers < self._space.n_keys]
        backed = self._device.are_present(givers) & self._host.are_present(givers)
        givers = givers[backed & ~np.isin(givers, kept)]
        free: Sequence[int] = [FREE] * min(len(wanted), self._host.n_free(host))
        places = [*free, *givers[: len(wanted) - len(free)].tolist()]
        return [Move(host, key, place) for key, place in zip(wanted.tolist(), places, strict=False)]
