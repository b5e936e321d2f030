"""Holds the memory that experts are brought into: one slot holds one expert's span, whole.

`SlotManager` owns the arenas, of device or host memory, and since when a slot is no longer read;
decide/locations.py records which expert has which slot, by the same numbers. `Landings` offers
landing slots to the next submit, in the table. Neither chooses experts or copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vkmoe.closing import Closing
from vkmoe.errors import OutOfMemoryError
from vkmoe.experts.decide.keys import NO_KEYS, Keys, Mask
from vkmoe.experts.decide.locations import FREE, NO_SLOT, Locations, Move
from vkmoe.experts.decide.settings import PoolSpec
from vkmoe.experts.store.table import NOWHERE, ExpertTable
from vkmoe.gpu.arena import Arena, Placement, lay_out_slots
from vkmoe.gpu.device import Device, Intent
from vkmoe.gpu.program import Range, memory_range

POISON = 0xFFFFFFFF  # NaN in every weight type: a read too early or too late cannot stay unseen


@dataclass(eq=False, slots=True)
class Slot:
    """Describes the room for one span of its pool's size."""

    memory: Placement
    pool: int
    last_mapped: int = -1  # the last table version that led to it
    address: int = field(init=False)

    def __post_init__(self) -> None:
        self.move(self.memory)

    def move(self, memory: Placement) -> None:
        """Have other memory. Mutates."""
        self.memory, self.address = memory, memory.address

    def writable(self, oldest_read: int) -> bool:
        """Return whether no submit, in flight or to come, can read this slot, which is not mapped.

        `oldest_read` is the oldest table version that one of them reads.
        """
        return self.last_mapped < oldest_read


class SlotManager(Closing):
    """Holds the slots of all pools. Raises OutOfMemoryError when made, with nothing left allocated.

    Each layer has `n_landing` slots more, in which experts land while they are read at home. Slots
    are cleared when made: fresh memory read before its first write gave differing results on some
    drivers. With `poison`, slots that no expert has are filled with NaN (tests).
    """

    def __init__(
        self,
        device: Device,
        pools: Sequence[PoolSpec],
        poison: bool = False,
        n_landing: int = 0,
        intent: Intent = "device",
    ) -> None:
        self._device, self._pools, self._poison = device, tuple(pools), poison
        self.n_landing, self._intent = n_landing, intent
        self._arenas: dict[int, Arena] = {}  # by slot bytes
        self._freed: list[tuple[Arena, int, Keys]] = []  # chunks: their bytes, and their slots
        self.all: list[Slot] = []  # by number, pool after pool
        self.addresses: NDArray[np.uint64]  # of each slot, by number
        try:
            self._allocate()
        except BaseException:
            self.close()
            raise

    @property
    def n_bytes(self) -> int:
        """Return how many bytes are allocated."""
        return sum(arena.n_bytes for arena in self._arenas.values())

    def ranges(self, layer: int) -> tuple[Range, ...]:
        """Return the memory in which copies of a layer's experts can lie."""
        return tuple(
            memory_range(chunk.address, chunk.size)
            for size in {pool.slot_bytes for pool in self._pools if layer in pool.layers}
            for chunk in self._arenas[size].chunks
        )

    @staticmethod
    def unmap(slots: Iterable[Slot], version: int) -> None:
        """Note that table versions up to `version` may lead to these slots, but no later one."""
        for slot in slots:
            slot.last_mapped = version

    def at(self, numbers: NDArray[np.int64]) -> list[Slot]:
        """Return the slots of these numbers."""
        return [*map(self.all.__getitem__, numbers.tolist())]

    def poison(self, slots: Iterable[Slot]) -> None:
        """Fill slots that must not be read with NaN; does nothing unless asked for when made."""
        if self._poison:
            self._fill(slots)

    def copy(self, sources: Sequence[Slot], targets: Sequence[Slot]) -> None:
        """Copy what is in slots to others of their pools, and wait. Raises GpuErrors."""
        if not sources:
            return
        with self._device.recorded("moving experts to other slots") as recorder:
            for source, target in zip(sources, targets, strict=True):
                a, b, n_bytes = source.memory, target.memory, self._pools[source.pool].slot_bytes
                recorder.copy(a.buffer, a.offset, b.buffer, b.offset, n_bytes)

    def last_chunks(self) -> Iterator[Keys]:
        """Yield the numbers of slots that can be freed together, of the most memory first."""
        for arena in sorted(self._arenas.values(), key=lambda each: -each.n_bytes):
            last = arena.chunks[-1] if arena.chunks else None
            found = [number for number, slot in enumerate(self.all) if slot.memory.buffer is last]
            if found:
                yield np.array(found, np.int64)

    def free(self, numbers: Keys) -> int:
        """Free the chunk that these slots are in, as `last_chunks` has them; return its bytes.

        Must hold: no submit, in flight or to come, reads or writes them, nor does a copy.
        """
        slot = self.all[numbers[0]]
        arena = self._arenas[self._pools[slot.pool].slot_bytes]
        assert arena.chunks[-1] is slot.memory.buffer, "another chunk"
        n_bytes = slot.memory.buffer.size
        self._freed.append((arena, n_bytes, numbers))
        arena.free_last()
        return n_bytes

    def take_back(self, n_bytes: int) -> tuple[Keys, int]:
        """Allocate chunks that were freed, the last ones first, of at most so many bytes in all.

        Returns the numbers of their slots, and their bytes: fewer where memory is refused.
        """
        found, n_taken = [NO_KEYS], 0
        while self._freed and n_taken + self._freed[-1][1] <= n_bytes:
            arena, n_of_chunk, numbers = self._freed[-1]
            try:
                chunk = arena.allocate_last(n_of_chunk)
            except OutOfMemoryError:
                break
            self._freed.pop()
            slots = self.at(numbers)
            for slot in slots:
                slot.move(slot.memory.in_chunk(chunk))
            self.addresses[numbers] = [slot.address for slot in slots]
            self._fill(slots)
            found.append(numbers)
            n_taken += n_of_chunk
        return np.concatenate(found), n_taken

    def close(self) -> None:
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()
        self.all.clear()

    def _allocate(self) -> None:
        totals: Counter[int] = Counter()  # slots by their bytes
        for spec in self._pools:
            totals[spec.slot_bytes] += spec.n_slots(self.n_landing)
        name = "expert slots" if self._intent == "device" else "expert pool"
        for size, n_slots in totals.items():
            layout = lay_out_slots(self._device.info, size, n_slots)
            self._arenas[size] = Arena(self._device, self._intent, name, layout)
        # Pools of one size take turns, so that a chunk has slots of all of them.
        order = sorted(
            (turn, index)
            for index, spec in enumerate(self._pools)
            for turn in range(spec.n_slots(self.n_landing))
        )
        slots: list[list[Slot]] = [[] for _ in self._pools]
        for _, index in order:
            size = self._pools[index].slot_bytes
            slots[index].append(Slot(self._arenas[size].place(size), index))
        self.all = [slot for of_pool in slots for slot in of_pool]
        self.addresses = np.array([slot.address for slot in self.all], np.uint64)
        if self._intent == "device" or self._poison:
            self._fill(self.all)

    def _fill(self, slots: Iterable[Slot]) -> None:
        slots, pattern = list(slots), POISON if self._poison else 0
        if not slots:
            return
        with self._device.recorded("clearing the expert slots") as recorder:
            for slot in slots:
                n_bytes = self._pools[slot.pool].slot_bytes
                recorder.fill(slot.memory.buffer, slot.memory.offset, n_bytes, pattern)


class Landings:
    """Offers slots to land in, as entries of the table that one submit at a time may read.

    `scratch` is memory behind the landing slots, the same for all layers: experts gathered there
    are read by their token and forgotten.
    """

    def __init__(
        self,
        table: ExpertTable,
        locations: Locations,
        slots: SlotManager,
        scratch: Sequence[Placement] = (),
    ) -> None:
        """Fill the table's entries. Must hold: no expert has a slot, no submit is in flight."""
        self._table, self._locations, self._slots = table, locations, slots
        locations.set_apart(slots.n_landing)
        for index, memory in enumerate(scratch[: table.landing.shape[1]]):
            for layer in range(len(table.landing)):
                table.set_landing(layer, index, memory.address)
        # Entries to offer when no submit reads their slots any more: (layer, index).
        entries = np.ndindex(*locations.landing.shape)
        self._waiting = [entry for entry in entries if locations.landing[entry] != NO_SLOT]
        self._landed: dict[int, int] = {}  # of the last token: rank among its layer's misses
        self.offer()

    def offer(self) -> None:
        """Offer those that no submit reads any more, in the table's next version."""
        if not self._waiting:
            return
        landing, oldest = self._locations.landing, self._table.oldest_read
        waiting = []
        for layer, index in self._waiting:
            slot = self._slots.all[landing.item(layer, index)]
            if slot.writable(oldest):
                self._table.set_landing(layer, index, slot.address)
            else:
                self._table.set_landing(layer, index, NOWHERE)
                waiting.append((layer, index))
        self._waiting = waiting

    def move(self, entries: Sequence[tuple[int, int]]) -> None:
        """Note that other slots take the place of these, by layer and index; offered when free."""
        self._waiting += [entry for entry in entries if entry not in self._waiting]
        self._landed = {}

    def landed(self, keys: Keys, rank: Keys, filled: Mask) -> list[int]:
        """Return which experts kernels stored whole in a landing slot; all arrays are alike.

        `filled` are those found at home whose landing slot got every byte, as the kernels reported;
        `rank` counts the experts of a layer that were at home, from 1 on.
        """
        here = filled & (rank <= self._slots.n_landing)
        found: list[int] = keys[here].tolist()
        self._landed = dict(zip(found, rank[here].tolist(), strict=True))
        return list(self._landed)

    def keep(self, moves: Sequence[Move]) -> None:
        """Let experts that landed have the slots they are in.

        Their layers land in the slots that were decided for them, once these are offered.
        """
        locations, slots, version = self._locations, self._slots, self._table.version
        keys = np.array([move.key for move in moves], np.int64)
        layers = keys // locations.space.n_experts
        indices = np.array([self._landed[move.key] - 1 for move in moves], np.int64)
        given = slots.at(locations.slots_of(keys))
        slots.unmap(
            (slot for slot, move in zip(given, moves, strict=True) if move.victim != FREE), version
        )
        entries = list(zip(layers.tolist(), indices.tolist(), strict=True))
        self._waiting += entries
        locations.land(keys, layers, indices)
        slots.poison(slots.all[locations.landing.item(entry)] for entry in entries)
