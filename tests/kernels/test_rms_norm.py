"""rms_norm against its twin: widths that fill a workgroup and that do not, far from 1 in size."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.test_router import TUNINGS
from vkmoe.gpu.program import Program, TensorRef, memory_range
from vkmoe.gpu.runner import Runner
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.norms.cases import RmsNormCase
from vkmoe.kernels.norms.operations import rms_norm
from vkmoe.kernels.norms.twins import rms_norm as twin
from vkmoe.kernels.tuning import Tuning


@pytest.mark.parametrize("tuning", TUNINGS, ids=str)
def test_widths(runner: Runner, tuning: Tuning) -> None:
    """The rest of the tensor is NaN."""
    for width in (1, 7, 64, 1536):
        with Runner(runner.device) as other:
            RmsNormCase(tuning, width).run(other).verify()


@pytest.mark.parametrize("size", [0.0, 1e-4, 1e4])
def test_eps(runner: Runner, size: float) -> None:
    """Where it decides, and where it must not be seen; zeros stay zeros."""
    RmsNormCase(TUNINGS[0], 100, size=size, eps=1e-6).run(runner).verify()


def test_the_twin_normalises_as_stated() -> None:
    found = twin(np.array([3.0, 4.0]), np.array([1.0, 0.5]), 12.5)
    np.testing.assert_allclose(found, [0.6, 0.4])


def test_it_declares_what_it_touches() -> None:
    program, x, y = Program("norm"), TensorRef("x", 100), TensorRef("y", 80)
    op = OpContext(program, TUNINGS[0], "norm")
    rms_norm(op, x, y, 64, 4096, 1e-6)
    (dispatch,) = program.dispatches("norm")
    assert set(dispatch.reads) == {x.words(0, 64), memory_range(4096, 256)}
    assert dispatch.writes == (y.words(0, 64),)
    with pytest.raises(AssertionError):
        rms_norm(op, x, y, 81, 4096, 1e-6)
