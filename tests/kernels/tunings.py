"""The lane mappings this device can run, the tunings that select them, and what only CI tries."""

from __future__ import annotations

import os
from functools import cache
from itertools import product
from typing import Any, get_args

import pytest

from vkmoe.facts import DeviceInfo
from vkmoe.gpu.device import choose_device, list_devices
from vkmoe.kernels.family import Variant
from vkmoe.kernels.inputs import WEIGHT_TYPES
from vkmoe.kernels.launches import ColumnClass, KernelClass, Launch, MatvecFamily, RowClass
from vkmoe.kernels.tuning import Tuning, matrix_tile
from vkmoe.quants import HAS_KERNEL, TYPES
from vkmoe.selftest.suite import runnable

SIZES = (8, 32, 64, 128)  # workgroup sizes
MOST_LANE_ROWS = 512  # lanes times rows: with more, `Tuning.allows` refuses


@cache
def chosen_device() -> DeviceInfo:
    """The facts of the device that the fixture `device` opens."""
    return choose_device(list_devices(), os.environ.get("VKMOE_DEVICE"))


def elsewhere(*values: Any) -> list[Any]:
    """What CI tries too."""
    full = pytest.mark.full
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=full)
        for value in values
    ]


def tuning_for(suffix: str, workgroup_size: int, rows: int) -> Tuning:
    """The tuning that selects the variants with a suffix.

    The 64-bit variants take a workgroup for one subgroup, so theirs is always 8.
    """
    rows = min(rows, MOST_LANE_ROWS // workgroup_size)
    if suffix == "+blocks64":
        return Tuning("blocks", 8, rows, False, load_64bit=True)
    if suffix == "+matrix":
        tile = matrix_tile(chosen_device())
        return Tuning("lanes", workgroup_size, rows, False, matrix_tile=tile)
    mapping = "blocks" if suffix == "+blocks" else "lanes"
    return Tuning(mapping, workgroup_size, rows, suffix == "+subgroup")  # type: ignore[arg-type]


def step_of(*kinds: str) -> int:
    """The fewest columns all the types can have: what all kernels take at once, a chunk of 32."""
    return max(32, *(TYPES[kind].block_weights for kind in kinds))


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


# Types whose blocks differ most; CI tries all.
SAMPLE_TYPES = ("Q4_K", "Q6_K", "MXFP4", "F16")
every_type = pytest.mark.parametrize(
    "kind",
    [kind if kind in SAMPLE_TYPES else elsewhere(kind)[0] for kind in WEIGHT_TYPES],
)
# The mappings take turns; CI crosses them with all types.
TYPES_AND_MAPPINGS = [
    pair if pair[0] in SAMPLE_TYPES and pair[1] == mapping_of(pair[0]) else elsewhere(pair)[0]
    for pair in product(WEIGHT_TYPES, MAPPINGS)
]
