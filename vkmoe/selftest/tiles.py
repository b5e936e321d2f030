"""Measures what tiles multiply fastest on a device: f16 on matrix units or in lanes, or f32.

As with launches, only what agrees with its twin is timed, in turns, and a newcomer must be clearly
faster than what vkmoe would choose. One prompt's matrix stands for all that multiply tiles.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, get_args

import numpy as np

from vkmoe.gpu.device import Device
from vkmoe.gpu.runner import Runner, time_recording
from vkmoe.kernels.families import FAMILIES
from vkmoe.kernels.family import Setting, Variant
from vkmoe.kernels.launches import TileNumbers
from vkmoe.kernels.matmul.cases import Batch, MatmulCase
from vkmoe.kernels.tuning import Tuning, choose_tuning
from vkmoe.placement.remembered import TILES_MEASURED, MeasuredTiles
from vkmoe.selftest.launches import choose

if TYPE_CHECKING:
    from vkmoe.gpu.backend import Recording

N_ROWS, N_COLUMNS, N_BATCH = 4096, 2048, 256  # enough workgroups for any GPU; 4 GFLOP
ROUNDS = 9


def measure_tiles(device: Device) -> MeasuredTiles | None:
    """Measure all that the device can multiply; None where nothing is right, or there is no choice.

    Raises GpuErrors.
    """
    table = choose_tuning(device.info)
    able = [each for each in _there(table) if _is_right(device, table.with_numbers(each))]
    if len(_there(table)) == 1 or not able:
        return None
    best, gain = choose(_times(device, table, able), able[0])
    return MeasuredTiles(table.tile_numbers, best, round(gain, 4))


def _there(table: Tuning) -> list[TileNumbers]:
    """List what tiles can multiply in the table's mapping, its own choice first."""
    ways: tuple[TileNumbers, ...] = get_args(TileNumbers)
    return [each for each in ways if table.with_numbers(each).tile_numbers == each]


def _is_right(device: Device, tuning: Tuning) -> bool:
    """Compare the kernel with its twin in all its cases."""
    variant = Variant.parse(TILES_MEASURED)
    for trial in FAMILIES[variant.family].trials(Setting(variant.axis, tuning)):
        for compare in trial.compares:
            with Runner(device) as runner, np.errstate(all="ignore"):
                if not compare(runner).worst.ok:
                    return False
    return True


def _times(
    device: Device, table: Tuning, able: list[TileNumbers]
) -> dict[TileNumbers, list[float]]:
    """Time them in turns; seconds of each."""
    timed, kind = device.native.has_timestamps(), Variant.parse(TILES_MEASURED).axis
    recordings: dict[TileNumbers, Recording] = {}
    times: dict[TileNumbers, list[float]] = {each: [] for each in able}
    with ExitStack() as stack:
        for each in able:
            runner = stack.enter_context(Runner(device))
            batch = Batch(tuple(range(N_BATCH)))
            case = MatmulCase(table.with_numbers(each), ((kind, N_ROWS),), N_COLUMNS, batch)
            ready = case.prepare(runner)
            runner.run(ready.program, ready.rounds[0][0])
            recordings[each] = runner.record(ready.program, timed)
        for _ in range(ROUNDS):
            for each, recording in recordings.items():
                found = time_recording(device, recording, 1, timed)
                times[each].append(max(*found.device, 1e-9) if timed else found.wall[0])
    return times
