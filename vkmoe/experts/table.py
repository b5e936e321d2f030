"""The expert table: for each (layer, expert) the 64-bit address where its span lies now.

Device memory, uvec2 [n_layers][n_experts] (low word, high word); layers count MoE layers only.
Does not decide where an expert should lie.
"""

from __future__ import annotations

import numpy as np

from vkmoe.gpu.device import Device
from vkmoe.gpu.program import Range, memory_range
from vkmoe.gpu.transfer import Transfer

__all__ = ["ExpertTable"]


class ExpertTable:
    """The host's copy of the table and the published one the GPU reads."""

    def __init__(self, device: Device, n_layers: int, n_experts: int) -> None:
        self._device = device
        self._entries = np.zeros((n_layers, n_experts), np.uint64)
        self._buffer = device.allocate("device", self._entries.nbytes, "expert table")
        self.address = int(self._buffer.address)

    @property
    def range(self) -> Range:
        return memory_range(self.address, self._entries.nbytes)

    def set(self, layer: int, expert: int, address: int) -> None:
        """Note an address; the GPU sees it after `publish()`."""
        self._entries[layer, expert] = address

    def publish(self) -> None:
        """Make the noted addresses the ones the next submit reads. No submit may be in flight."""
        with Transfer(self._device) as transfer:
            transfer.write(self._buffer, 0, self._entries.view(np.uint8).reshape(-1))

    def close(self) -> None:
        self._buffer.close()
