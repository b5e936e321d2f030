"""What a Vulkan device says of itself."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DeviceInfo", "DeviceLimits", "Heap", "MemoryType"]


@dataclass(frozen=True)
class Heap:
    """One Vulkan memory heap. `budget` and `usage` are bytes where the driver reports them."""

    size: int
    device_local: bool
    budget: int | None = None
    usage: int | None = None


@dataclass(frozen=True)
class MemoryType:
    """One Vulkan memory type: its heap and property flags such as `DEVICE_LOCAL`."""

    heap: int
    flags: frozenset[str]


@dataclass(frozen=True)
class DeviceLimits:
    """The limits that bind vkmoe; sizes in bytes."""

    max_storage_buffer_range: int = 1 << 27
    max_memory_allocation_size: int = 1 << 30
    max_buffer_size: int = 1 << 30
    max_memory_allocation_count: int = 4096
    max_workgroup_size: tuple[int, int, int] = (128, 128, 64)
    max_workgroup_invocations: int = 128
    max_workgroup_count: tuple[int, int, int] = (65535, 65535, 65535)
    max_shared_memory: int = 16384
    max_push_constants: int = 128
    timestamp_period: float = 1.0
    min_storage_buffer_offset_alignment: int = 256
    non_coherent_atom_size: int = 256


@dataclass(frozen=True)
class DeviceInfo:
    """One Vulkan device. `type` is discrete, integrated, virtual, cpu or other."""

    index: int
    name: str
    type: str
    vendor_id: int
    driver_name: str
    driver_info: str
    api_version: tuple[int, ...]
    subgroup_size: int
    subgroup_arithmetic: bool
    features: frozenset[str]
    heaps: tuple[Heap, ...]
    memory_types: tuple[MemoryType, ...]
    limits: DeviceLimits
    subgroup_range: tuple[int, int] = (1, 128)  # what drivers choose from, pipeline by pipeline
    takes_subgroup_size: bool = False  # pipelines may require one of these sizes, in full subgroups

    @property
    def has_one_subgroup_size(self) -> bool:
        return self.subgroup_range[0] == self.subgroup_range[1]

    @property
    def is_cpu(self) -> bool:
        return self.type == "cpu"

    @property
    def is_uma(self) -> bool:
        """The GPU shares the host's memory: everything stays in place, nothing is copied."""
        return self.type in ("integrated", "cpu")

    @property
    def driver(self) -> str:
        return f"{self.driver_name} {self.driver_info}".strip()
