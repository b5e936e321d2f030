"""What tiles multiply is measured: only what is right counts, and what is clearly faster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.gpu.invented import AMD, with_matrix_units
from vkmoe.gpu.device import Device
from vkmoe.kernels.launches import TileNumbers
from vkmoe.kernels.tuning import Tuning, choose_tuning
from vkmoe.placement.remembered import MeasuredTiles
from vkmoe.selftest import tiles
from vkmoe.selftest.tiles import measure_tiles

TABLE = choose_tuning(with_matrix_units(replace(AMD, subgroup_range=(32, 64))))


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with Device(os.environ.get("VKMOE_DEVICE")) as opened:
        yield opened


@pytest.mark.parametrize(
    ("wrong", "seconds", "found"),
    [
        ((), (1.0, 2.0, 3.0), MeasuredTiles("matrix", "matrix", 0.0)),
        ((), (2.0, 1.0, 3.0), MeasuredTiles("matrix", "f16", 0.5)),
        ((), (1.0, 0.99, 3.0), MeasuredTiles("matrix", "matrix", 0.0)),
        (("matrix",), (1.0, 2.0, 3.0), MeasuredTiles("matrix", "f16", 0.0)),
        (("matrix", "f16"), (1.0, 2.0, 3.0), MeasuredTiles("matrix", "f32", 0.0)),
        (("matrix", "f16", "f32"), (1.0, 2.0, 3.0), None),
    ],
)
def test_the_fastest_that_is_right_is_chosen(
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
    wrong: tuple[TileNumbers, ...],
    seconds: tuple[float, ...],
    found: MeasuredTiles | None,
) -> None:
    taken = dict(zip(("matrix", "f16", "f32"), seconds, strict=True))

    def right(device: Device, tuning: Tuning) -> bool:
        return tuning.tile_numbers not in wrong

    monkeypatch.setattr(tiles, "choose_tuning", lambda info: TABLE)
    monkeypatch.setattr(tiles, "_is_right", right)
    monkeypatch.setattr(
        tiles, "_times", lambda device, table, able: {each: [taken[each]] * 5 for each in able}
    )
    assert measure_tiles(device) == found


def test_tiles_are_compared_and_timed_on_the_device(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the mapping of GPUs; a device of another mapping, or of one way, has no choice."""
    assert measure_tiles(device) is None or not device.info.is_cpu
    lanes = Tuning("lanes", 32, 2, False, half_tiles="float16" in device.info.features)
    monkeypatch.setattr(tiles, "choose_tuning", lambda info: lanes)
    for name, few in (("N_ROWS", 64), ("N_COLUMNS", 256), ("N_BATCH", 4), ("ROUNDS", 2)):
        monkeypatch.setattr(tiles, name, few)
    found = measure_tiles(device)
    assert (found is None) == (lanes.tile_numbers == "f32")
    assert found is None or (found.table == "f16" and found.best in ("f16", "f32"))
