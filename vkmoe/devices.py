"""Lists what vkmoe can run on, Vulkan devices and the CPU itself, and opens the one that is meant.

Owns the order in which they are preferred. What a device can do is known to gpu/ and cpu/.
"""

from __future__ import annotations

import os
from dataclasses import replace

from vkmoe.cpu.device import CpuDevice, cpu_info
from vkmoe.cpu.variants import has_cpu, variant
from vkmoe.errors import NoDeviceError, NoDriverError
from vkmoe.facts import DeviceInfo
from vkmoe.gpu import device as gpu
from vkmoe.gpu.device import VULKAN, Device

CPU = "cpu"  # what --device takes for the CPU itself
_VARIABLE = "VKMOE_DEVICE"


def list_devices() -> list[DeviceInfo]:
    """List all Vulkan devices in the loader's order, then the CPU, where vkmoe has kernels for it.

    Raises NoDriverError if there is neither.
    """
    try:
        found = gpu.list_devices()
    except NoDriverError:
        if not has_cpu():
            raise
        found = []
    if has_cpu():
        found.append(replace(cpu_info(), index=max((item.index for item in found), default=-1) + 1))
    return found


def without_cpu() -> str:
    """Say why the CPU is not among the devices, and what helps; empty where it is."""
    try:
        variant()
    except NoDeviceError as error:
        return f"{error} ({error.hint})"
    return ""


def without_vulkan() -> str:
    """Say why there is no Vulkan device, and what helps; empty where there is one."""
    try:
        gpu.list_devices()
    except NoDriverError as error:
        return f"{error} ({error.hint})"
    return ""


def choose_device(devices: list[DeviceInfo], wanted: str | None) -> DeviceInfo:
    """Choose the device a user means: by index, by a part of its name, or the best one.

    Best is a GPU, then the CPU, then a Vulkan driver that runs on it. "vulkan" is the best Vulkan
    device, "cpu" the CPU. Raises NoDeviceError with what there is or is missing, NoDriverError.
    """
    name = _name(wanted).lower()
    of_threads = [item for item in devices if not item.is_vulkan]
    others = [item for item in devices if item.is_vulkan]
    gpus = [item for item in others if not item.is_cpu and not gpu.missing_features(item)]
    if of_threads and (name == CPU or not (name or gpus)):
        return of_threads[0]
    if name == CPU:
        variant()  # raises where there are no kernels, with what to do
    if name in ("", VULKAN):
        return gpu.choose_device(others or gpu.list_devices(), None)
    try:
        return gpu.choose_device(devices, _name(wanted))
    except NoDeviceError:
        if not others:
            gpu.list_devices()  # raises NoDriverError where GPUs are not even looked for
        raise


def open_device(
    wanted: str | None = None, validation: bool = False, n_threads: int | None = None
) -> Device:
    """Open the device that `choose_device` chooses, with `n_threads` where it is the CPU.

    None of them: one for each physical core. With `validation` the best is a Vulkan device: there
    is no other that the layer watches. Use it as a context manager. Raises GpuErrors.
    """
    name = _name(wanted) or VULKAN * validation
    if name.lower() == VULKAN or (name.lower() != CPU and not has_cpu()):
        return Device(name or None, validation)
    chosen = choose_device(list_devices(), name or None)
    if chosen.is_vulkan:
        return Device(str(chosen.index), validation)
    if validation:
        raise NoDeviceError(
            "the validation layer watches Vulkan devices, and the CPU is none",
            f"drop --validation, or take --device {VULKAN}",
        )
    return CpuDevice(n_threads, chosen.index)


def _name(wanted: str | None) -> str:
    """Return the name to look for, which a variable may say; empty for the best."""
    return (wanted or os.environ.get(_VARIABLE, "")).strip()
