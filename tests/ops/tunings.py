"""The lane mappings this device can run, and the tunings that select them.

Also what a driver is spared that compiles slowly: there tests share pipelines.
"""

from __future__ import annotations

import os
from functools import cache
from itertools import product
from typing import Any, get_args

from vkmoe.facts import DeviceInfo
from vkmoe.gpu.device import choose_device, list_devices
from vkmoe.ops.launches import ColumnClass, KernelClass, Launch, MatvecFamily, RowClass
from vkmoe.ops.tuning import Tuning
from vkmoe.quants import HAS_KERNEL
from vkmoe.selftest.inputs import WEIGHT_TYPES
from vkmoe.selftest.suite import Variant, runnable

__all__ = [
    "COMPILES_SLOWLY",
    "MAPPINGS",
    "ODD_LAUNCHES",
    "SIZES",
    "TYPES_AND_MAPPINGS",
    "chosen_device",
    "drawn_tuning_for",
    "elsewhere",
    "mapping_of",
    "tuning_for",
]

SIZES = (8, 32, 64, 128)  # workgroup sizes


@cache
def chosen_device() -> DeviceInfo:
    """The facts of the device that the fixture `device` opens."""
    return choose_device(list_devices(), os.environ.get("VKMOE_DEVICE"))


# SwiftShader takes one or two seconds for a pipeline, whatever its constants.
COMPILES_SLOWLY = "SwiftShader" in chosen_device().name


def elsewhere(*values: Any) -> list[Any]:
    """What is tried too, but not on a driver that compiles slowly."""
    return [] if COMPILES_SLOWLY else list(values)


def drawn_tuning_for(suffix: str, workgroup_size: int, rows: int) -> Tuning:
    """The tuning where any will do; one for all tests on a driver that compiles slowly."""
    if COMPILES_SLOWLY:
        workgroup_size, rows = 8 if suffix.startswith("+blocks") else 32, 4
    return tuning_for(suffix, workgroup_size, rows)


def tuning_for(suffix: str, workgroup_size: int, rows: int) -> Tuning:
    """The tuning that selects the variants with a suffix.

    The 64-bit variants take a workgroup for one subgroup, so theirs is always 8.
    """
    if suffix == "+blocks64":
        return Tuning("blocks", 8, rows, False, load_64bit=True)
    mapping = "blocks" if suffix == "+blocks" else "lanes"
    return Tuning(mapping, workgroup_size, rows, suffix == "+subgroup")  # type: ignore[arg-type]


def _odd_launches() -> tuple[tuple[KernelClass, Launch], ...]:
    kinds = product(
        get_args(MatvecFamily), sorted(HAS_KERNEL), get_args(RowClass), get_args(ColumnClass)
    )
    sizes = [Launch(size, rows) for size, rows in product((32, 64, 128), (1, 2, 3, 5))]
    return tuple((KernelClass(*kind), sizes[7 * i % len(sizes)]) for i, kind in enumerate(kinds))


# Of every class of kernels another one than its neighbours', none as the tables have it.
ODD_LAUNCHES = _odd_launches()
MAPPINGS = [
    suffix
    for suffix in ("", "+subgroup", "+blocks", "+blocks64")
    if runnable(Variant.parse(f"matvec.q4_k{suffix}"), chosen_device())
]


def mapping_of(kind: str) -> str:
    """The mapping whose turn it is by the order of types."""
    return MAPPINGS[WEIGHT_TYPES.index(kind) % len(MAPPINGS)]


# All of both; the mappings take turns on a driver that compiles slowly.
TYPES_AND_MAPPINGS = [
    (kind, suffix)
    for kind, suffix in product(WEIGHT_TYPES, MAPPINGS)
    if suffix == mapping_of(kind) or not COMPILES_SLOWLY
]
