"""This module is `vkmoe tune`: measures how kernels run best on a device, and remembers it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vkmoe.cli.notes import counting, note
from vkmoe.cli.options import ModelChoice, config_options
from vkmoe.config import EngineConfig
from vkmoe.errors import UsageError, VkmoeError
from vkmoe.option_fields import option

if TYPE_CHECKING:
    from vkmoe.facts import DeviceInfo
    from vkmoe.gpu.device import Device
    from vkmoe.placement.remembered import Measured, MeasuredTiles
    from vkmoe.selftest.matrices import Works

NO_NEED = (
    "the CPU needs no tuning: ggml's kernels are launched in one way, with a thread for each "
    "physical core ({n} here); `-t` asks for more or fewer, `vkmoe bench decode -t` measures that"
)
_NUMBERS = {"matrix": "f16 on matrix units", "f16": "f16", "f32": "f32"}
SECONDS = 14.0  # after which no more kernels are begun; one takes a few at most


@dataclass(frozen=True)
class _Wanted:
    again: bool = option(False, "Measure anew what is remembered already.")
    forget: bool = option(False, "Delete what is remembered of the device.")

    def __post_init__(self) -> None:
        if self.again and self.forget:
            raise UsageError("--again and --forget contradict each other", "give one of them")


@config_options
def tune(
    context: typer.Context,
    *,
    which: ModelChoice,
    config: Annotated[EngineConfig, ("device",)],
    wanted: _Wanted,
) -> None:
    """Measure how kernels are best launched on a device, and remember it.

    Takes less than 20 seconds. Only results that agree with NumPy are timed, and what vkmoe would
    choose by itself stays unless something else is clearly faster. Every later start uses what is
    remembered, until the driver or vkmoe's kernels change. With MODEL its own shapes and types are
    measured, else common types in the shapes of Qwen3-30B-A3B. The CPU needs none of this: there
    each kernel is launched in one way.
    """
    from vkmoe.devices import open_device
    from vkmoe.placement.remembered import forget as delete

    works = _works(which.path(context))
    with open_device(config.device) as opened:
        info = opened.info
        note(f"device {info.index}: {info.name} ({info.driver})")
        if wanted.forget:
            note("forgotten" if delete(info) else "nothing was remembered")
        elif not info.is_vulkan:
            note(NO_NEED.format(n=opened.n_threads))
        else:
            _tune(opened, works, wanted.again)


def _tune(device: Device, works: Works, again: bool) -> None:
    """Measure what is not known yet, remember it and print all. Raises VkmoeError."""
    from vkmoe.placement.remembered import recall
    from vkmoe.selftest.tiles import measure_tiles

    info = device.info
    recalled = recall(info)
    if recalled.note:
        note(recalled.note)
    known = {item.kernel: item for item in recalled.measured}
    todo = {kernel: work for kernel, work in works.items() if again or kernel not in known}
    tiles = recalled.tiles
    if again or tiles is None:
        tiles = measure_tiles(device)
    found = _measured(device, todo)
    new = {item.kernel: item for item in found if item is not None}
    known |= new
    if new or tiles != recalled.tiles:
        note(f"remembered in {_remembered(info, list(known.values()), tiles)}")
    if tiles is not None:
        typer.echo(tiles_line(tiles))
    for line in tuning_lines([known[kernel] for kernel in works if kernel in known]):
        typer.echo(line)
    if not todo:
        note("nothing to do: all of these were measured before; --again measures anew")
    elif n_left := len(todo) - len(found):
        note(f"{n_left} of {len(todo)} are left for want of time: `vkmoe tune` again goes on")
    if n_wrong := len(found) - len(new):
        raise VkmoeError(
            f"{n_wrong} of {len(found)} kernels compute wrongly on {info.name}: not measured",
            "`vkmoe selftest` says which; update the driver, or choose another device",
        )


def _works(path: str | None) -> Works:
    """List what is measured: of a model its own matrices, else those of a common one."""
    from vkmoe.models import open_model
    from vkmoe.selftest.matrices import common_works, largest_of_each_class, works_of

    if path is None:
        return largest_of_each_class(common_works())
    with open_model(path) as model:
        return largest_of_each_class(works_of(model))


def _measured(device: Device, todo: Works) -> list[Measured | None]:
    """Measure what there is time for; None stands for what computes wrongly."""
    from vkmoe.selftest.launches import measure_launches

    found: list[Measured | None] = []
    with counting("measuring") as progress:
        for item in measure_launches(device, todo, SECONDS):
            found.append(item)
            progress(len(found), len(todo))
    return found


def _remembered(
    device: DeviceInfo, measured: Sequence[Measured], tiles: MeasuredTiles | None
) -> Path:
    from vkmoe.placement.remembered import remember, remembered_path

    try:
        return remember(device, measured, tiles)
    except OSError as error:
        raise VkmoeError(
            f"what was measured could not be written to {remembered_path(device)}: "
            f"{error.strerror}",
            "let XDG_CACHE_HOME name a folder where you may write",
        ) from error


def tiles_line(tiles: MeasuredTiles) -> str:
    """Say what tiles of prompts multiply, and whether vkmoe would have chosen it by itself."""
    if tiles.best == tiles.table:
        also = "; attention of prompts runs there too" if tiles.best == "matrix" else ""
        return f"tiles of prompts multiply {_NUMBERS[tiles.best]}, as by default{also}"
    why = f"it takes {tiles.gain:.0%} less time" if tiles.gain else "that computes wrongly here"
    ways = f"{_NUMBERS[tiles.best]} in place of {_NUMBERS[tiles.table]}"
    also = "; attention of prompts leaves them too" if tiles.table == "matrix" else ""
    return f"tiles of prompts multiply {ways}: {why}{also}"


def tuning_lines(measured: Sequence[Measured]) -> Iterator[str]:
    """Make a table of what was measured: each class, its launch by default and now, its gain."""
    if measured:
        yield (
            f"{'kernel':16}{'type':8}{'rows':6}{'columns':9}{'lanes x rows':15}{'':18}{'time':>7}"
        )
    for kernel, table, best, gain in measured:
        change = "stays" if best == table else f"-> {best}"
        saved = f"-{gain:.0%}" if best != table else ""
        yield (
            f"{kernel.family:16}{kernel.type:8}{kernel.rows:6}{kernel.columns:9}"
            f"{table!s:15}{change:18}{saved:>7}"
        ).rstrip()
