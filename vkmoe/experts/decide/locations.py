"""Records where each expert is, in one kind of memory; all else is derived from this record.

For every expert `Locations` holds which slot it has, whether its bytes are there, and why it is
pinned; and which slots are set apart for landing. There is one for the device's slots and, where
the host pool is smaller than the model, one for the pool. Policies, the address table, copies under
way and hits derive from it. Owns `Move` too, the answer that all deciding ends in. Ranks nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts import _residency
from vkmoe.experts.decide.keys import NO_KEYS, Keys, KeySpace, Mask
from vkmoe.experts.decide.settings import PoolSpec

NO_POOL = -1
NO_SLOT = -1
FREE = -1  # in place of a victim: a slot that no expert has

# What is in an expert's slot; ABSENT: it has none. Behind PRESENT are those that are arriving.
ABSENT, PRESENT, WAITING, COPYING = range(4)


class Move(NamedTuple):
    """Gives an expert a slot: it is copied there from its home, unless it has landed."""

    pool: int
    key: int
    victim: int  # the key that loses its slot to it; FREE: it takes a free slot
    landed: bool = False  # it keeps its landing slot, and the slot above is the next landing slot


class Record(NamedTuple):
    """Names arrays that the record of places consists of; they stay the same ones."""

    state: NDArray[np.uint8]  # what is in each expert's slot [n_keys]
    slot_of: Keys  # [n_keys]; means nothing of absent experts
    changed: Mask  # [n_keys]
    pool_of: Keys  # [n_keys]


class Derived(NamedTuple):
    """Holds what follows from the record, until a pin changes or an expert leaves for none."""

    pins: NDArray[np.uint8]  # [n_keys]
    entry_of: Keys  # the entry of each slot in `holders`, one row after the other
    holders: Keys  # key by pool and slot, n_keys where no expert has it [n_pools, widest]
    unpinned: Mask  # experts with a slot and no pin, with an entry more [n_keys + 1]
    free: Keys  # the first `n_free` of a row are free slots, the last of them is given next
    n_free: Keys  # [n_pools]
    n_pinned: Keys  # experts with a slot and a pin [n_pools]

    def take_free(self, pool: int) -> int:
        """Return a slot that is free, and no longer."""
        assert self.n_free[pool] > 0, "no slot is free"
        self.n_free[pool] -= 1
        return self.free.item(pool, self.n_free[pool])


class Locations:
    """Records which experts have slots, what is in these, and which experts are pinned.

    Slots are numbered from 0, pool after pool. `changed` [n_keys] marks experts that came or went
    since the one that writes their addresses last unmarked them.
    """

    def __init__(self, space: KeySpace, pools: Sequence[PoolSpec]) -> None:
        """Begin with empty slots, of which none is for landing."""
        assert all(pool.capacity >= 1 for pool in pools), pools
        self.pools, self.space = tuple(pools), space
        self._state: NDArray[np.uint8] = np.zeros(space.n_keys, np.uint8)
        self._slot_of: Keys = np.zeros(space.n_keys, np.int64)  # means nothing of absent experts
        self.pins: NDArray[np.uint8] = np.zeros(space.n_keys, np.uint8)  # with a slot or without
        self.changed: Mask = np.ones(space.n_keys, np.bool_)
        self.pool_of: Keys = np.full(space.n_keys, NO_POOL, np.int64)
        for index, pool in enumerate(self.pools):
            for layer in pool.layers:
                self.pool_of[space.keys(layer)] = index
        self._derived: Derived | None = None
        self._retired: Keys = NO_KEYS  # slots out of use
        # How many slots of each pool are in use, besides those to land in [n_pools].
        self.capacities: Keys = np.array([pool.capacity for pool in self.pools], np.int64)
        self.set_apart(0)

    def set_apart(self, n_landing: int) -> None:
        """Set the first slots of each pool apart, `n_landing` for each of its layers to land in.

        They come on top of the pools' capacity. Must hold: no expert has a slot.
        """
        assert not self._state.any(), "experts have slots"
        sizes = [pool.n_slots(n_landing) for pool in self.pools]
        self._firsts: Keys = np.cumsum([0, *sizes])  # the first slot of each pool, and the end
        self._widest = max(sizes, default=0)
        # The entry of each slot in `_Derived.holders`, one row a pool, to look at many at once.
        columns = [np.arange(size) + i * self._widest for i, size in enumerate(sizes)]
        self._entry_of: Keys = np.concatenate([NO_KEYS, *columns])
        # The slots to land in, by layer and index; NO_SLOT where a layer has none.
        self.landing: Keys = np.full((self.space.n_layers, n_landing), NO_SLOT, np.int64)
        for first, pool in zip(self._firsts.tolist(), self.pools, strict=False):
            ours = np.arange(first, first + n_landing * len(pool.layers))
            self.landing[list(pool.layers)] = ours.reshape(len(pool.layers), n_landing)
        self._derived = None

    # ----- questions -----

    @property
    def resident(self) -> Mask:
        """Return which experts have a slot, whatever is in it [n_keys]."""
        found: Mask = self._state != ABSENT
        return found

    @property
    def present(self) -> Mask:
        """Return which experts have all their bytes in their slots [n_keys]."""
        found: Mask = self._state == PRESENT
        return found

    @property
    def arriving(self) -> Mask:
        """Return which experts have a slot and are not there yet [n_keys]."""
        found: Mask = self._state > PRESENT
        return found

    @property
    def any_arriving(self) -> bool:
        """Return whether some expert has a slot and is not there yet."""
        return self._has(WAITING) or self._has(COPYING)

    def waiting(self) -> Keys:
        """Return the experts whose copy has not begun."""
        if not self._has(WAITING):
            return NO_KEYS
        found: Keys = (self._state == WAITING).nonzero()[0]
        return found

    def are_present(self, keys: Keys) -> Mask:
        """Return which of these keys, of any shape, are present."""
        found: Mask = self._state[keys] == PRESENT
        return found

    def are_resident(self, keys: Keys) -> Mask:
        """Return which of these keys, of any shape, have a slot."""
        found: Mask = self._state[keys] != ABSENT
        return found

    def slot_of(self, key: int) -> int:
        """Return the slot that an expert has. Must hold: it has one."""
        return self._slot_of.item(key)

    def slots_of(self, keys: Keys) -> Keys:
        """Return the slots that these experts have."""
        return self._slot_of[keys]

    def holders(self, pools: Sequence[int] | Keys) -> Keys:
        """Return the keys in the slots of these pools, n_keys where none is: [n, widest pool]."""
        return self.derived.holders[pools]

    def n_free(self, pool: int) -> int:
        """Return how many slots of a pool are free."""
        return self.derived.n_free.item(pool)

    @property
    def all_unpinned(self) -> Mask:
        """Return which experts have a slot and no pin, with an entry more [n_keys + 1]; a view."""
        return self.derived.unpinned

    @property
    def n_free_of_all(self) -> Keys:
        """Return how many slots of each pool are free [n_pools]."""
        return self.derived.n_free

    @property
    def n_pinned(self) -> Keys:
        """Return how many experts with slots of each pool are pinned [n_pools]."""
        return self.derived.n_pinned

    @property
    def record(self) -> Record:
        """Return arrays that the record consists of."""
        return Record(self._state, self._slot_of, self.changed, self.pool_of)

    @property
    def derived(self) -> Derived:
        """Return what follows from the record, in arrays that `enter` and `land` keep true."""
        if self._derived is None:
            self._derived = self._derive()
        return self._derived

    # ----- changes -----

    def enter(self, keys: Keys, victims: Keys) -> None:
        """Give each key the slot of its victim, which leaves, or for FREE a free one."""
        assert not self.are_resident(keys).any(), keys
        held = victims != FREE
        leaving, slots = victims[held], self._slot_of[victims]
        assert self.are_resident(leaving).all(), leaving
        view = self.derived
        if len(leaving) < len(keys):
            pools = self.pool_of[keys[~held]].tolist()
            slots[~held] = [view.take_free(pool) for pool in pools]
        self.changed[leaving] = True
        self._state[leaving] = ABSENT
        self._slot_of[keys] = slots
        self._state[keys] = WAITING
        if self.pins[keys].any() or self.pins[leaving].any():
            self.derive_anew()
            return
        view.holders.reshape(-1)[self._entry_of[slots]] = keys
        view.unpinned[leaving] = False
        view.unpinned[keys] = True

    def derive_anew(self) -> None:
        """Let what follows from the record be found anew, as it changed in another way."""
        self._derived = None

    def begin_copy(self, keys: Sequence[int] | Keys) -> None:
        """Note that from now on something may write the slots of these experts."""
        self._state[keys] = COPYING

    def put_off(self, keys: Sequence[int] | Keys) -> None:
        """Note that the copies of these experts have not begun after all."""
        self._state[keys] = WAITING

    def arrive(self, keys: Sequence[int] | Keys) -> None:
        """Note that all bytes of these experts are in their slots."""
        self.changed[keys] = True
        self._state[keys] = PRESENT

    def leave(self, keys: Sequence[int] | Keys) -> None:
        """Take experts out of their slots; a pin stays noted for when its expert comes back."""
        assert self._state[keys].all(), keys
        self._derived = None
        self.changed[keys] = True
        self._state[keys] = ABSENT

    def move(self, keys: Keys, numbers: Keys) -> None:
        """Note that the bytes of these experts are in other slots now, which were free."""
        self._derived = None
        self.changed[keys] = True
        self._slot_of[keys] = numbers

    def land(self, keys: Keys, indices: Keys) -> Keys:
        """Let experts keep the landing slots they are in, which get the slots they had.

        `indices` name those among the landing slots of their layers. Returns their numbers, counted
        through all layers.
        """
        view, landing = self.derived, self.landing
        arrays = (self._state, self._slot_of, self.changed, view.entry_of, view.holders, landing)
        return _residency.land(*arrays, keys, indices)

    def in_slots(self, numbers: Keys) -> Keys:
        """Return the experts that have these slots."""
        (held,) = self.resident.nonzero()
        found: Keys = held[np.isin(self._slot_of[held], numbers)]
        return found

    def landing_in(self, numbers: Keys) -> Keys:
        """Return which landing slots are among these, counted through all layers."""
        return np.isin(self.landing, numbers).ravel().nonzero()[0]

    def pools_of_slots(self, numbers: Keys) -> Keys:
        """Return the pools that these slots belong to."""
        found: Keys = np.searchsorted(self._firsts, numbers, side="right") - 1
        return found

    def free_slots(self, pool: int) -> list[int]:
        """Return the slots of a pool that are free."""
        free: list[int] = self.derived.free[pool, : self.n_free(pool)].tolist()
        return free

    def leaving_for(self, numbers: Keys, order: Keys) -> Keys:
        """Return which experts must leave so that these slots can be put out of use.

        Those of a pool that are first in `order` [n_pools, n], wherever they are: as many as there
        are too few other free slots for the experts in these, and for those to land in.
        """
        used = np.concatenate([self._slot_of[self.resident], self.landing.ravel()])
        pools = self.pools_of_slots(used[np.isin(used, numbers)])
        n_used = np.bincount(pools, minlength=len(self.pools)).tolist()
        n_free = [len(self._free_besides(pool, numbers)) for pool in range(len(self.pools))]
        rows = zip(order, n_used, n_free, strict=True)
        return np.concatenate([NO_KEYS, *(row[: max(0, n - n_able)] for row, n, n_able in rows)])

    def new_slots(self, numbers: Keys) -> tuple[Keys, Keys]:
        """Return the experts in these slots, and as many other slots that are free, of their pools.

        Must hold: there are as many.
        """
        keys = self.in_slots(numbers)
        free = [self._free_besides(pool, numbers) for pool in range(len(self.pools))]
        return keys, np.array([free[pool].pop() for pool in self.pool_of[keys].tolist()], np.int64)

    def can_retire(self, numbers: Keys) -> bool:
        """Return whether each pool keeps a slot, and its floor, if these are put out of use."""
        left = self._capacities_without(np.union1d(self._retired, numbers))
        least = [max(1, pool.floor * len(pool.layers)) for pool in self.pools]
        return bool((left >= least).all())

    def n_left(self, numbers: Keys) -> int:
        """Return how many slots a layer can have at once, of any pool, if these are put out of use:
        all but the floors of the other layers."""
        left: list[int] = self._capacities_without(np.union1d(self._retired, numbers)).tolist()
        pools = zip(left, self.pools, strict=True)
        return min(n - pool.floor * (len(pool.layers) - 1) for n, pool in pools)

    def retire(self, numbers: Keys) -> None:
        """Put slots out of use; those to land in among them are replaced by free ones.

        Must hold: no expert has one, and each pool has as many free slots that stay.
        """
        assert not self.in_slots(numbers).size, "experts have slots that are to go"
        for place in self.landing_in(numbers).tolist():
            layer, index = divmod(place, self.landing.shape[1])
            pool = int(self.pool_of[layer * self.space.n_experts])
            free = self._free_besides(pool, numbers)
            self._derived = None
            self.landing[layer, index] = free[0]
        self._derived = None
        retired = np.union1d(self._retired, numbers)
        self._retired, self.capacities = retired, self._capacities_without(retired)

    def restore(self, numbers: Keys) -> None:
        """Put slots into use again that were retired; they are free. Must hold: their memory is."""
        assert np.isin(numbers, self._retired).all(), numbers
        self._derived = None
        retired = np.setdiff1d(self._retired, numbers)
        self._retired, self.capacities = retired, self._capacities_without(retired)

    def pin(self, keys: Keys, rule: int = 1) -> Keys:
        """Pin these keys, and no others, by a rule; return the experts that no rule pins any more.

        Each rule has a bit of its own in `pins` [n_keys].
        """
        pins = self.pins & np.uint8(~rule & 0xFF)
        pins[keys] |= rule
        freed = np.flatnonzero((self.pins != 0) & (pins == 0))
        self._derived = None
        self.pins = pins
        return freed

    def check_integrity(self) -> None:
        """Raise AssertionError if a slot has two uses, or an expert one of another's pool."""
        held = np.flatnonzero(self.resident)
        slots = self._slot_of[held]
        landing = self.landing[self.landing != NO_SLOT]
        used = np.concatenate([slots, landing, self._retired])
        assert len(np.unique(used)) == len(used), "a slot has two uses"
        pools = self.pools_of_slots(slots)
        assert (self.pool_of[held] == pools).all(), "a slot of another pool"
        for index, (pool, capacity) in enumerate(zip(self.pools, self.capacities, strict=True)):
            assert (pools == index).sum() + self.n_free(index) == capacity, pool
            first, end = self._firsts[index], self._firsts[index + 1]
            ours = self.landing[list(pool.layers)]
            assert ((first <= ours) & (ours < end)).all(), "a landing slot of another pool"

    # ----- inside -----

    def _has(self, state: int) -> bool:
        """Return whether an expert is in a state: nearly never, and asked for every token."""
        return state in self._state.tobytes()  # far faster than any way of NumPy's

    def _free_besides(self, pool: int, numbers: Keys) -> list[int]:
        """Return the slots of a pool that are free and none of these."""
        free = np.array(self.free_slots(pool), np.int64)
        found: list[int] = free[~np.isin(free, numbers)].tolist()
        return found

    def _capacities_without(self, retired: Keys) -> Keys:
        """Return how many slots each pool has in use if these are not [n_pools]."""
        pools = self.pools_of_slots(retired)
        whole = np.array([pool.capacity for pool in self.pools], np.int64)
        left: Keys = whole - np.bincount(pools, minlength=len(self.pools))
        return left

    def _derive(self) -> Derived:
        n_keys, n_pools, resident = self.space.n_keys, len(self.pools), self.resident
        (held,) = resident.nonzero()
        pools = self.pool_of[held]
        holders = np.full((n_pools, self._widest), n_keys, np.int64)
        holders.reshape(-1)[self._entry_of[self._slot_of[held]]] = held
        unpinned = np.zeros(n_keys + 1, np.bool_)
        np.greater(resident, self.pins, out=unpinned[:-1])
        n_pinned = np.bincount(pools[self.pins[held] != 0], minlength=n_pools)
        is_free = holders.reshape(-1)[self._entry_of] == n_keys
        is_free[self.landing[self.landing != NO_SLOT]] = False
        is_free[self._retired] = False
        numbers = np.flatnonzero(is_free)
        borders = np.searchsorted(numbers, self._firsts)
        free = np.full((n_pools, self._widest), NO_SLOT, np.int64)
        for row, (a, b) in zip(free, itertools.pairwise(borders.tolist()), strict=True):
            row[: b - a] = numbers[a:b][::-1]
        n_free = np.diff(borders)
        return Derived(self.pins, self._entry_of, holders, unpinned, free, n_free, n_pinned)
