"""The expert table: for each (layer, expert) the 64-bit address where its span lies now.

uvec2 [n_layers][n_experts] (low word, high word) and behind it uvec2 [n_layers][n_landing], where
the misses of a layer may land; twice: a submit reads the version its parameters name while the next
one is written. Layers count MoE layers only. `ExpertTable` also keeps count of which versions
submits in flight read; `Directory` alone writes the entries of a cache, from what it knows of slots
and homes. Neither decides where an expert should lie.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from vkmoe.closing import Closing
from vkmoe.gpu.device import Device
from vkmoe.gpu.program import Range, memory_range
from vkmoe.gpu.transfer import Transfer

__all__ = ["AT_HOME", "NOWHERE", "N_VERSIONS", "Directory", "ExpertTable", "TableShape"]

N_VERSIONS = 2  # in memory at a time; the code below is written for two
AT_HOME = 1  # in an entry: the span is at its home, behind the link; addresses leave bits 0-7 free
NOWHERE = 0  # in place of an address


class TableShape(NamedTuple):
    """How many entries a table has."""

    n_layers: int
    n_experts: int
    n_landing: int = 0  # places of a layer to land in

    @property
    def n_bytes(self) -> int:
        """Bytes of one version."""
        return 8 * self.n_layers * (self.n_experts + self.n_landing)


class ExpertTable(Closing):
    """Keeps the host's copy of the table and the versions the GPU reads.

    `entries` [n_layers, n_experts] are addresses, or address | AT_HOME, or 0 where an expert is
    nowhere. `landing` [n_layers, n_landing]: where a token may put the first, second, ... expert of
    the layer that it finds at home; 0 = nowhere.
    """

    def __init__(self, device: Device, n_layers: int, n_experts: int, n_landing: int = 0) -> None:
        self._all = np.zeros(TableShape(n_layers, n_experts, n_landing).n_bytes // 8, np.uint64)
        n_entries = n_layers * n_experts
        self.entries = self._all[:n_entries].reshape(n_layers, n_experts)
        self.landing = self._all[n_entries:].reshape(n_layers, n_landing)
        self._buffer = device.allocate("bar", N_VERSIONS * self._all.nbytes, "expert table")
        self._first = int(self._buffer.address)  # the address of all versions
        self._transfer = Transfer(device, staging_bytes=max(16, self._all.nbytes))
        # By number. For one entry, and for all of them, NumPy's own ways take longer.
        self._words = self._all.data
        self._mapped = self._mapped_copies()
        self._stale = [True] * N_VERSIONS  # which copies lack an address
        self._readers: dict[int, int] = {}  # submits in flight, and the version each reads
        self._n_begun = 0
        self.version = 0  # the one the next submit reads; 0: none is published
        self.n_writes = 0

    @property
    def address(self) -> int:
        """Return the address of the version in force."""
        return self._first + self._copy * self._all.nbytes

    @property
    def range(self) -> Range:
        """Return the memory of all versions."""
        return memory_range(self._first, N_VERSIONS * self._all.nbytes)

    @property
    def changed(self) -> bool:
        """Return whether addresses were set that the version in force does not have."""
        return self._stale[self._copy]

    def set(self, layer: int, expert: int, address: int) -> None:
        """Note an address; it is part of the version that `publish()` makes."""
        self.set_all([layer * self.entries.shape[1] + expert], [address])

    def set_all(self, numbers: Sequence[int], addresses: Iterable[int]) -> None:
        """Note the addresses of the experts of these numbers (decide/keys.py)."""
        if not numbers:
            return
        self._stale = [True] * N_VERSIONS
        words = self._words
        for number, address in zip(numbers, addresses, strict=True):
            words[number] = address

    def set_landing(self, places: Sequence[tuple[int, int]], addresses: Iterable[int]) -> None:
        """Note where the `index`-th misses of layers may land, by (layer, index); 0 = nowhere."""
        if not places:
            return
        self._stale = [True] * N_VERSIONS
        words, first, n_landing = self._words, self.entries.size, self.landing.shape[1]
        for (layer, index), address in zip(places, addresses, strict=True):
            assert index < n_landing, (index, n_landing)
            words[first + layer * n_landing + index] = address

    def publish(self) -> None:
        """Make a version of the noted addresses, for the next submit. Does nothing without changes.

        Must hold: no submit in flight reads the version before the one in force.
        """
        if self.version and not self.changed:
            return
        target = (self.version + 1) % N_VERSIONS
        assert self.oldest_read > self.version + 1 - N_VERSIONS, "a submit still reads that version"
        self._write(target)
        self.n_writes += 1
        self.version += 1
        self._stale[target] = False  # last: torn before it, the copy is only written once more

    # ----- which versions are read -----

    def begin(self) -> int:
        """Note that a submit will read the version in force. Returns the number to end it with."""
        assert self.version > 0 and not self.changed, "publish first"
        self._n_begun += 1
        self._readers[self._n_begun] = self.version
        return self._n_begun

    def end(self, reader: int) -> None:
        """Note that a submit has finished. Does nothing the second time."""
        self._readers.pop(reader, None)

    def end_all(self) -> None:
        """Note that no submit is in flight."""
        self._readers.clear()

    @property
    def oldest_read(self) -> int:
        """Return the oldest version that a submit in flight reads, or that the next will."""
        return min(self._readers.values(), default=self.version + self.changed)

    def close(self) -> None:
        self._mapped = ()  # or its memory would stay
        self._transfer.close()
        self._buffer.close()

    def _mapped_copies(self) -> tuple[memoryview, ...]:
        """Return the copies in place; none where the memory is not mapped."""
        view = self._transfer.view(self._buffer)
        if view is None:
            return ()
        words, n = view.view(np.uint64).data, self._all.size
        return tuple(words[start : start + n] for start in range(0, N_VERSIONS * n, n))

    def _write(self, target: int) -> None:
        """Bring a copy up to date, all of it: that is faster than to find what changed."""
        if self._mapped:
            self._mapped[target][:] = self._words
        else:
            data = self._all.view(np.uint8)
            self._transfer.write(self._buffer, target * data.size, data)
            self._transfer.flush()

    @property
    def _copy(self) -> int:
        """Return which copy holds the version in force."""
        return self.version % N_VERSIONS


class Directory:
    """Keeps two addresses of each expert, by number; the table gets the better one.

    With `marks`, addresses of homes carry AT_HOME, by which kernels know a miss.
    """

    def __init__(self, table: ExpertTable, n_keys: int, marks: bool) -> None:
        self._table, self._mark = table, AT_HOME if marks else 0
        self._slots = array("Q", [NOWHERE]) * n_keys
        self._homes = array("Q", [NOWHERE]) * n_keys

    def set_slots(self, keys: Sequence[int], addresses: Sequence[int]) -> None:
        """Note the addresses of experts in slots; NOWHERE: in none any more."""
        slots, homes, entries = self._slots, self._homes, []
        for key, address in zip(keys, addresses, strict=True):
            slots[key] = address
            entries.append(address or homes[key])
        self._table.set_all(keys, entries)

    def set_homes(self, keys: Sequence[int], addresses: Sequence[int]) -> None:
        """Note the addresses of experts at home; NOWHERE: not in host memory any more."""
        slots, homes, mark = self._slots, self._homes, self._mark
        for key, address in zip(keys, addresses, strict=True):
            homes[key] = address | mark if address else NOWHERE
        self._table.set_all(keys, [slots[key] or homes[key] for key in keys])

    def entry(self, key: int) -> int:
        """Return the entry of an expert in the table's next version."""
        return self._slots[key] or self._homes[key]

    def home(self, key: int) -> int:
        """Return the address of its home; NOWHERE if it is not in host memory."""
        return self._homes[key] & ~AT_HOME
