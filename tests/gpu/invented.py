"""Invented devices: what drivers of other machines report, as plain facts (no Vulkan involved)."""

from __future__ import annotations

from dataclasses import replace

from vkmoe.facts import (
    MATRIX_FEATURES,
    DeviceInfo,
    DeviceLimits,
    Heap,
    MatrixShape,
    MemoryType,
)

MIB, GIB = 1 << 20, 1 << 30
LOCAL, VISIBLE, COHERENT, CACHED = "DEVICE_LOCAL", "HOST_VISIBLE", "HOST_COHERENT", "HOST_CACHED"


def device(
    name: str, kind: str, heaps: tuple[Heap, ...], types: list[tuple[int, str]], index: int = 0
) -> DeviceInfo:
    """A Vulkan 1.3 device; `types` are (heap, flags separated by blanks)."""
    return DeviceInfo(
        index=index,
        name=name,
        type=kind,
        vendor_id=0x1234,
        driver_name="invented",
        driver_info="1.0",
        api_version=(1, 3, 0),
        subgroup_size=32,
        subgroup_arithmetic=True,
        features=frozenset({"buffer_device_address"}),
        heaps=heaps,
        memory_types=tuple(MemoryType(heap, frozenset(flags.split())) for heap, flags in types),
        limits=DeviceLimits(max_memory_allocation_size=4 * GIB, max_buffer_size=4 * GIB),
        subgroup_range=(32, 32),
        subgroup_shuffle=True,
    )


def with_matrix_units(info: DeviceInfo) -> DeviceInfo:
    """The same device with matrix units for f16, and room for their tiles."""
    features = info.features | MATRIX_FEATURES | {"float16"}
    return replace(
        info,
        features=features,
        matrix_shapes=(MatrixShape(16, 16, 16, "f16", "f32"),),
        takes_subgroup_size=True,
        limits=replace(info.limits, max_shared_memory=64 << 10, max_workgroup_invocations=1024),
    )


HOST_TYPES = [(1, f"{VISIBLE} {COHERENT}"), (1, f"{VISIBLE} {COHERENT} {CACHED}")]

# A card without resizable BAR: a third heap of 256 MiB is the mapped window.
SMALL_WINDOW = device(
    "8 GB with a 256 MiB window",
    "discrete",
    (Heap(8 * GIB, True), Heap(32 * GIB, False), Heap(256 * MIB, True)),
    [(1, ""), (0, LOCAL), *HOST_TYPES, (2, f"{LOCAL} {VISIBLE} {COHERENT}")],
)

# Resizable BAR: all of the card is mapped too. The host heap is all RAM, heapUsage is always 0.
DISCRETE_12 = device(
    "12 GB discrete",
    "discrete",
    (Heap(12 * GIB, True, 11 * GIB, 0), Heap(64 * GIB, False, 60 * GIB, 0)),
    [(0, LOCAL), *HOST_TYPES, (0, f"{LOCAL} {VISIBLE} {COHERENT}")],
)

# RADV lists each type again with AMD's debugging flags, the slow ones with lower indices here.
AMD = device(
    "AMD with device-coherent types",
    "discrete",
    (Heap(16 * GIB, True), Heap(32 * GIB, False)),
    [
        (0, f"{LOCAL} DEVICE_COHERENT_AMD DEVICE_UNCACHED_AMD"),
        (1, f"{VISIBLE} {COHERENT} DEVICE_COHERENT_AMD"),
        (1, f"{VISIBLE} {COHERENT} {CACHED} DEVICE_COHERENT_AMD DEVICE_UNCACHED_AMD"),
        (0, f"{LOCAL} {VISIBLE} {COHERENT} DEVICE_COHERENT_AMD"),
        (0, f"{LOCAL} PROTECTED"),
        (0, LOCAL),
        *HOST_TYPES,
        (0, f"{LOCAL} {VISIBLE} {COHERENT}"),
    ],
)

# No mapped device memory at all, as under some hypervisors and on old drivers.
NO_WINDOW = device(
    "virtual without a window",
    "virtual",
    (Heap(16 * GIB, True), Heap(32 * GIB, False)),
    [(0, LOCAL), *HOST_TYPES],
)

# An APU: one memory, a local heap that is claimed to be larger than the machine's RAM.
APU = device(
    "APU",
    "integrated",
    (Heap(48 * GIB, True), Heap(16 * GIB, False)),
    [
        (0, LOCAL),
        (1, f"{VISIBLE} {COHERENT}"),
        (0, f"{LOCAL} {VISIBLE} {COHERENT}"),
        (1, f"{VISIBLE} {COHERENT} {CACHED}"),
        (0, f"{LOCAL} {VISIBLE} {COHERENT} {CACHED}"),
    ],
)

LAVAPIPE = device(
    "lavapipe",
    "cpu",
    (Heap(8 * GIB, True, 8 * GIB, 0),),
    [(0, f"{LOCAL} {VISIBLE} {COHERENT} {CACHED}")],
)

# Mapped device memory that must be flushed and invalidated, as on some phones.
NOT_COHERENT = device(
    "cached but not coherent",
    "integrated",
    (Heap(8 * GIB, True),),
    [(0, f"{LOCAL} {VISIBLE} {CACHED}"), (0, f"{LOCAL} {VISIBLE} {COHERENT}")],
)

DEVICES = [SMALL_WINDOW, DISCRETE_12, AMD, NO_WINDOW, APU, LAVAPIPE, NOT_COHERENT]
DEVICES = [replace(item, index=index) for index, item in enumerate(DEVICES)]
