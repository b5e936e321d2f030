"""Stacks of one matrix per head, and biases: what matvec does besides one matrix times x."""

from __future__ import annotations

import pytest

from tests.kernels.tunings import MAPPINGS, SIZES, tuning_for
from vkmoe.gpu.program import MEMORY, Program, Range, TensorRef
from vkmoe.gpu.runner import Runner
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.matvec.cases import MatvecCase, ResidualCase
from vkmoe.kernels.matvec.operations import Matrix, matvec, matvec_heads, matvec_residual
from vkmoe.kernels.norms.operations import NormOutput
from vkmoe.kernels.tuning import Tuning

CPU_TUNING, GPU_TUNING = tuning_for(MAPPINGS[-1], 8, 4), tuning_for("", 32, 4)
both_mappings = pytest.mark.parametrize("tuning", [CPU_TUNING, GPU_TUNING], ids=["blocks", "lanes"])
KINDS = ("F16", "Q8_0", "Q4_K", "Q6_K")


@pytest.mark.parametrize("suffix", MAPPINGS)
def test_heads(runner: Runner, suffix: str) -> None:
    """The last workgroup of a head has fewer rows than it could. The self-test has all types."""
    i = MAPPINGS.index(suffix)
    tuning = tuning_for(suffix, SIZES[i], 3 + i)
    segments = ((KINDS[i], 7 + 5 * i),)
    MatvecCase(tuning, segments, 512, n_heads=2 + 4 * i, gap=4 * i).run(runner).verify()


@both_mappings
def test_shapes_of_deepseek(runner: Runner, tuning: Tuning) -> None:
    """k_b reads the first 128 of a head's 192 values, v_b a latent vector of 512 per head."""
    MatvecCase(tuning, (("Q8_0", 512),), 128, n_heads=5, gap=64).run(runner).verify()
    with Runner(runner.device) as other:
        MatvecCase(tuning, (("Q4_K", 128),), 512, n_heads=3).run(other).verify()


def test_heads_declare_what_they_touch() -> None:
    """The parts of x from the first head's to the last's, all of y, and the stack."""
    program, stack = Program("heads"), Matrix("F16", 512, 12, 32, 64)
    x, y = TensorRef("x", 200), TensorRef("y", 20)
    op = OpContext(program, GPU_TUNING, "heads")
    matvec_heads(op, stack, 3, x, 48, y)
    (dispatch,) = program.dispatches("heads")
    assert dispatch.groups == (1, 3, 1)
    assert dispatch.writes == (y.words(0, 12),)
    assert set(dispatch.reads) == {x.words(0, 2 * 48 + 32), x.words(0, 0), stack.memory}


def test_parts_of_x_lie_at_whole_vectors() -> None:
    stack, x, y = Matrix("F16", 512, 12, 32, 64), TensorRef("x", 200), TensorRef("y", 20)
    op = OpContext(Program("heads"), GPU_TUNING, "heads")
    with pytest.raises(AssertionError):
        matvec_heads(op, stack, 3, x, 46, y)


@both_mappings
@pytest.mark.parametrize("n_partials", [0, 5])
def test_biases_of_several_dispatches(runner: Runner, tuning: Tuning, n_partials: int) -> None:
    """Five matrices of two types take three dispatches; each adds its own part of the biases."""
    segments = (("Q4_K", 5), ("Q6_K", 3), ("Q6_K", 4), ("Q6_K", 1), ("Q6_K", 7))
    MatvecCase(tuning, segments, 512, n_partials, biased=True).run(runner).verify()


@both_mappings
def test_biases_of_a_residual(runner: Runner, tuning: Tuning) -> None:
    ResidualCase(tuning, "Q8_0", 21, 512, biased=True).run(runner).verify()


def test_biases_are_read_where_they_are() -> None:
    """The ranges of memory that barriers are computed from hold each dispatch's own biases."""
    program, x, y = Program("biases"), TensorRef("x", 256), TensorRef("y", 64)
    matrices = (Matrix("F16", 4096, 6, 32, 64), Matrix("F32", 8192, 9, 32, 128))
    op = OpContext(program, GPU_TUNING)
    matvec(op.named("qkv"), matrices, x, y, bias=1000)
    output = NormOutput(y, x, TensorRef("partials", 9), 2048)
    matvec_residual(op.named("output"), matrices[1], x, output, bias=3000)
    first, second, third = (command for command in program.dispatches(""))
    assert Range(MEMORY, 1000, 1024) in first.reads
    assert Range(MEMORY, 1024, 1060) in second.reads
    assert Range(MEMORY, 3000, 3036) in third.reads
