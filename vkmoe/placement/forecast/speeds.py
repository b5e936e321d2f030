"""This module says how fast a machine's memory is, and what to assume where that is not known.

`Machine` holds all that a prediction needs to know of a device and of the host it is in. Nothing is
measured here (placement/forecast/measured.py does that).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import geometric_mean
from types import MappingProxyType
from typing import NamedTuple

from vkmoe.choices import ModeName
from vkmoe.facts import DeviceInfo
from vkmoe.gpu.link_speed import LinkSpeed


@dataclass(frozen=True)
class Speeds:
    """Says how fast memory is read, in bytes per second; 0: not known."""

    device: float = 0.0  # by the GPU, its own memory
    link: float = 0.0  # by the GPU, host memory, in place
    host: float = 0.0  # by the CPU
    file: float = 0.0  # the model's file, where it is not in memory
    copy: float = 0.0  # from host memory to the device, on the queue for copies
    gather: float = 0.0  # from host memory to the device, by a kernel

    def over_link(self, link: LinkSpeed | None) -> Speeds:
        """Return these speeds with those that were measured of a link, if they were."""
        if link is None:
            return self
        read, copy, gather = link
        return replace(self, link=read, copy=copy, gather=gather)

    @property
    def of_link(self) -> LinkSpeed:
        """Return the speeds of the link alone."""
        return LinkSpeed(self.link, self.copy, self.gather)


class Typical(NamedTuple):
    """Holds what is assumed of a type of device, and where that is from."""

    speeds: Speeds
    rows: int  # of a prompt that take as long to multiply with weights as these take to be read
    source: str


# Rows: an RTX 3060 multiplies 12.7e12 numbers a second and reads 360 GB of 0.56 bytes a weight,
# so 20 rows in f16 take as long; eight cores with AVX2 reach about 0.7e12 beside 51 GB/s, so 4 do.
_CARD = Typical(
    Speeds(device=256e9, link=14e9, host=51.2e9, file=3e9),
    20,
    "as an RX 580 at PCIe 3.0 x16, beside dual-channel DDR4-3200 and an NVMe drive",
)
TYPICAL: Mapping[str, Typical] = MappingProxyType(
    {
        "discrete": _CARD,
        "virtual": _CARD,
        "other": _CARD,
        "integrated": Typical(
            Speeds(device=89.6e9, link=89.6e9, host=89.6e9, file=3e9),
            20,
            "dual-channel DDR5-5600 and an NVMe drive",
        ),
        "cpu": Typical(
            Speeds(device=0.7e9, link=0.7e9, host=10e9, file=3e9),
            1,
            "what llvmpipe's shaders and ggml's kernels reach on two cores, and an NVMe drive",
        ),
    }
)
CPU_ROWS = 4  # of a prompt, as in `Typical`, that ggml's kernels multiply


@dataclass(frozen=True)
class Machine:
    """Holds what a prediction needs to know of a device and of the host it is in."""

    speeds: Speeds  # all known, or assumed
    shares_memory: bool = False  # the device and the CPU read the same memory, in turns
    is_vulkan: bool = True
    rows: int = 20  # as in `Typical`
    host_bytes: int = 1 << 62  # that are free
    # Measured over predicted times of tokens, of each mode that was measured on this device.
    corrections: Mapping[ModeName, float] = field(default_factory=dict)

    def correction(self, mode: ModeName) -> float:
        """Return the correction of a mode; of one that was not measured, the mean of the others."""
        found = self.corrections
        return found.get(mode) or (geometric_mean(found.values()) if found else 1.0)


def machine_of(device: DeviceInfo, speeds: Speeds, host_bytes: int) -> Machine:
    """Describe a machine; speeds that are not known are those that are typical of the device."""
    typical = TYPICAL[device.type]
    if device.is_uma and not (device.is_vulkan and device.is_cpu):
        speeds = replace(speeds, device=speeds.device or speeds.host)
    found = {name: x or getattr(typical.speeds, name) for name, x in vars(speeds).items()}
    # Kernels do over the link what they do in the device's memory: they cannot be faster there.
    found["link"] = found["device"] if device.is_uma else min(found["link"], found["device"])
    found["copy"] = found["copy"] or found["link"]
    found["gather"] = found["gather"] or found["link"]
    rows = typical.rows if device.is_vulkan else CPU_ROWS
    return Machine(Speeds(**found), device.is_uma, device.is_vulkan, rows, host_bytes)
