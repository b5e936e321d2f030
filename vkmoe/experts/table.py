"""The expert table: for each (layer, expert) the 64-bit address where its span lies now.

uvec2 [n_layers][n_experts] (low word, high word), twice: a submit reads the version its parameters
name while the next one is written. Layers count MoE layers only. Also keeps count of which versions
submits in flight read. Does not decide where an expert should lie.
"""

from __future__ import annotations

import numpy as np

from vkmoe.closing import Closing
from vkmoe.gpu.device import Device
from vkmoe.gpu.program import Range, memory_range
from vkmoe.gpu.transfer import Transfer

__all__ = ["N_VERSIONS", "ExpertTable"]

N_VERSIONS = 2  # in memory at a time; the code below is written for two


class ExpertTable(Closing):
    """The host's copy of the table and the versions the GPU reads."""

    def __init__(self, device: Device, n_layers: int, n_experts: int) -> None:
        self.entries = np.zeros((n_layers, n_experts), np.uint64)
        self._buffer = device.allocate("bar", N_VERSIONS * self.entries.nbytes, "expert table")
        self._transfer = Transfer(device, staging_bytes=max(16, self.entries.nbytes))
        self._stale = (set(range(n_layers)), set(range(n_layers)))  # rows of each copy
        self._readers: dict[int, int] = {}  # submits in flight, and the version each reads
        self._n_begun = 0
        self.version = 0  # the one the next submit reads; 0: none is published
        self.n_writes = 0

    @property
    def address(self) -> int:
        """Of the version in force."""
        return int(self._buffer.address) + self._copy * self.entries.nbytes

    @property
    def range(self) -> Range:
        """The memory of all versions."""
        return memory_range(int(self._buffer.address), N_VERSIONS * self.entries.nbytes)

    @property
    def changed(self) -> bool:
        """Whether addresses were set that the version in force does not have."""
        return bool(self._stale[self._copy])

    def set(self, layer: int, expert: int, address: int) -> None:
        """Note an address; it is part of the version that `publish()` makes."""
        self.entries[layer, expert] = address
        self._stale[0].add(layer)
        self._stale[1].add(layer)

    def publish(self) -> None:
        """Make a version of the noted addresses, for the next submit. Does nothing without changes.

        Must hold: no submit in flight reads the version before the one in force.
        """
        if self.version and not self.changed:
            return
        target = (self.version + 1) % N_VERSIONS
        assert self.oldest_read > self.version + 1 - N_VERSIONS, "a submit still reads that version"
        rows = self._stale[target]
        first, end = min(rows), max(rows) + 1
        data = self.entries[first:end].view(np.uint8).reshape(-1)
        offset = target * self.entries.nbytes + first * self.entries.strides[0]
        self._transfer.write(self._buffer, offset, data)
        self._transfer.flush()
        self.n_writes += 1
        self.version += 1
        rows.clear()  # last: torn before it, the rows are only written once more

    # ----- which versions are read -----

    def begin(self) -> int:
        """A submit will read the version in force. Returns the number to end it with."""
        assert self.version > 0 and not self.changed, "publish first"
        self._n_begun += 1
        self._readers[self._n_begun] = self.version
        return self._n_begun

    def end(self, reader: int) -> None:
        """That submit has finished. Does nothing the second time."""
        self._readers.pop(reader, None)

    def end_all(self) -> None:
        """No submit is in flight."""
        self._readers.clear()

    @property
    def oldest_read(self) -> int:
        """The oldest version that a submit in flight reads, or that the next submit will."""
        return min(self._readers.values(), default=self.version + self.changed)

    def close(self) -> None:
        self._transfer.close()
        self._buffer.close()

    @property
    def _copy(self) -> int:
        """Which copy holds the version in force."""
        return self.version % N_VERSIONS
