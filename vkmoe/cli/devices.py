"""This module is `vkmoe devices`: every Vulkan device, the CPU, and the one that would be used."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from vkmoe.cli.notes import cpu_notes, note
from vkmoe.cli.options import Output, config_options
from vkmoe.option_fields import option

if TYPE_CHECKING:
    from vkmoe.facts import DeviceInfo


@dataclass(frozen=True)
class _Wanted:
    device: str | None = option(None, "Mark this device: its index or part of its name.")


@config_options
def devices(*, wanted: _Wanted, output: Annotated[Output, ("as_json",)]) -> None:
    """List the devices of all Vulkan drivers, and the CPU; an asterisk marks the one to be used."""
    from vkmoe.devices import choose_device, list_devices, without_cpu
    from vkmoe.errors import NoDeviceError

    found = list_devices()
    try:
        chosen: DeviceInfo | None = choose_device(found, wanted.device)
    except NoDeviceError:
        if wanted.device is not None:
            raise
        chosen = None
    if output.as_json:
        facts = [{**asdict(item), "chosen": item is chosen} for item in found]
        typer.echo(json.dumps(facts, indent=2, default=sorted))  # sets as lists
        return
    for item in found:
        typer.echo(_line(item, item is chosen))
    if chosen is not None and chosen.is_cpu:
        for line in cpu_notes(chosen, wanted.device):
            note(line)
    elif reason := without_cpu():
        note(reason)


def _line(device: DeviceInfo, chosen: bool) -> str:
    api = f"Vulkan {'.'.join(map(str, device.api_version[:2]))}, " if device.is_vulkan else ""
    sizes = [x.size for x in device.heaps if x.device_local or len(device.heaps) == 1]
    memory = f"{max(sizes) / 2**30:.1f} GiB" if sizes else "no memory"
    units = f", matrix units {device.half_shapes[0].sizes}" if device.half_shapes else ""
    return (
        f"{'*' if chosen else ' '} {device.index}: {device.name} ({device.type}, "
        f"{memory}, {api}{device.driver}{units})"
    )
