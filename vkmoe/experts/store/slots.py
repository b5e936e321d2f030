"""The memory that experts are brought into: one slot holds one expert's span, whole.

`SlotManager` owns the arenas, which key holds which slot, which slots are for landing, and since
when a slot is no longer read. `Landings` owns which landing slots the table offers to the next
submit. Neither chooses keys or copies. A host pool smaller than the model has the same kind of
slots, in host memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from vkmoe.closing import Closing
from vkmoe.experts.decide.residents import FREE, Move
from vkmoe.experts.decide.settings import PoolSpec
from vkmoe.experts.store.table import NOWHERE, ExpertTable
from vkmoe.gpu.arena import Arena, Placement, lay_out_spans
from vkmoe.gpu.device import Device, translate_errors
from vkmoe.gpu.memory_types import Intent
from vkmoe.gpu.program import Range, memory_range

__all__ = ["Landings", "Slot", "SlotManager"]

POISON = 0xFFFFFFFF  # NaN in every weight type: a read too early or too late cannot stay unseen


@dataclass(eq=False, slots=True)
class Slot:
    """Is room for one span of its pool's size."""

    place: Placement
    pool: int
    last_mapped: int = -1  # the last table version that led to it
    address: int = field(init=False)

    def __post_init__(self) -> None:
        self.address = self.place.address

    def writable(self, oldest_read: int) -> bool:
        """Return whether no submit, in flight or to come, can read this unpublished slot.

        `oldest_read` is the oldest table version that one of them reads.
        """
        return self.last_mapped < oldest_read


class SlotManager(Closing):
    """Holds the slots of all pools. Raises OutOfMemoryError when made, with nothing left allocated.

    Each layer has `n_landing` slots more, in which experts land while they are read at home. Slots
    are cleared when made: fresh memory read before its first write gave differing results on some
    drivers. With `poison`, slots that no key holds are filled with NaN (tests).
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
        self._n_landing, self._intent = n_landing, intent
        self._arenas: dict[int, Arena] = {}  # by slot bytes
        self._free: list[deque[Slot]] = [deque() for _ in pools]
        self._held: dict[int, Slot] = {}
        self.landing: dict[int, list[Slot]] = {}  # of each layer with slots
        self.all: list[Slot] = []
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

    def take(self, pool: int, key: int) -> Slot:
        """Give `key` the slot of its pool that has been free longest. Must hold: there is one."""
        assert key not in self._held, key
        slot = self._held[key] = self._free[pool].popleft()
        return slot

    def exchange(self, victim: int, key: int, version: int) -> Slot:
        """Give `key` the slot of `victim`, to which table versions up to `version` may lead."""
        slot = self._held[key] = self._held.pop(victim)
        slot.last_mapped = version
        return slot

    def land(
        self, moves: Sequence[Move], places: Sequence[tuple[int, int]], version: int
    ) -> list[Slot]:
        """Give each key the slot it landed in, by (layer, index); returns these slots.

        The layer lands in the victim's slot from now on. Table versions up to `version` may lead to
        the victims.
        """
        held, kept = self._held, []
        for move, (layer, index) in zip(moves, places, strict=True):
            landing = self.landing[layer]
            slot = landing[index]
            if move.victim == FREE:
                landing[index] = self._free[slot.pool].popleft()
            else:
                landing[index] = other = held.pop(move.victim)
                other.last_mapped = version
            held[move.key] = slot
            kept.append(slot)
        return kept

    def release(self, key: int) -> None:
        """Free the slot of `key`, to which no table version ever led while it had it."""
        slot = self._held.pop(key)
        self._free[slot.pool].append(slot)

    def reset(self, version: int) -> None:
        """Free all slots; table versions up to `version` may lead anywhere."""
        for slot in self.all:
            slot.last_mapped = version
        self._share_out()

    def of(self, key: int) -> Slot:
        """Return the slot that `key` holds. Must hold: it has one."""
        return self._held[key]

    @property
    def keys(self) -> set[int]:
        """Return the keys that hold a slot."""
        return set(self._held)

    def poison(self, slots: Iterable[Slot]) -> None:
        """Fill slots that must not be read with NaN; does nothing unless asked for when made."""
        if self._poison:
            self._fill([(slot.place, self._pools[slot.pool].slot_bytes) for slot in slots])

    def check_integrity(self) -> None:
        """Raises AssertionError if a slot is lost, held twice, or of another pool's."""
        slots = [slot for free in self._free for slot in free]
        slots += self._held.values()
        slots += [slot for landing in self.landing.values() for slot in landing]
        assert len(slots) == len(self.all) == len({*map(id, slots)})
        for index, spec in enumerate(self._pools):
            ours = [slot for slot in self.all if slot.pool == index]
            assert len(ours) == self._n_slots(spec), (spec, len(ours))
            for layer in spec.layers:
                landing = self.landing[layer]
                assert [slot.pool for slot in landing] == [index] * self._n_landing, layer

    def close(self) -> None:
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()
        for waiting in self._free:
            waiting.clear()
        self._held.clear()
        self.landing.clear()
        self.all.clear()

    def _n_slots(self, spec: PoolSpec) -> int:
        """Return how many slots a pool has, those for landing among them."""
        return spec.capacity + self._n_landing * len(spec.layers)

    def _allocate(self) -> None:
        for spec in self._pools:
            if spec.slot_bytes not in self._arenas:
                alike = [self._n_slots(p) for p in self._pools if p.slot_bytes == spec.slot_bytes]
                layout = lay_out_spans(self._device.info, [spec.slot_bytes] * sum(alike))
                name = "expert slots" if self._intent == "device" else "expert pool"
                self._arenas[spec.slot_bytes] = Arena(self._device, self._intent, name, layout)
        for index, spec in enumerate(self._pools):
            arena = self._arenas[spec.slot_bytes]
            self.all += [
                Slot(arena.place(spec.slot_bytes), index) for _ in range(self._n_slots(spec))
            ]
        self._share_out()
        if self._intent == "device" or self._poison:
            self._fill([(slot.place, self._pools[slot.pool].slot_bytes) for slot in self.all])

    def _share_out(self) -> None:
        """Free all slots and set the first of each pool apart for landing."""
        self._held.clear()
        for index, spec in enumerate(self._pools):
            ours = deque(slot for slot in self.all if slot.pool == index)
            for layer in spec.layers:
                self.landing[layer] = [ours.popleft() for _ in range(self._n_landing)]
            self._free[index] = ours

    def _fill(self, places: Sequence[tuple[Placement, int]]) -> None:
        if not places:
            return
        with translate_errors("clearing the expert slots"):
            recorder = self._device.native.recorder()
            for place, n_bytes in places:
                recorder.fill(place.buffer, place.offset, n_bytes, POISON if self._poison else 0)
            self._device.native.submit(recorder.finish()).wait()


_Entry: TypeAlias = tuple[int, int]  # a layer, and the index of one of its landing entries


class Landings:
    """Offers slots to land in, as entries of the table that one submit at a time may read.

    `scratch` are places behind the landing slots, the same for all layers: experts gathered there
    are read by their token and forgotten.
    """

    def __init__(
        self, table: ExpertTable, slots: SlotManager, scratch: Sequence[Placement] = ()
    ) -> None:
        self._table, self._slots = table, slots
        self._scratch = [place.address for place in scratch]
        self._waiting: list[_Entry] = []  # not offered yet: a submit may read their slots
        self._arrived: dict[int, int] = {}  # of the last token: rank among its layer's misses
        self._n_landing = max((len(ours) for ours in slots.landing.values()), default=0)
        self.offer_all()

    @property
    def n_landing(self) -> int:
        """Return how many slots a layer has to land in."""
        return self._n_landing

    def offer_all(self) -> None:
        """Fill the table's entries anew. Must hold: no submit is in flight."""
        n_layers, n_entries = self._table.landing.shape
        ours = self._slots.landing
        self._waiting = [(layer, i) for layer, slots in ours.items() for i in range(len(slots))]
        for layer in range(n_layers):
            first = len(ours.get(layer, ()))
            behind = self._scratch[first:n_entries]
            self._table.set_landing([(layer, first + i) for i in range(len(behind))], behind)
        self.offer()

    def offer(self) -> None:
        """Offer those that no submit reads any more, in the table's next version."""
        if not self._waiting:
            return
        landing, oldest = self._slots.landing, self._table.oldest_read
        addresses, waiting = [], []
        for place in self._waiting:
            slot = landing[place[0]][place[1]]
            addresses.append(slot.address if slot.writable(oldest) else NOWHERE)
            if not addresses[-1]:
                waiting.append(place)
        self._table.set_landing(self._waiting, addresses)
        self._waiting = waiting

    def arrived(
        self, keys: NDArray[np.int64], rank: NDArray[np.int64], filled: NDArray[np.bool_]
    ) -> list[int]:
        """Return which experts of a token have landed in a slot; all are [n_layers, n_used].

        `filled` are those it found at home whose landing place got every byte, as the kernels
        reported; `rank` counts those at home in their layer, from 1 on.
        """
        here = filled & (rank <= self._n_landing)
        found: list[int] = keys[here].tolist()
        self._arrived = dict(zip(found, rank[here].tolist(), strict=True))
        return found

    def keep(self, moves: Sequence[Move]) -> list[Slot]:
        """Let those that arrived have the slots they are in; returns these slots.

        Their layers land in the slots of the victims, to which the table's next version must not
        lead, once these are offered.
        """
        n_experts, arrived = self._table.entries.shape[1], self._arrived
        places = [(move.key // n_experts, arrived.pop(move.key) - 1) for move in moves]
        kept = self._slots.land(moves, places, self._table.version)
        self._slots.poison(self._slots.landing[layer][index] for layer, index in places)
        self._waiting += places
        return kept
