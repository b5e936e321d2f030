"""Places many spans into few large allocations, within the device's allocation caps.

Owns the buffers. A span is never moved; it is freed with the whole arena.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vkmoe.errors import OutOfMemoryError
from vkmoe.facts import DeviceInfo
from vkmoe.gpu.device import Device
from vkmoe.gpu.memory_types import Intent

if TYPE_CHECKING:
    from vkmoe.gpu import _native

__all__ = ["ALIGNMENT", "Arena", "Placement", "chunk_cap", "round_up"]

ALIGNMENT = 256  # of every span: whole cache lines on all devices
PREFERRED_CHUNK = 1 << 30  # some drivers claim more than they can give in one piece


class Placement(NamedTuple):
    """Where a span lies."""

    buffer: _native.Buffer
    offset: int
    address: int


def round_up(n_bytes: int, alignment: int = ALIGNMENT) -> int:
    return -(-n_bytes // alignment) * alignment


def chunk_cap(device: DeviceInfo) -> int:
    """The largest span this device can hold: one allocation, less the room for aligning it."""
    limits = device.limits
    largest = min(limits.max_memory_allocation_size, limits.max_buffer_size)
    return largest // ALIGNMENT * ALIGNMENT - ALIGNMENT


class Arena:
    """Allocates chunks as spans are placed. `expected_bytes` sizes them, and may be exceeded."""

    def __init__(self, device: Device, intent: Intent, name: str, expected_bytes: int) -> None:
        self._device = device
        self._intent: Intent = intent
        self._name = name
        self._remaining = expected_bytes
        self._chunks: list[_native.Buffer] = []
        self._used = 0  # bytes of the last chunk

    @property
    def n_bytes(self) -> int:
        """Bytes allocated."""
        return sum(chunk.size for chunk in self._chunks)

    @property
    def chunks(self) -> tuple[_native.Buffer, ...]:
        """The allocations, oldest first."""
        return tuple(self._chunks)

    def place(self, n_bytes: int) -> Placement:
        """A 256-byte aligned span of its own. Raises OutOfMemoryError."""
        span_bytes = round_up(n_bytes)
        if not self._chunks or self._used + span_bytes > self._chunks[-1].size:
            self._grow(span_bytes)
        chunk, offset = self._chunks[-1], self._used
        self._used += span_bytes
        self._remaining -= span_bytes
        return Placement(chunk, offset, chunk.address + offset)

    def _grow(self, span_bytes: int) -> None:
        cap = chunk_cap(self._device.info)
        if span_bytes > cap:
            raise OutOfMemoryError(
                f"{self._name} needs {span_bytes / 2**20:.0f} MiB in one piece, "
                f"{self._device.info.name} allocates at most {cap / 2**20:.0f} MiB",
                "choose another device with --device, or a smaller model",
            )
        # Whole spans like this one, the usual case: a tail that none fits in would be lost.
        whole = min(PREFERRED_CHUNK, cap) // max(span_bytes, 1) * span_bytes
        size = max(span_bytes, min(self._remaining, whole))
        buffer = self._device.allocate(self._intent, size + ALIGNMENT, self._name)
        self._chunks.append(buffer)
        self._used = -buffer.address % ALIGNMENT

    def close(self) -> None:
        for chunk in self._chunks:
            chunk.close()
        self._chunks.clear()
