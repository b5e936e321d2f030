"""The tuning of invented devices: subgroups add only where all pipelines do so in one order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.gpu.invented import AMD, LAVAPIPE, with_matrix_units
from vkmoe.facts import DeviceInfo, MatrixShape
from vkmoe.gpu.device import Device
from vkmoe.gpu.runner import Runner
from vkmoe.kernels.experts.cases import DownCase, GateUpCase
from vkmoe.kernels.experts.spans import Use
from vkmoe.kernels.launches import Tile
from vkmoe.kernels.tuning import Tuning, adds_over_subgroups, choose_tuning, matrix_tile
from vkmoe.selftest.suite import compiled_variants, runnable

KEPT = Use(4, 3, kept=(0, 2))


def gpu(size: int, least: int, most: int, takes_size: bool) -> DeviceInfo:
    return replace(
        AMD,
        subgroup_size=size,
        subgroup_range=(least, most),
        takes_subgroup_size=takes_size,
        features=AMD.features | {"int64"},
    )


@pytest.mark.parametrize(
    ("size", "least", "most", "required"),
    [
        pytest.param(32, 32, 32, 0, id="NVIDIA has one size"),
        pytest.param(64, 32, 64, 64, id="RDNA"),
        pytest.param(32, 32, 64, 32, id="RDNA whose driver prefers 32"),
        pytest.param(32, 8, 32, 8, id="Arc"),
        pytest.param(32, 16, 32, 16, id="Xe2"),
        pytest.param(64, 64, 128, 64, id="Adreno"),
    ],
)
def test_devices_that_take_a_size_add_over_subgroups(
    size: int, least: int, most: int, required: int
) -> None:
    tuning = choose_tuning(gpu(size, least, most, takes_size=True))
    assert tuning.dot_suffix == tuning.reduce_suffix == "+subgroup"
    assert tuning.required_subgroup_size == required
    assert tuning.subgroup_size == size, "attention's teams are as wide as the driver prefers"


@pytest.mark.parametrize(
    "device",
    [
        pytest.param(gpu(64, 32, 64, takes_size=False), id="RDNA without control"),
        pytest.param(gpu(32, 1, 128, takes_size=False), id="a driver that does not say"),
        pytest.param(gpu(128, 64, 128, takes_size=True), id="wider than a workgroup"),
        pytest.param(
            replace(gpu(32, 8, 32, takes_size=True), subgroup_arithmetic=False), id="no arithmetic"
        ),
        pytest.param(
            replace(gpu(32, 32, 32, takes_size=True), features=frozenset()), id="no 64-bit integers"
        ),
    ],
)
def test_where_sizes_are_the_drivers_choice_a_tree_adds(device: DeviceInfo) -> None:
    tuning = choose_tuning(device)
    assert tuning.dot_suffix == tuning.reduce_suffix == ""
    assert tuning.required_subgroup_size == 0
    used = {v.name for v in compiled_variants() if v.suffix == "+subgroup" and runnable(v, device)}
    attention = {"attention+subgroup", "latent_attention+subgroup"}
    assert used == (attention if device.subgroup_arithmetic else set())


def test_lanes_of_intel_load_less_at_once() -> None:
    """Its compiler spills registers where all rows are loaded before the first is unpacked."""
    arc, rdna = gpu(32, 8, 32, takes_size=True), gpu(64, 32, 64, takes_size=True)
    assert choose_tuning(arc).loaded_words < choose_tuning(rdna).loaded_words


def test_one_size_needs_no_control() -> None:
    tuning = choose_tuning(gpu(32, 32, 32, takes_size=False))
    assert tuning.subgroup and tuning.required_subgroup_size == 0


@pytest.mark.parametrize(("sizes", "wide"), [((8, 8), True), ((4, 8), False), ((1, 128), False)])
def test_cpu_drivers_take_a_workgroup_for_a_subgroup_only_if_it_is_one(
    sizes: tuple[int, int], wide: bool
) -> None:
    device = replace(LAVAPIPE, subgroup_size=8, subgroup_range=sizes, features=frozenset({"int64"}))
    assert adds_over_subgroups(device) == choose_tuning(device).load_64bit == wide
    without = choose_tuning(replace(device, subgroup_shuffle=False))
    assert not without.load_64bit


def test_tiles_fit_in_shared_memory_and_registers() -> None:
    """As many rows as there is room for; half as many sums on GPUs with 128 registers a lane."""
    amd, intel = gpu(32, 32, 64, takes_size=True), gpu(16, 8, 32, takes_size=True)
    small = replace(amd, limits=replace(amd.limits, max_shared_memory=20 << 10))
    large = replace(amd, limits=replace(amd.limits, max_shared_memory=32 << 10))
    assert choose_tuning(large).tile == Tile(128, 128, 8, 4)
    assert choose_tuning(small).tile == choose_tuning(amd).tile == Tile(64, 64, 8, 4)
    assert choose_tuning(intel).tile.columns == 16
    for device in (small, large, intel):
        assert choose_tuning(device).tile.shared_bytes <= device.limits.max_shared_memory


def test_tiles_are_of_f16_where_devices_multiply_it_and_have_registers() -> None:
    def halves(device: DeviceInfo) -> bool:
        return choose_tuning(replace(device, features=device.features | {"float16"})).half_tiles

    amd, intel = gpu(64, 32, 64, takes_size=True), gpu(32, 8, 32, takes_size=True)
    assert halves(amd) and not halves(intel) and not halves(LAVAPIPE)
    assert not choose_tuning(amd).half_tiles, "it lacks the feature"


def test_matrix_units_are_used_where_their_tiles_fit() -> None:
    """In the forms that compilers take without spilling. Xe-LP multiplies without units."""

    def form(size: int, least: int, most: int, *shape: int, kind: str = "discrete") -> Tile | None:
        device = replace(with_matrix_units(gpu(size, least, most, takes_size=True)), type=kind)
        rows, columns, depth = shape
        shapes = (MatrixShape(rows, columns, depth, "f16", "f32"),)
        return matrix_tile(replace(device, matrix_shapes=shapes))

    assert form(64, 32, 64, 16, 16, 16) == Tile(256, 256, 64, 32, 16, 16, 16, 32, 1, 32)
    assert form(32, 32, 32, 16, 8, 16) == Tile(256, 256, 64, 32, 16, 8, 16, 32, 1)
    assert form(32, 16, 32, 8, 16, 16) == Tile(128, 128, 16, 32, 8, 16, 16, 16, 0, 16)
    assert form(32, 8, 32, 8, 8, 16) == Tile(128, 128, 16, 16, 8, 8, 16, 8, 0, 8)
    assert form(32, 8, 32, 8, 8, 16, kind="integrated") is None
    assert form(32, 16, 32, 8, 16, 16, kind="integrated") is not None
    assert form(32, 32, 32, 16, 16, 64) is None, "deeper than a chunk"
    able = with_matrix_units(gpu(64, 32, 64, takes_size=True))
    assert choose_tuning(able).tile_suffix == choose_tuning(able).attend_suffix == "+matrix"
    for lacking in (
        replace(able, matrix_shapes=()),
        replace(able, takes_subgroup_size=False),
        replace(able, subgroup_shuffle=False),
        replace(able, features=able.features - {"memory_model"}),
        replace(able, limits=replace(able.limits, max_shared_memory=32 << 10)),
        replace(able, limits=replace(able.limits, max_workgroup_invocations=128)),
    ):
        assert matrix_tile(lacking) is None
        assert choose_tuning(lacking).tile_suffix == "+half"


def test_the_kernels_of_experts_are_made_with_the_required_size(runner: Runner) -> None:
    """Here it is the only size, so the bits stay; another one reaches the driver and is refused."""
    device: Device = runner.device
    free = Tuning("lanes", 64, 4, subgroup=adds_over_subgroups(device.info))
    sized = replace(free, required_subgroup_size=device.info.subgroup_size)
    wrong = replace(free, required_subgroup_size=2 * device.info.subgroup_range[1])
    plain = replace(KEPT, kept=None)
    gate_up = GateUpCase(free, ("Q8_0", "Q8_0"), plain, 9, 768)
    for case in (gate_up, DownCase(free, "Q8_0", plain, 9, 768)):
        with Runner(device) as one, Runner(device) as two:
            found = replace(case, tuning=sized, use=KEPT).words(one)
            wanted = case.words(two)
        for mine, same in zip(found[:-1], wanted[:-1], strict=True):  # the log comes last
            np.testing.assert_array_equal(mine, same)
        for use in (KEPT, plain):
            refused = pytest.raises(ValueError, match=r"subgroups of \d+ cannot be required")
            with Runner(device) as other, refused:
                replace(case, tuning=wrong, use=use).words(other)
