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
        self._in_flight: dict[int, int] = {}  # version -> submits that read it
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
        rows.clear()
        self.version += 1
        self.n_writes += 1

    # ----- which versions are read -----

    def begin(self) -> int:
        """A submit will read the version in force, which is returned."""
        assert self.version > 0 and not self.changed, "publish first"
        self._in_flight[self.version] = self._in_flight.get(self.version, 0) + 1
        return self.version

    def end(self, version: int) -> None:
        """A submit that read `version` has finished."""
        self._in_flight[version] -= 1
        if not self._in_flight[version]:
            del self._in_flight[version]

    @property
    def oldest_read(self) -> int:
        """The oldest version that a submit in flight reads, or that the next submit will."""
        return min(self._in_flight, default=self.version + self.changed)

    def close(self) -> None:
        self._transfer.close()
        self._buffer.close()

    @property
    def _copy(self) -> int:
        """Which copy holds the version in force."""
        return self.version % N_VERSIONS
