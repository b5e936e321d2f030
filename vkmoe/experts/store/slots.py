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
from vkmoe.experts import _residency
from vkmoe.experts.decide.keys import NO_KEYS, Keys, Mask
from vkmoe.experts.decide.locations import NO_SLOT, Locations
from vkmoe.experts.decide.settings import PoolSpec
from vkmoe.experts.store.table import ExpertTable
from vkmoe.gpu.arena import Arena, Placement, lay_out_slots
from vkmoe.gpu.device import Device, Intent
from vkmoe.gpu.program import Range, memory_range

POISON = 0xFFFFFFFF  # NaN in every weight type: a read too early or too late cannot stay unseen


@dataclass(eq=False, slots=True)
class Slot:
    """Describes the room for one span of its pool's size."""

    memory: Placement
    pool: int
    address: int = field(init=False)

    def __post_init__(self) -> None:
        self.move(self.memory)

    def move(self, memory: Placement) -> None:
        """Have other memory. Mutates."""
        self.memory, self.address = memory, memory.address


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
        self.last_mapped: Keys  # the last table version that led to each
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

    def unmap(self, numbers: Keys, version: int) -> None:
        """Note that table versions up to `version` may lead to these slots, but no later one."""
        self.last_mapped[numbers] = version

    def are_writable(self, numbers: Keys, oldest_read: int) -> Mask:
        """Return which of these slots, which are not mapped, no submit can read any more.

        Neither one in flight nor one to come: `oldest_read` is the oldest table version that one of
        them reads.
        """
        found: Mask = self.last_mapped[numbers] < oldest_read
        return found

    def at(self, numbers: Keys) -> list[Slot]:
        """Return the slots of these numbers."""
        return [*map(self.all.__getitem__, numbers.tolist())]

    def poison(self, numbers: Keys) -> None:
        """Fill slots that must not be read with NaN; does nothing unless asked for when made."""
        if self._poison:
            self._fill(self.at(numbers))

    def copy(self, sources: Keys, targets: Keys) -> None:
        """Copy what is in slots to others of their pools, and wait. Raises GpuErrors."""
        if not sources.size:
            return
        with self._device.recorded("moving experts to other slots") as recorder:
            for source, target in zip(self.at(sources), self.at(targets), strict=True):
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
        self.last_mapped = np.full(len(self.all), -1, np.int64)
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
        layers = np.arange(len(table.landing))
        for index, memory in enumerate(scratch[: table.landing.shape[1]]):
            table.set_landing(layers, np.full_like(layers, index), memory.address)
        # What is to be offered when no submit reads its slot any more, counted through all layers.
        self._waiting: Keys = (locations.landing != NO_SLOT).ravel().nonzero()[0]
        # Of experts that landed in the last run: which place of their layer they are in [n_keys].
        self._places: Keys = np.zeros(locations.space.n_keys, np.int64)
        self.offer()

    def offer(self) -> None:
        """Offer those that no submit reads any more, in the table's next version."""
        if not self._waiting.size:
            return
        table, slots = self._table, self._slots
        arrays = (self._waiting, self._locations.landing, slots.last_mapped, slots.addresses)
        written, self._waiting = _residency.offer(*arrays, table.oldest_read, table.landing)
        table.note(table.entries.size + written)

    def move(self, places: Keys) -> None:
        """Note that other slots are in these places, counted through all layers.

        They are offered when they are free.
        """
        self._waiting = np.union1d(self._waiting, places)

    def misses(
        self, keys: Keys, hits: Mask | None, stored: Mask | None, span_bytes: Keys
    ) -> tuple[Mask, int, list[int]]:
        """Return which uses of a run were hits, how many bytes were missed, and what landed.

        `hits` are those of `keys` [n_rows, n_layers, n_used] that had slots; None: those that are
        present. An expert of a layer has `span_bytes` [n_layers], and counts once. Those landed
        that kernels stored whole in a landing slot, of what they report as `stored`.
        """
        state, n_landing = self._locations.record.state, self._slots.n_landing
        found = _residency.misses(keys, state, hits, stored, span_bytes, n_landing)
        hits, n_bytes, landed, places = found
        if stored is not None:
            self._places[landed] = places
        return hits, n_bytes, landed.tolist()

    def keep(self, keys: Keys, has_victim: Mask) -> None:
        """Let experts that landed have the slots they are in, some in place of a victim.

        Their layers land in the slots that were decided for them, once these are offered.
        """
        locations, slots = self._locations, self._slots
        slots.unmap(locations.slots_of(keys)[has_victim], self._table.version)
        places = locations.land(keys, self._places[keys])
        self._waiting = np.concatenate([self._waiting, places])
        slots.poison(locations.landing.take(places))
