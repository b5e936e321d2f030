"""This module makes the card that reports open with: device, driver, system, load, clocks, link.

It owns how these are found out, without root and without a path or host name of the machine. What
cannot be known is stated as such.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vkmoe import __version__
from vkmoe.bench.measure import Output
from vkmoe.facts import DeviceInfo
from vkmoe.gpu.device import Device

ROOT = Path(__file__).resolve().parent.parent.parent
PCI = Path("/sys/bus/pci/devices")
DISPLAY_CLASS = "0x03"
NOT_REPORTED = "not reported"


def describe(info: DeviceInfo) -> dict[str, Any]:
    """Describe what a reader must know to judge the figures."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _command(),
        "device": info.name,
        "device_type": info.type,
        "driver": info.driver,
        "vulkan": _vulkan(info),
        "os": platform.platform(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "python": platform.python_version(),
        "vkmoe": __version__,
        "commit": _commit(),
        "load_average": _load_average(),
        "clocks": _clocks(info),
        "link": _link(info),
    }


def _vulkan(info: DeviceInfo) -> str:
    return ".".join(map(str, info.api_version)) if info.is_vulkan else "none: no shader runs"


def print_card(card: dict[str, Any], say: Callable[[str], None] = print) -> None:
    """Write the card, one fact a line, and an empty line behind it."""
    for key, value in card.items():
        say(f"{key + ':':<16} {value}")
    say("")


def show_card(device: Device, threads: int | None, output: Output) -> dict[str, Any]:
    """Write and return the card of an open device; on a CPU with its threads.

    `threads` are those that were asked for, which are idle where shaders run.
    """
    card = describe(device.info)
    if device.n_threads is not None:
        card["threads"] = device.n_threads
    print_card(card, output.say)
    if threads is not None and device.n_threads is None:
        output.say(f"--threads has no effect: {device.info.name} runs shaders\n")
    return card


def link_under_load(info: DeviceInfo, work: Callable[[], object]) -> str:
    """Read link speed and clocks while `work` runs over and over: idle links are slowed down."""
    if info.is_cpu:
        return _link(info)
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(f"{_link(info)}; {_clocks(info)}"))
    work()
    reader.start()
    while reader.is_alive():
        work()
    return found[0] if found else NOT_REPORTED


def _command() -> str:
    """Return the command line without the folders of this machine."""
    given = [Path(word).name if os.sep in word else word for word in sys.argv[1:]]
    name = Path(sys.argv[0]).stem
    own = name in ("vkmoe", "__main__")
    return " ".join([*(["vkmoe"] if own else ["python", "-m", f"bench.{name}"]), *given])


def _load_average() -> list[float] | str:
    loads = os.getloadavg() if hasattr(os, "getloadavg") else ()
    return [round(load, 2) for load in loads] or NOT_REPORTED


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or NOT_REPORTED
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or NOT_REPORTED


def _commit() -> str:
    """Return the checkout's commit, with `+` when a tracked file differs from it."""
    if not (ROOT / ".git").exists():  # an installed package, perhaps inside another repository
        return NOT_REPORTED
    commit = _output(["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"])
    if not commit:
        return NOT_REPORTED
    changed = _output(["git", "-C", str(ROOT), "status", "--porcelain", "-uno"])
    return commit + ("+" if changed else "")


def _clocks(info: DeviceInfo) -> str:
    if info.is_cpu:
        return "CPU device: the cores', not pinned"
    states = [
        line.strip()
        for folder in _display_devices(info)
        for name in ("pp_dpm_sclk", "pp_dpm_mclk")
        for line in _read(folder / name).splitlines()
        if line.endswith("*")
    ]
    if states:
        return ", ".join(states)
    query = "--query-gpu=clocks.sm,clocks.mem,clocks.max.sm,pstate"
    return _output(["nvidia-smi", query, "--format=csv,noheader"]) or NOT_REPORTED


def _link(info: DeviceInfo) -> str:
    if info.is_uma:
        return "none: the device shares the host's memory"
    found = [
        f"{_read(folder / 'current_link_speed')} x{_read(folder / 'current_link_width')}"
        for folder in _display_devices(info)
        if _read(folder / "current_link_width")
    ]
    if found:
        return ", ".join(found)
    query = "--query-gpu=pcie.link.gen.current,pcie.link.width.current"
    answer = _output(["nvidia-smi", query, "--format=csv,noheader"])
    return f"PCIe generation, width: {answer}" if answer else NOT_REPORTED


def _display_devices(info: DeviceInfo) -> list[Path]:
    """List the PCI devices that can be this one: its vendor's display controllers."""
    if not PCI.is_dir():
        return []
    vendor = f"{info.vendor_id:#06x}"
    return [
        folder
        for folder in sorted(PCI.iterdir())
        if _read(folder / "vendor") == vendor and _read(folder / "class").startswith(DISPLAY_CLASS)
    ]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _output(command: list[str]) -> str:
    """Return what a program writes, or nothing if it is not there or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
