"""`vkmoe selftest`: does this device compute what NumPy computes, and how fast."""

from __future__ import annotations

import click

from vkmoe.cli.options import option

__all__ = ["selftest"]


@click.command(short_help="Check a device against NumPy.")
@option("--device", default=None, help="Vulkan device: its index or part of its name.")
def selftest(device: str | None) -> None:
    """Run every kernel variant against its NumPy twin on a device: error and GB/s."""
    click.echo(device)
