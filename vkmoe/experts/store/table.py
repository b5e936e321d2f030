"""Holds the expert table: for each (layer, expert) the 64-bit address where its span lies now.

uvec2 [n_layers][n_experts] (low word, high word) and behind it uvec2 [n_layers][n_landing], where
the misses of a layer may land; twice: a submit reads the version its parameters name while the next
one is written. Layers count MoE layers only. `ExpertTable` also keeps count of which versions
submits in flight read. What a cache writes into it follows from the record of where experts are
(decide/locations.py).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.closing import Closing
from vkmoe.experts.decide.keys import Keys
from vkmoe.facts import ModelSpec
from vkmoe.gpu.device import Device
from vkmoe.gpu.program import Range, memory_range
from vkmoe.gpu.transfer import Transfer

N_VERSIONS = 2  # in memory at a time; the code below is written for two
AT_HOME = 1  # in an entry: the span is at its home, behind the link; addresses leave bits 0-7 free
NOWHERE = 0  # in place of an address


class TableShape(NamedTuple):
    """Describes how many entries a table has."""

    n_layers: int
    n_experts: int
    n_landing: int = 0  # places of a layer to land in

    @property
    def n_bytes(self) -> int:
        """Count the bytes of one version."""
        return 8 * self.n_layers * (self.n_experts + self.n_landing)


def table_shape(spec: ModelSpec) -> TableShape:
    """Find the shape of a model's table, with its entries to land in; a dense one has one entry."""
    if spec.experts is None:
        return TableShape(1, 1, 0)
    return TableShape(len(spec.moe_layers), spec.experts.n_experts, spec.experts.n_used)


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
        self._mapped = self._mapped_copies()
        # The entries that each copy lacks; None: all.
        self._stale: list[list[Keys] | None] = [None] * N_VERSIONS
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
        return self._stale[self._copy] != []

    def set(self, layer: int, expert: int, address: int) -> None:
        """Note an address; it is part of the version that `publish()` makes."""
        self.entries[layer, expert] = address
        self.note(np.array([layer * self.entries.shape[1] + expert]))

    def set_all(self, keys: Keys, addresses: NDArray[np.uint64]) -> None:
        """Note the addresses of the experts of these keys."""
        self._all[keys] = addresses
        self.note(keys)

    def set_landing(self, layers: Keys, indices: Keys, addresses: NDArray[np.uint64] | int) -> None:
        """Note where misses of layers may land, the `indices`-th of each; 0 = nowhere."""
        self.landing[layers, indices] = addresses
        self.note(self.entries.size + layers * self.landing.shape[1] + indices)

    def note(self, entries: Keys) -> None:
        """Note that these of `entries` were written to, or of `landing`, which is behind them."""
        if entries.size:
            for stale in self._stale:
                if stale is not None:
                    stale.append(entries)

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
        self._stale[target] = []

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
        """Return the oldest version that a submit in flight reads, or that the next will.

        Where none is in flight that is the next one: what changed is published before a submit.
        """
        return min(self._readers.values(), default=self.version + 1)

    def close(self) -> None:
        self._mapped = ()  # or its memory would stay
        self._transfer.close()
        self._buffer.close()

    def _mapped_copies(self) -> tuple[NDArray[np.uint64], ...]:
        """Return the copies in place; none where the memory is not mapped."""
        view = self._transfer.view(self._buffer)
        if view is None:
            return ()
        words, n = view.view(np.uint64), self._all.size
        return tuple(words[start : start + n] for start in range(0, N_VERSIONS * n, n))

    def _write(self, target: int) -> None:
        """Bring a copy up to date."""
        stale = self._stale[target]
        if self._mapped and stale is not None:
            entries = np.concatenate(stale)
            self._mapped[target][entries] = self._all[entries]
        elif self._mapped:
            self._mapped[target][:] = self._all
        else:
            data = self._all.view(np.uint8)
            self._transfer.write(self._buffer, target * data.size, data)
            self._transfer.flush()

    @property
    def _copy(self) -> int:
        """Return which copy holds the version in force."""
        return self.version % N_VERSIONS
