"""norm_residual against its twin: widths, parts and their norms, sizes where eps decides."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.test_router import TUNINGS
from vkmoe.gpu.program import Program, TensorRef, memory_range
from vkmoe.gpu.runner import Runner
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.norms import operations
from vkmoe.kernels.norms.cases import NormResidualCase
from vkmoe.kernels.norms.operations import NormedPart, NormOutput, norm_residual
from vkmoe.kernels.norms.twins import NormedRow
from vkmoe.kernels.norms.twins import norm_residual as twin
from vkmoe.kernels.rows import RowsCase
from vkmoe.kernels.tuning import Tuning

KINDS = ((False,), (True,), (True, True), (False, True), (True, False), (False, False))


@pytest.mark.parametrize("tuning", TUNINGS, ids=str)
def test_widths(runner: Runner, tuning: Tuning) -> None:
    """From less than a lane each to the widest; the rest of the tensors is NaN."""
    for width in (32, 256, 32 * 33, 2816, 8192):
        with Runner(runner.device) as other:
            NormResidualCase(tuning, width, (True, True), scaled=True).run(other).verify()


@pytest.mark.parametrize("normed", KINDS, ids=str)
@pytest.mark.parametrize("scaled", [False, True])
def test_parts(runner: Runner, normed: tuple[bool, ...], scaled: bool) -> None:
    case = NormResidualCase(TUNINGS[0], 2816, normed, scaled)
    case.run(runner).verify()
    RowsCase(case).run(runner).verify()


def test_rows_that_take_several_lines_of_workgroups(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the parts of 2,048 rows for 42 layers do; here of 4 rows and of 8."""
    monkeypatch.setattr(operations, "MAX_GROUPS", 3)
    RowsCase(NormResidualCase(TUNINGS[0], 96, (True, False))).run(runner).verify()


@pytest.mark.parametrize("size", [0.0, 1e-4, 1e4])
def test_eps(runner: Runner, size: float) -> None:
    """Where it decides, and where it must not be seen; of zeros hidden stays what it was."""
    NormResidualCase(TUNINGS[0], 96, (True, True), size=size, eps=1e-6).run(runner).verify()


def test_the_twin_does_as_stated() -> None:
    """With eps the mean square of [6, 8] is 4, and that of [3, 4] is 25."""
    values, half = np.array([6.0, 8.0]), np.array([0.5, 0.5])
    part = NormedRow(values, half)
    np.testing.assert_allclose(part.normed(-46.0), [1.5, 2.0])
    hidden, ones = np.array([1.0, 2.0]), np.ones(2)
    found = twin([NormedRow(values / 2, None)], hidden, ones, 2 * ones, 12.5, scale=10.0)
    np.testing.assert_allclose(found.hidden, [16.0, 28.0])
    np.testing.assert_allclose(found.gained, [32.0, 56.0])


def test_it_declares_what_it_touches() -> None:
    program, op_rows = Program("norm"), 3
    a, hidden, gained = (TensorRef(name, 3 * 100, 3) for name in ("a", "hidden", "gained"))
    partials = TensorRef("partials", 6, 3)
    op = OpContext(program, TUNINGS[0], "norm", n_rows=op_rows)
    output = NormOutput(hidden, gained, partials, 8192)
    assert norm_residual(op, [NormedPart(a, 1024)], 4096, output, 64, 1e-6, 512) == 1
    (dispatch,) = program.dispatches("norm")
    addresses = {memory_range(at, 256) for at in (1024, 4096, 8192)} | {memory_range(512, 4)}
    assert set(dispatch.reads) >= addresses | {a.rows(3, 0, 64).range, hidden.rows(3).range}
    assert set(dispatch.writes) == {tensor.rows(3).range for tensor in (hidden, gained, partials)}
    with pytest.raises(AssertionError):
        norm_residual(op, [], 4096, output, 64, 1e-6)
