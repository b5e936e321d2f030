"""How kernels are mapped onto a device: lane mapping, workgroup size, rows per workgroup.

One tuning is fixed when a model is loaded; results are bit-identical only under the same tuning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vkmoe.facts import DeviceInfo

__all__ = ["Tuning", "choose_tuning"]


@dataclass(frozen=True)
class Tuning:
    """`lanes`: lanes share a row, coalesced (GPUs). `rows`: a lane owns a row (CPU drivers)."""

    mapping: Literal["lanes", "rows"]
    workgroup_size: int
    rows: int  # weight rows a workgroup (lanes) or a lane (rows) works on
    subgroup: bool  # use the variants with subgroup arithmetic

    @property
    def dot_suffix(self) -> str:
        """Suffix of the SPIR-V variants of kernels with dot products."""
        if self.mapping == "rows":
            return "+rows"
        return self.reduce_suffix

    @property
    def reduce_suffix(self) -> str:
        """Suffix of the SPIR-V variants of kernels that only reduce."""
        return "+subgroup" if self.subgroup else ""

    @property
    def rows_per_workgroup(self) -> int:
        return self.rows * (self.workgroup_size if self.mapping == "rows" else 1)


def choose_tuning(device: DeviceInfo) -> Tuning:
    """The tuning for a device, from its type and subgroup size.

    CPU drivers load lane by lane but broadcast uniform loads, so there a lane owns a row and a
    workgroup is one subgroup. On GPUs eight lanes share a superblock of 256 weights; 64 lanes
    cover 2048 columns in one step.
    """
    if device.is_cpu:
        return Tuning("rows", max(8, device.subgroup_size), 1, False)
    return Tuning("lanes", 64, 4, device.subgroup_arithmetic)
