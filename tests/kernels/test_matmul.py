"""Tiles against their twins, and the law: neither tile, place nor neighbours change a bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernels.tunings import MAPPINGS, chosen_device, elsewhere, every_type, tuning_for
from tests.samples import sampled
from vkmoe.gpu.runner import Runner
from vkmoe.kernels.comparison import KernelCase
from vkmoe.kernels.inputs import WEIGHT_TYPES
from vkmoe.kernels.launches import Tile
from vkmoe.kernels.matmul.cases import Batch, ExpertMatmulCase, MatmulCase
from vkmoe.kernels.tuning import Tuning, matrix_tile

PLAIN = [
    tuning_for(suffix, 8 if suffix.startswith("+blocks") else 64, 4)
    for suffix in MAPPINGS
    if suffix != "+subgroup"
]
HALF = replace(tuning_for("", 64, 4), half_tiles=True)
MATRIX = replace(tuning_for("", 64, 4), matrix_tile=matrix_tile(chosen_device()))
# What rounds factors to f16. Lavapipe has no matrix units before Mesa 26: see tests/lavapipe.
ROUNDING = [HALF] * ("float16" in chosen_device().features) + [MATRIX] * MATRIX.rounds_factors
TUNINGS = PLAIN + ROUNDING
SHAPES = [Tile(32, 32, 8, 4), Tile(64, 64, 8, 8), Tile(128, 128, 4, 4)]  # of GPUs
by_mapping = pytest.mark.parametrize("tuning", TUNINGS, ids=lambda t: t.tile_suffix or "lanes")
Words = NDArray[np.uint32]


class Hard(Batch):
    """Rows that f16 could not hold, or that strain it, by their numbers."""

    def draw(self, n_values: int, seed: int) -> NDArray[np.float32]:
        drawn, which = super().draw(n_values, seed), np.arange(n_values)
        makes = (
            lambda x: 1e30 * x,
            lambda x: 1e-30 * np.abs(x),
            lambda x: np.where(which % 32 == 7, 1e9, x),
            lambda x: np.exp2(-(which % 40.0)) * x,
            lambda x: np.full_like(x, 1.0 + 2.0**-11),  # halfway between two
            lambda x: np.where(which % 64 < 33, 0.0, x),
            lambda x: np.abs(x),
            lambda x: np.where(which >= n_values - 40, 1e7 * x, x),  # late, and more than once
            lambda x: np.where(which < 32, 1e-3 * x, np.exp2(which / 16.0) * x),
        )
        made = [makes[row % len(makes)](x) for row, x in zip(self.rows, drawn, strict=True)]
        return np.array(made, np.float32)


def rows(*numbers: int, spare: int = 0) -> Batch:
    return Batch(numbers, spare)


def tuning_of(kind: str, turn: int) -> Tuning:
    """The mappings take turns."""
    return TUNINGS[(WEIGHT_TYPES.index(kind) + turn) % len(TUNINGS)]


def words(runner: Runner, case: KernelCase) -> Words:
    with Runner(runner.device) as other:
        return case.words(other)[0]


@by_mapping
@pytest.mark.parametrize("n", [1, 4, 5, 8, 9, 31, 32, 33, 70])
def test_numbers_of_rows(runner: Runner, tuning: Tuning, n: int) -> None:
    MatmulCase(tuning, (("Q4_K", 70),), 256, rows(*range(n), spare=3)).run(runner).verify()


@by_mapping
@pytest.mark.sample(2)
def test_gaps_and_biases(runner: Runner, tuning: Tuning) -> None:
    segments = (("Q4_K", 5), ("Q6_K", 3), ("Q6_K", 4), ("Q6_K", 1), ("Q6_K", 7), ("F32", 2))
    batch = rows(*range(6), spare=1)
    MatmulCase(tuning, segments, 512, batch, biased=True, gap=8).run(runner).verify()


@by_mapping
def test_heads(runner: Runner, tuning: Tuning) -> None:
    batch = rows(*range(9), spare=2)
    MatmulCase(tuning, (("Q8_0", 41),), 96, batch, gap=4, n_heads=3).run(runner).verify()


@every_type
@pytest.mark.sample(2)
def test_experts(runner: Runner, kind: str) -> None:
    """Of six experts each row uses three; one, two and three types take turns with the mappings."""
    i = WEIGHT_TYPES.index(kind)
    types = ((kind, kind), (kind,), (kind, WEIGHT_TYPES[i - 1]))[i // len(TUNINGS) % 3]
    batch = rows(*range(13), spare=3)
    ExpertMatmulCase(tuning_of(kind, 2), types, 21, 256, batch, 6, 3).run(runner).verify()


@by_mapping
@pytest.mark.parametrize(
    "types", [("Q4_K", "Q6_K"), *elsewhere((("Q4_K", "Q4_K"),), (("Q4_K",),))], ids=str
)
@pytest.mark.sample(1)
def test_experts_as_gpt_oss_has_them(
    runner: Runner, tuning: Tuning, types: tuple[str, ...]
) -> None:
    case = ExpertMatmulCase(tuning, types, 35, 256, rows(1, 2, 3), 4, 2, biased=True)
    replace(case, activation="swiglu_oai").run(runner).verify()


class Large(Batch):
    """Rows that make gates whose powers overflow in float32."""

    def draw(self, n_values: int, seed: int) -> NDArray[np.float32]:
        return super().draw(n_values, seed) * np.float32(1e15)


@by_mapping
@pytest.mark.parametrize("batch", [rows(1, 2, 3), Large((1, 2, 3))], ids=["usual", "large"])
@pytest.mark.sample(2)
def test_experts_as_gemma_has_them(runner: Runner, tuning: Tuning, batch: Batch) -> None:
    for types in (("Q4_K", "Q4_K"), ("Q4_K", "Q6_K")):
        case = ExpertMatmulCase(tuning, types, 35, 256, batch, 4, 2, activation="geglu")
        with Runner(runner.device) as other:
            case.run(other).verify()


@by_mapping
@pytest.mark.parametrize("types", [("Q4_K", "Q4_K"), ("Q6_K",)])
@pytest.mark.sample(3)
def test_a_fixed_span(runner: Runner, tuning: Tuning, types: tuple[str, ...]) -> None:
    """One expert for all rows, more of them than a tile has."""
    ExpertMatmulCase(tuning, types, 35, 256, rows(*range(40), spare=5)).run(runner).verify()


@by_mapping
@pytest.mark.parametrize("types", [("Q4_K", "Q4_K"), ("Q6_K",)])
@pytest.mark.sample(3)
def test_all_rows_choose_the_same_experts(
    runner: Runner, tuning: Tuning, types: tuple[str, ...]
) -> None:
    """Two experts have all pairs, in several tiles each; the others have none."""
    batch = rows(*range(45))
    case = ExpertMatmulCase(tuning, types, 16, 256, batch, 5, 2, chosen=((3, 1),) * 45)
    case.run(runner).verify()


@every_type
@pytest.mark.parametrize("tuning", ROUNDING or [None], ids=lambda t: t.tile_suffix if t else "any")
def test_nothing_overflows_in_f16_and_errors_are_bounded(
    runner: Runner, tuning: Tuning | None, kind: str
) -> None:
    """Numbers from 1e-30 to 1e30, outliers, sums of one sign, zeros; as heads, for the bound.

    Where the device has no float16, the mappings take turns.
    """
    tuning = tuning or tuning_of(kind, 0)
    batch = Hard(tuple(range(18)))
    MatmulCase(tuning, ((kind, 33),), 512, batch, n_heads=2).run(runner).verify()


# ----- the law -----


@by_mapping
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("kind", ["Q4_K", *elsewhere("Q6_K")])
def test_a_row_has_the_same_bits_in_any_batch(
    runner: Runner, tuning: Tuning, kind: str, residual: bool
) -> None:
    """Alone, among 5, among 33, at the first, a middle and the last place."""
    alone = MatmulCase(tuning, ((kind, 45),), 768, rows(7), residual=residual)
    wanted = words(runner, alone)[:45]
    for n in (2, 5, 9, 33, 65):
        for place in {0, n // 2, n - 1}:
            numbers = [100 + i for i in range(n)]
            numbers[place] = 7
            found = words(runner, replace(alone, batch=rows(*numbers, spare=n % 3)))
            np.testing.assert_array_equal(found[45 * place : 45 * (place + 1)], wanted)


@by_mapping
def test_hard_neighbours_change_no_bit(runner: Runner, tuning: Tuning) -> None:
    """Where scales must fit the numbers of one row, those of others stay as they are."""
    numbers = tuple(range(18))
    case = MatmulCase(tuning, (("Q4_K", 33),), 512, Hard(numbers))
    together = words(runner, case)[:-1].reshape(len(numbers), 33)
    for i in (3, 4, 7, 8, 12):
        alone = words(runner, replace(case, batch=Hard((i,))))[:-1]
        np.testing.assert_array_equal(together[i], alone)


@by_mapping
def test_a_matrix_row_has_the_same_bits_at_any_place(runner: Runner, tuning: Tuning) -> None:
    """The rows of a stack begin as those of its first matrix, wherever the tiles are cut."""
    batch = rows(*range(6))
    one = words(runner, MatmulCase(tuning, (("Q4_K", 23),), 512, batch))[:-1].reshape(6, 23)
    case = MatmulCase(tuning, (("Q4_K", 23), ("Q4_K", 50)), 512, batch)
    two = words(runner, case)[:-1].reshape(6, 73)
    np.testing.assert_array_equal(two[:, :23], one)


@by_mapping
@pytest.mark.parametrize(
    "types", [("Q4_K", "Q6_K"), *elsewhere((("Q4_K", "Q4_K"),), (("Q6_K",),))], ids=str
)
@pytest.mark.sample(2)
def test_a_pair_has_the_same_bits_among_any_others(
    runner: Runner, tuning: Tuning, types: tuple[str, ...]
) -> None:
    alone = ExpertMatmulCase(tuning, types, 21, 512, rows(7), 6, 3)
    n_words = 3 * 21
    wanted = words(runner, alone)[:n_words]
    for n in (2, 5, 33, 70):
        numbers = [100 + i for i in range(n)]
        numbers[n // 2] = 7
        found = words(runner, replace(alone, batch=rows(*numbers)))
        start = n // 2 * n_words
        np.testing.assert_array_equal(found[start : start + n_words], wanted)


@pytest.mark.parametrize("tile", [SHAPES[1], *elsewhere((SHAPES[0],), (SHAPES[2],))], ids=str)
@pytest.mark.parametrize("n", sampled([3, 40], (40).__eq__))
@pytest.mark.parametrize("half", [False, *elsewhere(*([True] if HALF in TUNINGS else []))])
def test_a_tile_of_another_shape_leaves_the_same_bits(
    runner: Runner, tile: Tile, n: int, half: bool
) -> None:
    """Matrices and experts, in the mapping of GPUs."""
    tuning = replace(PLAIN[0], half_tiles=half)
    assert tile != tuning.tile
    compare_bits(runner, tuning, replace(tuning, own_tile=tile), n)


@pytest.mark.skipif(not MATRIX.rounds_factors, reason="needs matrix units")
@pytest.mark.parametrize("n", sampled([3, 40], (40).__eq__))
@pytest.mark.parametrize(
    "forms", [(2, 2, 4), *elsewhere(((1, 1, 4),), ((4, 1, 4),), ((2, 4, 8),))], ids=str
)
def test_a_tile_of_other_matrices_leaves_the_same_bits(
    runner: Runner, forms: tuple[int, int, int], n: int
) -> None:
    """Matrices of a subgroup, by rows and columns, how many subgroups, and what is loaded ahead."""
    usual, (n_rows, n_columns, n_subgroups) = MATRIX.tile, forms
    size = n_subgroups * usual.subgroup_size
    of_subgroup = n_rows * usual.matrix_rows, n_columns * usual.matrix_columns
    other = Tile(size, size, *of_subgroup, *usual[4:8], 1 - usual.loads_ahead)
    assert other != usual
    compare_bits(runner, MATRIX, replace(MATRIX, matrix_tile=other), n)


def compare_bits(runner: Runner, tuning: Tuning, other: Tuning, n: int) -> None:
    """Compare products of `n` rows in two tunings: of a matrix, and of experts."""
    batch = rows(*range(n))
    tried: tuple[MatmulCase | ExpertMatmulCase, ...] = (
        MatmulCase(tuning, (("Q5_K", 77),), 512, batch),
        ExpertMatmulCase(tuning, ("Q4_K", "Q4_K"), 50, 256, batch, 4, 2),
        ExpertMatmulCase(tuning, ("Q8_0",), 50, 256, batch, 4, 2),
    )
    for case in tried:
        found = words(runner, replace(case, tuning=other))
        np.testing.assert_array_equal(found, words(runner, case))
