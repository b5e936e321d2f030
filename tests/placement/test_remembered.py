"""What is remembered of a device: it is used where it fits, and else ignored with one note."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.invented import AMD, with_matrix_units
from vkmoe.facts import DeviceInfo
from vkmoe.kernels.launches import KernelClass, Launch, TileNumbers, kernel_class
from vkmoe.kernels.tuning import choose_tuning
from vkmoe.placement import remembered
from vkmoe.placement.forecast.measured import Known
from vkmoe.placement.remembered import (
    Measured,
    MeasuredTiles,
    Recalled,
    forget,
    recall,
    remember,
    tuning_for,
)

GPU = replace(
    AMD,
    subgroup_size=64,
    subgroup_range=(32, 64),
    takes_subgroup_size=True,
    features=AMD.features | {"int64"},
)
TABLE = choose_tuning(GPU)
HEAD = kernel_class("matvec", "Q6_K", 151936, 2048)
DOWN = kernel_class("expert_down", "Q4_K", 2048, 6144)
FOUND = (
    Measured(DOWN, TABLE.table_launch(DOWN), TABLE.table_launch(DOWN), 0.0),
    Measured(HEAD, TABLE.table_launch(HEAD), Launch(64, 8, 32), 0.12),
)


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    where = tmp_path / "cache" / "tuning.json"
    monkeypatch.setattr(
        remembered, "remembered_path", lambda device, what="tuning": where.parent / f"{what}.json"
    )
    return where


def test_what_was_measured_is_used_from_then_on(path: Path) -> None:
    assert recall(GPU) == Recalled() and tuning_for(GPU, "remembered") == TABLE
    assert remember(GPU, FOUND[::-1]) == path
    recalled = recall(GPU)
    assert set(recalled.measured) == set(FOUND) and recalled.changes == FOUND[1:]
    tuning = tuning_for(GPU, "remembered")
    assert tuning.launch(HEAD) == Launch(64, 8, 32) and tuning.launch(DOWN) == FOUND[0].table
    assert tuning_for(GPU, "table") == TABLE
    assert forget(GPU) and not path.exists() and not forget(GPU)


def test_tiles_multiply_what_was_measured_to_be_best(path: Path) -> None:
    """Until vkmoe itself would choose other numbers; without matrix units it would."""
    able = with_matrix_units(GPU)
    assert choose_tuning(able).tile_suffix == "+matrix"
    suffixes: dict[TileNumbers, str] = {"f16": "+half", "f32": "", "matrix": "+matrix"}
    for best, suffix in suffixes.items():
        tiles = MeasuredTiles("matrix", best, 0.2)
        remember(able, (), tiles)
        assert recall(able).tiles == tiles
        tuning = tuning_for(able, "remembered")
        assert tuning.tile_suffix == suffix and tuning.exact.tile_suffix == ""
    assert "table has changed" in recall(replace(able, matrix_shapes=())).note


Change = Callable[[dict[str, Any]], object]
CHANGES: dict[str, tuple[Change, str]] = {
    "driver": (lambda it: it.update(driver="older"), "another driver"),
    "device": (lambda it: it.update(device="RX 9999"), "another device"),
    "shaders": (lambda it: it.update(shaders="0"), "other kernels"),
    "version": (lambda it: it.update(version=2), "another version"),
    "format": (lambda it: it.update(format="a poem"), "no tuning"),
    "unknown field": (lambda it: it.update(more=1), "not known"),
    "no field": (lambda it: it.pop("driver"), "damaged"),
    "no kernels": (lambda it: it.update(kernels=7), "damaged"),
    "unknown kernel": (lambda it: it["kernels"][1]["kernel"].update(family="sort"), "damaged"),
    "unknown type": (lambda it: it["kernels"][1]["kernel"].update(type="Q9_Z"), "damaged"),
    "unknown part": (lambda it: it["kernels"][1]["best"].update(lanes=3), "damaged"),
    "no number": (lambda it: it["kernels"][1]["best"].update(rows="8"), "damaged"),
    "a half": (lambda it: it["kernels"][1]["best"].update(rows=2.5), "damaged"),
    "too good": (lambda it: it["kernels"][1].update(gain=1.5), "damaged"),
    "too many rows": (lambda it: it["kernels"][1]["best"].update(rows=64), "does not take"),
    "too many lanes": (
        lambda it: it["kernels"][1]["best"].update(workgroup_size=2048),
        "does not take",
    ),
    "foreign subgroup": (
        lambda it: it["kernels"][1]["best"].update(subgroup_size=16),
        "does not take",
    ),
    "experts whose subgroups nothing fixes": (
        lambda it: it["kernels"][0]["best"].update(subgroup_size=0),
        "does not take",
    ),
    "other table": (lambda it: it["kernels"][1]["table"].update(rows=3), "table has changed"),
}


@pytest.mark.parametrize(("change", "words"), CHANGES.values(), ids=CHANGES)
def test_what_no_longer_fits_is_ignored_with_a_note(
    path: Path, change: Change, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    remember(GPU, FOUND)
    document = json.loads(path.read_text())
    assert document["kernels"][0]["kernel"]["family"] == "expert_down"
    change(document)
    path.write_text(json.dumps(document))
    recalled = recall(GPU)
    assert not recalled.measured and words in recalled.note and str(path) in recalled.note
    with caplog.at_level("INFO", "vkmoe"):
        assert tuning_for(GPU, "remembered") == TABLE
    assert caplog.messages == [recalled.note]


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xff\xfe", b"[]", b"[" * 100000, b"null", b" " * (2 << 20)]
)
def test_a_damaged_file_is_ignored_with_a_note(path: Path, data: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(data)
    assert "damaged" in recall(GPU).note and tuning_for(GPU, "remembered") == TABLE


def test_a_file_that_cannot_be_read_is_ignored_with_a_note(path: Path) -> None:
    path.mkdir(parents=True)
    assert "cannot be read" in recall(GPU).note


def test_every_device_has_a_file_of_its_own_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    names = ("AMD Radeon RX 7900 XTX (RADV NAVI31)", "llvmpipe (LLVM 15.0.6, 256 bits)", "../../x")
    paths = [str(path_of(replace(AMD, name=name))) for name in names]
    assert paths[0] == "/somewhere/vkmoe/tuning/amd-radeon-rx-7900-xtx-radv-navi31.json"
    assert paths[2] == "/somewhere/vkmoe/tuning/x.json" and len(set(paths)) == 3


path_of: Callable[[DeviceInfo], Path] = remembered.remembered_path  # before a fixture replaces it


def test_a_class_goes_by_kernel_type_and_form_alone() -> None:
    assert KernelClass("matvec", "Q6_K", "many", "long") == HEAD
    assert kernel_class("matvec", "F32", 128, 512) == KernelClass("matvec", "F32", "few", "short")
    assert TABLE.launch(kernel_class("matvec", "F32", 128, 2048)) == Launch(64, 1)
    assert TABLE.launch(DOWN) == Launch(64, 4, 64), "experts' pipelines must agree in subgroups"
    assert TABLE.launch(HEAD) == Launch(64, 4), "others leave the size to the driver"


def test_a_user_without_a_home_folder_has_nothing_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a container whose user is in no list: models run, and `vkmoe tune` says what fails."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    monkeypatch.setattr(remembered, "remembered_path", path_of)
    assert recall(GPU) == Recalled()
    with pytest.raises(FileNotFoundError, match="no home folder"):
        remember(GPU, [])


def test_a_build_without_kernels_for_the_cpu_remembers_its_own_speeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remembered.write(GPU, "speeds", Known(disks={"a disk": 1e9}))
    assert remembered.read(GPU, "speeds", Known).disks == {"a disk": 1e9}
    monkeypatch.setattr(remembered, "has_cpu", lambda: False)
    with pytest.raises(remembered.Misfit, match="cpu"):
        remembered.read(GPU, "speeds", Known)
    remembered.write(GPU, "speeds", Known(disks={"a disk": 2e9}))
    assert remembered.read(GPU, "speeds", Known).disks == {"a disk": 2e9}
