"""What a command tells people beside its result: lines on stderr."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from vkmoe.facts import DeviceInfo

__all__ = ["cpu_notes", "log_as_notes", "note"]


def note(text: str) -> None:
    """One line on stderr, which never mixes with the text on stdout."""
    sys.stdout.flush()
    typer.echo(text, err=True)


class _Notes(logging.Handler):
    """Shows each message of the log as a note."""

    def emit(self, record: logging.LogRecord) -> None:
        kind = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        note(kind + " ".join(record.getMessage().split()))


@contextmanager
def log_as_notes(quiet: bool) -> Iterator[None]:
    """Show what vkmoe logs; with `quiet` the errors alone."""
    log = logging.getLogger("vkmoe")
    handler = _Notes(logging.ERROR if quiet else logging.INFO)
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def cpu_notes(chosen: DeviceInfo, devices: list[DeviceInfo]) -> list[str]:
    """Why a model runs on the CPU: no GPU, another choice, or no permission. Empty for a GPU."""
    if not chosen.is_cpu:
        return []
    from vkmoe.gpu.device import blocked_render_nodes

    gpus = [device.name for device in devices if not device.is_cpu]
    lines = [
        f"running on the CPU, not on {', '.join(gpus)}"
        if gpus
        else "no GPU found: running on the CPU"
    ]
    if blocked := blocked_render_nodes():
        lines.append(
            f"no permission to open {', '.join(blocked)}: to use that GPU, join the `render` "
            "group (sudo usermod -aG render $USER) and log in again"
        )
    return lines
