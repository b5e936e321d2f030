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
    """`lanes`: eight lanes share a superblock, coalesced (GPUs). `blocks`: a lane takes whole
    blocks
    (CPU drivers)."""

    mapping: Literal["lanes", "blocks"]
    workgroup_size: int
    rows: int  # weight rows a workgroup works on at once
    subgroup: bool  # use the variants with subgroup arithmetic
    load_64bit: bool = False  # blocks: 64-bit loads (needs shaderInt64); one subgroup a workgroup
    subgroup_size: int = 0  # of this device, for teams that may coincide with subgroups; 0 = none

    @property
    def dot_suffix(self) -> str:
        """Suffix of the SPIR-V variants of kernels with dot products."""
        if self.mapping == "blocks":
            return "+blocks64" if self.load_64bit else "+blocks"
        return self.reduce_suffix

    @property
    def reduce_suffix(self) -> str:
        """Suffix of the SPIR-V variants of kernels that only reduce."""
        return "+subgroup" if self.subgroup else ""


def choose_tuning(device: DeviceInfo) -> Tuning:
    """The tuning for a device, from its type and subgroup size.

    On CPU drivers a load costs the same whatever its address and width, so a lane takes whole
    blocks in 64-bit loads, a workgroup is one subgroup, and activations are loaded once for all
    rows. On GPUs eight lanes share a superblock of 256 weights; 64 lanes cover 2048 columns in one
    step.
    """
    subgroup_size = device.subgroup_size if device.subgroup_arithmetic else 0
    if device.is_cpu:
        # The 64-bit variants take a workgroup for one subgroup; narrow CPUs have subgroups of 4.
        load_64bit = "int64" in device.features and subgroup_size >= 8
        return Tuning("blocks", 8, 8, False, load_64bit, subgroup_size)
    return Tuning("lanes", 64, 4, device.subgroup_arithmetic, subgroup_size=subgroup_size)
