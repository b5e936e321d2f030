"""Experts that land: stored into an empty slot of their layer while a token reads them at home.

Owns which landing slots the table offers to the next submit. Does not decide who stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.decide.residents import Move
from vkmoe.experts.slots import Slot, SlotManager
from vkmoe.experts.store.table import ExpertTable
from vkmoe.gpu.arena import Placement

__all__ = ["Landings"]

NOWHERE = 0
Place: TypeAlias = tuple[int, int]  # layer and index in its landing entries


class Landings:
    """The landing entries of the table. Only one submit at a time may read a version that has any.

    `scratch` are places behind the landing slots, the same for all layers: experts gathered there
    are read by their token and forgotten.
    """

    def __init__(
        self, table: ExpertTable, slots: SlotManager, scratch: Sequence[Placement] = ()
    ) -> None:
        self._table, self._slots = table, slots
        self._scratch = [place.address for place in scratch]
        self._waiting: list[Place] = []  # not offered yet: a submit may read their slots
        self._arrived: dict[int, int] = {}  # of the last token: rank among its layer's misses
        self._n_landing = max((len(ours) for ours in slots.landing.values()), default=0)
        self.offer_all()

    @property
    def n_landing(self) -> int:
        """Slots of a layer to land in."""
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
        """Who has landed in a slot, of the experts that a token used; all are [n_layers, n_used].

        `filled` are those it found at home whose landing place got every byte, as the kernels
        reported; `rank` counts those at home in their layer, from 1 on.
        """
        here = filled & (rank <= self._n_landing)
        found: list[int] = keys[here].tolist()
        self._arrived = dict(zip(found, rank[here].tolist(), strict=True))
        return found

    def keep(self, moves: Sequence[Move]) -> list[Slot]:
        """Let those that arrived have the slots they are in: returns these.

        Their layers land in the slots of the victims, to which the table's next version must not
        lead, once these are offered.
        """
        n_experts, arrived = self._table.entries.shape[1], self._arrived
        places = [(move.key // n_experts, arrived.pop(move.key) - 1) for move in moves]
        kept = self._slots.land(moves, places, self._table.version)
        self._slots.poison(self._slots.landing[layer][index] for layer, index in places)
        self._waiting += places
        return kept
