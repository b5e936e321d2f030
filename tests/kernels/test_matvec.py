"""matvec and embed against their twins: types, shapes, tunings, and ids beyond the vocabulary."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.kernels.tunings import (
    MAPPINGS,
    SIZES,
    TYPES_AND_MAPPINGS,
    elsewhere,
    every_type,
    step_of,
    tuning_for,
)
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.runner import Runner
from vkmoe.kernels import inputs
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.inputs import WEIGHT_TYPES, random_rows
from vkmoe.kernels.matvec.cases import EmbedCase, MatvecCase, ResidualCase
from vkmoe.kernels.matvec.operations import Matrix, matvec
from vkmoe.kernels.tuning import Tuning
from vkmoe.quants.types import Bytes

CPU_TUNING = tuning_for("+blocks", 8, 4)
GPU_TUNING = tuning_for("", 32, 4)


def drawn_tuning(kind: str, suffix: str) -> Tuning:
    """Types and mappings together go through all workgroup sizes and all rows from 1 to 8."""
    i, j = WEIGHT_TYPES.index(kind), MAPPINGS.index(suffix)
    return tuning_for(suffix, SIZES[(i + j) % len(SIZES)], 1 + (3 * i + 2 * j) % 8)


def drawn_columns(kind: str, rng: np.random.Generator) -> int:
    """A few blocks, of either parity."""
    step = step_of(kind)
    return step * int(rng.integers(1, 2200 // step))


@pytest.mark.parametrize(("kind", "suffix"), TYPES_AND_MAPPINGS)
def test_random_shapes(runner: Runner, kind: str, suffix: str) -> None:
    """Three stacked matrices of odd heights behind a fused norm."""
    rng = np.random.default_rng([WEIGHT_TYPES.index(kind), len(suffix)])
    heights = [int(n) for n in rng.integers(1, 24, 3)]
    case = MatvecCase(
        drawn_tuning(kind, suffix),
        tuple((kind, n_rows) for n_rows in heights),
        drawn_columns(kind, rng),
        n_partials=int(rng.integers(1, 300)),
    )
    case.run(runner).verify()


@every_type
def test_residual(runner: Runner, kind: str) -> None:
    """The mappings take turns; vkmoe/selftest runs every one of them in every type."""
    i = WEIGHT_TYPES.index(kind)
    suffix = MAPPINGS[i % len(MAPPINGS)]
    tuning = tuning_for(suffix, SIZES[(i + 1) % len(SIZES)], 1 + (5 * i) % 8)
    rng = np.random.default_rng(i)
    ResidualCase(tuning, kind, int(rng.integers(1, 60)), drawn_columns(kind, rng)).run(
        runner
    ).verify()


@pytest.mark.parametrize("tuning", [CPU_TUNING, GPU_TUNING], ids=["blocks", "lanes"])
@pytest.mark.parametrize("kind", ["Q4_K", "F32", *elsewhere("Q6_K", "Q8_0")])
def test_one_block(runner: Runner, kind: str, tuning: Tuning) -> None:
    """Most lanes have nothing to do; one row in a workgroup of several."""
    MatvecCase(tuning, ((kind, 1),), step_of(kind)).run(runner).verify()


def groups_of(n_rows: int, rows: int) -> tuple[int, int, int]:
    """The workgroups of a matrix [n_rows, 256] that lies nowhere."""
    program, matrix = Program("wide"), Matrix("Q4_K", 256, n_rows, 256, 144)
    x, y = TensorRef("x", 256), TensorRef("y", n_rows)
    op = OpContext(program, Tuning("lanes", 32, rows, False), "logits")
    matvec(op, (matrix,), x, y)
    (dispatch,) = program.dispatches("logits")
    return dispatch.groups


def test_large_vocabularies_keep_to_the_limit_of_workgroups() -> None:
    """Vulkan promises 65535 workgroups in x; a vocabulary of 262144 makes 65536 of four rows."""
    assert groups_of(4 * 65535, 4) == (65535, 1, 1)
    assert groups_of(262144, 4) == (32768, 2, 1)
    for n_rows in (262145, 1000003, 1 << 24):
        x, y, z = groups_of(n_rows, 1)
        assert x <= 65535 and y <= 65535 and z == 1
        assert n_rows <= x * y < n_rows + y


@pytest.mark.parametrize("tuning", [CPU_TUNING, GPU_TUNING], ids=["blocks", "lanes"])
def test_workgroups_beyond_the_limit_go_on_in_y(
    runner: Runner, tuning: Tuning, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of five makes 11 workgroups three lines of four: the last has one too many."""
    monkeypatch.setattr("vkmoe.gpu.program.MAX_GROUPS", 5)
    MatvecCase(tuning, (("Q4_K", 30), ("Q4_K", 12)), 512, n_partials=5).run(runner).verify()
    with Runner(runner.device) as other:
        ResidualCase(tuning, "Q8_0", 42, 512).run(other).verify()


@pytest.mark.parametrize("tuning", [CPU_TUNING, GPU_TUNING], ids=["blocks", "lanes"])
def test_mixed_types_and_more_than_three_matrices(runner: Runner, tuning: Tuning) -> None:
    """Several dispatches write one output, each its own part of it."""
    segments = (("Q4_K", 5), ("Q6_K", 3), ("Q6_K", 4), ("Q6_K", 1), ("Q6_K", 7), ("F32", 2))
    MatvecCase(tuning, segments, 512, n_partials=7).run(runner).verify()


@pytest.mark.parametrize("workgroup_size", SIZES)
def test_with_and_without_subgroups(runner: Runner, workgroup_size: int) -> None:
    """Both ways to add over lanes, in workgroups of one subgroup and of many."""
    for suffix in [suffix for suffix in MAPPINGS if suffix in ("", "+subgroup")]:
        tuning = tuning_for(suffix, workgroup_size, 2)
        MatvecCase(tuning, (("Q5_K", 9),), 768, n_partials=200).run(runner).verify()


def damaged(kind: str, rows: Bytes, value: float) -> Bytes:
    """Rows 1 and 4 of file rows [6, row_bytes] with a scale or weight that is not finite."""
    half_at = {"Q4_K": 0, "Q5_K": 2, "Q6_K": 208, "Q8_0": 0, "F16": 6, "Q2_K": 82, "Q3_K": 108}
    half_at |= dict.fromkeys(
        ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q1_0", "Q2_0", "IQ4_NL", "IQ4_XS"), 0
    )
    half_at |= dict.fromkeys(("IQ3_XXS", "IQ3_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S"), 0)
    half_at |= {"TQ1_0": 52, "TQ2_0": 64}
    rows = rows.copy()
    for row in (1, 4):
        if kind in half_at:
            at = half_at[kind]
            rows[row, at : at + 2] = np.array([value], "<f2").view(np.uint8)
        elif kind == "MXFP4":
            rows[row, 0] = 255  # too large for float32 but for the values 0 and 1/2
        elif kind == "IQ1_M":  # has four bits of its scale in each of four words
            half, scales = int(np.array(value, "<f2").view(np.uint16)), rows[row, 48:56].view("<u2")
            scales[:] = scales & 0xFFF | [(half >> 4 * i & 0xF) << 12 for i in range(4)]
        elif kind == "NVFP4":
            rows[row, :4] = 0x7F  # not a number, which is 0
        else:
            bits = np.array([value], "<f4").view(np.uint8)
            width = 4 if kind == "F32" else 2
            rows[row, 8 : 8 + width] = bits[-width:]
    return rows


@pytest.mark.parametrize("value", [np.nan, np.inf], ids=["nan", "inf"])
@every_type
def test_damaged_rows_leave_their_neighbours_alone(runner: Runner, kind: str, value: float) -> None:
    """Rows of one workgroup share lanes and registers, but no value."""
    rows = damaged(kind, random_rows(kind, 6, 512, np.random.default_rng(3)), value)
    tuning = CPU_TUNING if value == np.inf else GPU_TUNING
    with np.errstate(invalid="ignore"):
        checks = MatvecCase(tuning, ((kind, 6),), 512, file_rows=(rows,)).run(runner)
    checks.verify()
    assert checks.n_left_out == (0 if kind == "NVFP4" else 2)


@pytest.mark.parametrize("tuning", [CPU_TUNING, GPU_TUNING], ids=["blocks", "lanes"])
def test_every_exponent_of_mxfp4(runner: Runner, tuning: Tuning) -> None:
    """From 2, below which a device may take weights for zero, to where no sum overflows.

    Every code is in every row: the least is a subnormal float16 on its way.
    """
    exponents = range(2, 245)
    rows = random_rows("MXFP4", len(exponents), 160, np.random.default_rng(5))
    blocks = rows.reshape(len(exponents), 5, 17)
    blocks[:, :, 0] = np.array(exponents, np.uint8)[:, None]
    blocks[:, 0, 1:] = np.arange(16, dtype=np.uint8) * 17
    case = MatvecCase(tuning, (("MXFP4", len(exponents)),), 160, file_rows=(rows,))
    checks = case.run(runner)
    checks.verify()
    assert checks.n_left_out == 0


def test_the_same_bits_twice_and_in_any_company(runner: Runner) -> None:
    """A row's sum does not depend on the rows beside it, nor on the run."""
    rows = random_rows("Q4_K", 12, 1024, np.random.default_rng(4))
    case = MatvecCase(CPU_TUNING, (("Q4_K", 12),), 1024, file_rows=(rows,))
    (words,) = case.words(runner)
    np.testing.assert_array_equal(words, case.words(runner)[0])
    alone = replace(case, segments=(("Q4_K", 5),), file_rows=(rows[7:],))
    with Runner(runner.device) as other:
        np.testing.assert_array_equal(alone.words(other)[0], words[7:])


CLAMPED = (0, 5, 6, 7, 1 << 20, 0xFFFFFFFF)  # of 7: the last three are clamped


@every_type
def test_embedded_rows_and_clamped_tokens(runner: Runner, kind: str) -> None:
    """The workgroup sizes take turns; the last workgroup is not full."""
    i = WEIGHT_TYPES.index(kind)
    tuning = Tuning("lanes", SIZES[i % len(SIZES)], 4, False)
    columns = step_of(kind) * (3 + 2 * (i % 9))
    EmbedCase(tuning, kind, 7, columns, CLAMPED).run(runner).verify()


@every_type
def test_embedded_rows_with_a_scale(runner: Runner, kind: str) -> None:
    """What is left for the next norm has it, too."""
    EmbedCase(Tuning("lanes", 64, 4, False), kind, 3, 512, (1,), 53.0659966).run(runner).verify()


@pytest.mark.parametrize("workgroup_size", SIZES)
def test_workgroup_sizes_of_embed(runner: Runner, workgroup_size: int) -> None:
    tuning = Tuning("blocks", workgroup_size, 8, False)
    EmbedCase(tuning, "Q6_K", 3, 1536, (2,)).run(runner).verify()


def test_a_vocabulary_of_one(runner: Runner) -> None:
    EmbedCase(Tuning("blocks", 8, 8, False), "F32", 1, 32, (0, 1)).run(runner).verify()


@every_type
def test_large_matrices_repeat_their_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few = random_rows(kind, 3, 256, np.random.default_rng(1))
    monkeypatch.setattr(inputs, "DISTINCT_BYTES", 3 * few.shape[1])
    many = random_rows(kind, 8, 256, np.random.default_rng(1))
    np.testing.assert_array_equal(many, np.concatenate([few, few, few])[:8])
