"""Makes vkmoe/data/devices/*.json, the devices that `vkmoe plan --device-profile` knows by name.

python -m tools.make_device_profiles

Heaps, memory types, limits and features are what the real driver of each GPU says, run without the
GPU (tools/gpu_drivers.py). Sizes that depend on the card or the machine, and speeds, are from data
sheets: SHEETS names each.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tools.gpu_drivers import command, folder

TARGET = Path(__file__).resolve().parent.parent / "vkmoe" / "data" / "devices"
GIB = 1 << 30
SHOW = """
import json
from vkmoe.gpu.device import list_devices
from vkmoe.placement.typed_json import plain
print(json.dumps(plain(list_devices()[0])))
"""
DDR4 = "dual-channel DDR4-3200: 51.2 GB/s by its data sheet"
NVME = "an NVMe drive of 3 GB/s is assumed"
DDR5 = "dual-channel DDR5-5600: 89.6 GB/s by its data sheet"


class Sheet(NamedTuple):
    """What a driver without its GPU cannot know."""

    gpu: str  # of tools.gpu_drivers
    name: str
    heaps: dict[int, int]  # sizes that are others than the driver says
    host_bytes: int  # that are free
    gb_per_second: dict[str, float]
    sources: dict[str, str]


SHEETS = {
    "navi31": Sheet(
        "navi31",
        "AMD Radeon RX 7900 XTX (RADV NAVI31)",
        {},
        48 * GIB,
        {"device": 960.0, "link": 28.0, "host": 89.6, "file": 3.0},
        {
            "device": "GDDR6, 384 bit at 20 Gbit/s: 960 GB/s by AMD's data sheet",
            "link": "PCIe 4.0 x16: 31.5 GB/s by its specification, less a tenth",
            "host": DDR5,
            "file": NVME,
        },
    ),
    "rtx3060-12gb": Sheet(
        "nvk-ampere",
        "NVIDIA GeForce RTX 3060 (NVK)",
        {0: 12 * GIB, 1: 24 * GIB},
        24 * GIB,
        {"device": 360.0, "link": 28.0, "host": 51.2, "file": 3.0},
        {
            "heaps": "12 GB by NVIDIA's data sheet; memory types by NVK",
            "device": "GDDR6, 192 bit at 15 Gbit/s: 360 GB/s by NVIDIA's data sheet",
            "link": "PCIe 4.0 x16: 31.5 GB/s by its specification, less a tenth",
            "host": DDR4,
            "file": NVME,
        },
    ),
    "8gb-nobar": Sheet(
        "polaris10",
        "AMD Radeon RX 580 (RADV POLARIS10), 8 GB without resizable BAR",
        {},
        24 * GIB,
        {"device": 256.0, "link": 14.0, "host": 51.2, "file": 3.0},
        {
            "device": "GDDR5, 256 bit at 8 Gbit/s: 256 GB/s by AMD's data sheet",
            "link": "PCIe 3.0 x16: 15.8 GB/s by its specification, less a tenth",
            "host": DDR4,
            "file": NVME,
        },
    ),
    "uma-32gb": Sheet(
        "gfx1150",
        "AMD Radeon 890M (RADV GFX1150), 32 GB of shared memory",
        {0: 11 * GIB // 2, 1: 11 * GIB},
        28 * GIB,
        {"device": 120.0, "link": 120.0, "host": 120.0, "file": 3.0},
        {
            "heaps": "RADV splits half of the RAM and its own 0.5 GiB two to one",
            "device": "LPDDR5X-7500, 128 bit: 120 GB/s by AMD's data sheet",
            "link": "the same memory",
            "host": "the same memory",
            "file": NVME,
        },
    ),
}


def main() -> None:
    """Ask each driver, and write a file for each profile."""
    TARGET.mkdir(exist_ok=True)
    for name, sheet in SHEETS.items():
        words, environment = command(folder(), sheet.gpu, [sys.executable, "-c", SHOW])
        done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        device: dict[str, Any] = json.loads(done.stdout)
        for heap, size in sheet.heaps.items():
            device["heaps"][heap] |= {"size": size, "budget": size}
        profile = {
            "device": device | {"name": sheet.name},
            "host_memory_bytes": sheet.host_bytes,
            "gb_per_second": sheet.gb_per_second,
            "sources": sheet.sources,
        }
        (TARGET / f"{name}.json").write_text(json.dumps(profile, indent=1) + "\n")
        print(f"wrote {name}.json")


if __name__ == "__main__":
    main()
