"""This module maps kernels onto a device: lane mapping, workgroup size, rows per workgroup.

One tuning is fixed when a model is loaded; results are bit-identical only under the same tuning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vkmoe.facts import DeviceInfo

__all__ = ["Tuning", "adds_over_subgroups", "choose_tuning"]

_WORKGROUP_SIZE = 64  # of GPUs


@dataclass(frozen=True)
class Tuning:
    """Says how kernels are mapped onto a device.

    `lanes`: eight lanes share a superblock, coalesced (GPUs). `blocks`: a lane takes whole blocks
    (CPU drivers).
    """

    mapping: Literal["lanes", "blocks"]
    workgroup_size: int
    rows: int  # weight rows a workgroup works on at once
    subgroup: bool  # use the variants with subgroup arithmetic
    load_64bit: bool = False  # blocks: 64-bit loads (needs shaderInt64); one subgroup a workgroup
    subgroup_size: int = 0  # of this device, for teams that may coincide with subgroups; 0 = none
    required_subgroup_size: int = 0  # of the experts' kernels; 0: the device has only one anyway
    loaded_words: int = 16  # lanes: words of 16 bytes that a lane loads before it unpacks the first

    @property
    def dot_suffix(self) -> str:
        """Return the suffix of the SPIR-V variants of kernels with dot products."""
        if self.mapping == "blocks":
            return "+blocks64" if self.load_64bit else "+blocks"
        return self.reduce_suffix

    @property
    def reduce_suffix(self) -> str:
        """Return the suffix of the SPIR-V variants of kernels that only reduce."""
        return "+subgroup" if self.subgroup else ""


def choose_tuning(device: DeviceInfo) -> Tuning:
    """Choose the tuning for a device by its type and subgroup size.

    On CPU drivers a load costs the same whatever its address and width, so a lane takes whole
    blocks in 64-bit loads, a workgroup is one subgroup, and activations are loaded once for all
    rows. On GPUs eight lanes share a superblock of 256 weights; 64 lanes cover 2048 columns in one
    step.

    The expert kernel that runs depends on where experts lie, and the size of its subgroups decides
    the order of its sums. So subgroups add only if all pipelines have one size, or can be given it.
    """
    subgroup_size = device.subgroup_size if device.subgroup_arithmetic else 0
    if device.is_cpu:
        # The 64-bit variants take a workgroup for one subgroup; narrow CPUs have subgroups of 4.
        load_64bit = adds_over_subgroups(device) and subgroup_size >= 8
        return Tuning("blocks", 8, 8, False, load_64bit, subgroup_size)
    return Tuning(
        "lanes",
        _WORKGROUP_SIZE,
        4,
        adds_over_subgroups(device),
        subgroup_size=subgroup_size,
        required_subgroup_size=_required_subgroup_size(device),
        loaded_words=_loaded_words(device),
    )


def adds_over_subgroups(device: DeviceInfo) -> bool:
    """Say whether subgroups can add, in the same order in all pipelines that must agree.

    The variants that do so have 64-bit addresses.
    """
    one_size = device.has_one_subgroup_size or _required_subgroup_size(device) > 0
    return device.subgroup_arithmetic and one_size and "int64" in device.features


def _loaded_words(device: DeviceInfo) -> int:
    """Choose how many words a lane may load at once.

    Subgroups below 32 tell of Intel, whose lanes have 128 registers: with more it spills them.
    """
    least, _ = device.subgroup_range
    return 4 if least < 32 else 16


def _required_subgroup_size(device: DeviceInfo) -> int:
    """Choose the size to require where drivers would; 0: nothing to choose, or no way to require.

    16 where there is a choice of it: the larger sizes of such devices (Intel) run out of registers.
    """
    able = device.subgroup_arithmetic and device.takes_subgroup_size
    if device.has_one_subgroup_size or not able:
        return 0
    least, most = device.subgroup_range
    size = 16 if least <= 16 <= most else device.subgroup_size
    return size if _WORKGROUP_SIZE % size == 0 else 0
