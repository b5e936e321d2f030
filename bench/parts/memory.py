"""Memory of a chosen Vulkan type, and part `mapped`: how fast the CPU reads and writes each type.

CPU reads of write-combined or mapped device memory are tens to hundreds of times slower than reads
of HOST_CACHED memory, which is why results are read from `readback` memory only.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.measure import Row, summarise
from bench.parts.common import MIB, Settings
from vkmoe.facts import DeviceInfo
from vkmoe.gpu.device import EXCLUDED, Device, translate_errors
from vkmoe.gpu.transfer import Transfer

if TYPE_CHECKING:
    from vkmoe.gpu import _native

__all__ = ["MemoryKind", "TypedMemory", "distinct_types", "measure"]

ALIGNMENT = 256
MAPPED_BYTES = 4 * MIB
# No room, or a type that holds no storage buffers.
REFUSED = (
    "VK_ERROR_OUT_OF_DEVICE_MEMORY",
    "VK_ERROR_OUT_OF_HOST_MEMORY",
    "VK_ERROR_FEATURE_NOT_PRESENT",
)
Bytes = NDArray[np.uint8]


class MemoryKind(NamedTuple):
    """A memory type, with those of equal heap and flags left out."""

    memory_type: int
    heap: int
    flags: frozenset[str]

    @property
    def label(self) -> str:
        flags = "|".join(sorted(self.flags)) or "no flags"
        return f"type {self.memory_type} (heap {self.heap}: {flags})"


def distinct_types(info: DeviceInfo) -> list[MemoryKind]:
    """One kind for each pair of heap and flags, without those vkmoe never uses."""
    kinds: dict[tuple[int, frozenset[str]], MemoryKind] = {}
    for index, item in enumerate(info.memory_types):
        if not item.flags & EXCLUDED:
            kinds.setdefault((item.heap, item.flags), MemoryKind(index, item.heap, item.flags))
    return list(kinds.values())


@dataclass(frozen=True)
class TypedMemory:
    """Bytes of one memory type, from a 256-byte aligned address on."""

    buffer: _native.Buffer
    n_bytes: int

    @classmethod
    def allocate(cls, device: Device, kind: MemoryKind, n_bytes: int) -> TypedMemory | None:
        """None when this type has no room, or cannot hold storage buffers."""
        from vkmoe.gpu import _native

        try:
            return cls(
                device.native.buffer(n_bytes + ALIGNMENT, kind.memory_type, kind.label), n_bytes
            )
        except _native.VulkanError as error:
            if error.result not in REFUSED:
                raise
            return None

    @property
    def offset(self) -> int:
        return -self.buffer.address % ALIGNMENT

    @property
    def address(self) -> int:
        return self.buffer.address + self.offset

    def fill(self, device: Device, data: Bytes) -> None:
        """Write the bytes, directly or through staging."""
        with translate_errors("placing weights"), Transfer(device) as transfer:
            transfer.write(self.buffer, self.offset, data)
            transfer.flush()
            self._flush_host_writes()

    def _flush_host_writes(self) -> None:
        if self.buffer.mapped:
            self.buffer.flush(0, self.buffer.size)

    def close(self) -> None:
        self.buffer.close()


def measure(device: Device, settings: Settings) -> dict[str, Any]:
    """Rows of GB/s of NumPy copies out of and into each mapped memory type."""
    rows: list[Row] = []
    scratch = np.zeros(MAPPED_BYTES, np.uint8)
    for kind in distinct_types(device.info):
        memory = TypedMemory.allocate(device, kind, MAPPED_BYTES)
        if memory is None or not memory.buffer.mapped:
            continue
        view = memory.buffer.view()[:MAPPED_BYTES]
        view[:] = 1
        reads, writes = [], []
        for _ in range(settings.repeats):
            writes.append(_gigabytes_per_second(view, scratch))
            memory.buffer.invalidate(0, MAPPED_BYTES)
            reads.append(_gigabytes_per_second(scratch, view))
        size = f"{MAPPED_BYTES / MIB:g} MiB, {kind.label}"
        rows.append(Row(f"CPU reads {size}", summarise(reads), "GB/s", "host_wall", "1 thread"))
        rows.append(Row(f"CPU writes {size}", summarise(writes), "GB/s", "host_wall", "1 thread"))
        del view
        memory.close()
    return {"rows": rows}


def _gigabytes_per_second(target: Bytes, source: Bytes) -> float:
    started = time.perf_counter()
    target[:] = source
    return target.size / (time.perf_counter() - started) / 1e9
