"""`vkmoe --version`: what to write into a bug report."""

from __future__ import annotations

import typer

from vkmoe.errors import VkmoeError

__all__ = ["version"]


def version() -> None:
    """Show the versions of vkmoe, Kompute and the Vulkan drivers."""
    from vkmoe import __version__
    from vkmoe.gpu.device import list_devices
    from vkmoe.gpu.versions import kompute_version

    typer.echo(f"vkmoe {__version__}")
    typer.echo(f"Kompute {kompute_version()}")
    try:
        for device in list_devices():
            api = ".".join(map(str, device.api_version))
            typer.echo(f"device {device.index}: {device.name}, {device.driver}, Vulkan {api}")
    except VkmoeError as error:
        typer.echo(f"no device: {error}")
