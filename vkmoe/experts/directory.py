"""Where every expert can be read now: in its slot, else at its home in host memory, else nowhere.

The only one who writes the entries of the expert table.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from vkmoe.experts.table import AT_HOME, ExpertTable

__all__ = ["NOWHERE", "Directory"]

NOWHERE = 0


class Directory:
    """Two addresses for each expert, by number (keys.py); the table gets the better one.

    With `marks`, addresses of homes carry AT_HOME, by which kernels know a miss.
    """

    def __init__(self, table: ExpertTable, n_keys: int, marks: bool) -> None:
        self._table, self._mark = table, AT_HOME if marks else 0
        self._slots = array("Q", [NOWHERE]) * n_keys
        self._homes = array("Q", [NOWHERE]) * n_keys

    def set_slots(self, keys: Sequence[int], addresses: Sequence[int]) -> None:
        """These experts are in slots at these addresses; NOWHERE: in none any more."""
        slots, homes, entries = self._slots, self._homes, []
        for key, address in zip(keys, addresses, strict=True):
            slots[key] = address
            entries.append(address or homes[key])
        self._table.set_all(keys, entries)

    def set_homes(self, keys: Sequence[int], addresses: Sequence[int]) -> None:
        """These experts are at home at these addresses; NOWHERE: not in host memory any more."""
        slots, homes, mark = self._slots, self._homes, self._mark
        for key, address in zip(keys, addresses, strict=True):
            homes[key] = address | mark if address else NOWHERE
        self._table.set_all(keys, [slots[key] or homes[key] for key in keys])

    def entry(self, key: int) -> int:
        """What the table's next version says of an expert."""
        return self._slots[key] or self._homes[key]

    def home(self, key: int) -> int:
        """The address of its home; NOWHERE if it is not in host memory."""
        return self._homes[key] & ~AT_HOME
