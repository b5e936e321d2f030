"""Experts that land: stored into an empty slot of their layer while a token reads them at home.

Owns which landing slots the table offers to the next submit. Does not decide who stays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts.slots import Slot, SlotManager
from vkmoe.experts.table import ExpertTable
from vkmoe.gpu.arena import Placement

__all__ = ["Landings"]

NOWHERE = 0


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
        self._waiting: set[tuple[int, int]] = set()  # not offered yet: a submit may read them
        self._arrived: dict[int, tuple[int, int]] = {}  # key: layer and index, of the last token
        self._n_landing = max((len(ours) for ours in slots.landing.values()), default=0)
        self.offer_all()

    @property
    def n_landing(self) -> int:
        """Slots of a layer to land in."""
        return self._n_landing

    def offer_all(self) -> None:
        """Fill the table's entries anew. Must hold: no submit is in flight."""
        n_entries = self._table.landing.shape[1]
        for layer in range(self._table.landing.shape[0]):
            n_slots = len(self._slots.landing.get(layer, ()))
            for index in range(n_entries):
                if index < n_slots:
                    self._waiting.add((layer, index))
                elif index < len(self._scratch):
                    self._table.set_landing(layer, index, self._scratch[index])
        self.offer()

    def offer(self) -> None:
        """Offer those that no submit reads any more, in the table's next version."""
        for layer, index in list(self._waiting):
            slot = self._slots.landing[layer][index]
            if slot.writable(self._table.oldest_read):
                self._table.set_landing(layer, index, slot.address)
                self._waiting.remove((layer, index))

    def arrived(
        self, keys: NDArray[np.int64], missed: NDArray[np.bool_], filled: NDArray[np.bool_]
    ) -> list[int]:
        """Who has landed in a slot, by rank; all arguments are [n_layers, n_used].

        `keys` are the experts the token used, `missed` those it found at home, and `filled` those
        whose landing place got every byte, as the kernels reported.
        """
        index = missed.cumsum(axis=1)  # from 1 on
        here = missed & filled & (index <= self.n_landing)
        ranks, layers = here.T.nonzero()
        found: list[int] = keys[layers, ranks].tolist()
        where = zip(layers.tolist(), (index[layers, ranks] - 1).tolist(), strict=True)
        self._arrived = dict(zip(found, where, strict=True))
        return found

    def keep(self, key: int, victim: int | None) -> Slot:
        """Let one that arrived have the slot it is in; its layer lands elsewhere from now on.

        Must hold: the table's next version does not lead to `victim`.
        """
        layer, index = self._arrived.pop(key)
        slot = self._slots.land(layer, index, key, victim, self._table.version)
        other = self._slots.landing[layer][index]
        self._slots.poison([other])
        if other.writable(self._table.oldest_read):
            self._table.set_landing(layer, index, other.address)
        else:
            self._table.set_landing(layer, index, NOWHERE)
            self._waiting.add((layer, index))
        return slot
