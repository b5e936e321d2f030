"""The candidates against their twins, exactly but for the sums; caps of logits before them, finish
behind everything else.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from vkmoe.gpu.hazards import plan_barriers
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.runner import Runner
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.inputs import PARAMS
from vkmoe.kernels.logits.cases import CandidatesCase, FinishCase, PickCase, SoftCapCase
from vkmoe.kernels.logits.operations import CANDIDATE_WORDS, candidates, finish, list_words
from vkmoe.kernels.logits.twins import soft_cap as soft_cap_twin
from vkmoe.kernels.tuning import Tuning

CPU_TUNING = Tuning("blocks", 8, 1, False)
GPU_TUNING = Tuning("lanes", 64, 4, True)
Logits = NDArray[np.float32]


@pytest.mark.parametrize(
    "tuning", [CPU_TUNING, GPU_TUNING, Tuning("blocks", 16, 1, False)], ids=["8", "64", "16"]
)
@pytest.mark.parametrize("n_vocab", [1, 32, 65, 1000, 4099, 30011])
def test_random_logits(runner: Runner, tuning: Tuning, n_vocab: int) -> None:
    CandidatesCase(tuning, n_vocab).run(runner).verify()


@pytest.mark.parametrize("tuning", [CPU_TUNING, GPU_TUNING], ids=["8", "64"])
@pytest.mark.parametrize(("n_vocab", "cap"), [(1, 30.0), (65, 0.5), (4099, 30.0), (100_003, 50.0)])
@pytest.mark.sample(5)
def test_soft_caps(runner: Runner, tuning: Tuning, n_vocab: int, cap: float) -> None:
    SoftCapCase(tuning, n_vocab, cap).run(runner).verify()


def test_the_twin_caps_as_stated() -> None:
    """Nearly the identity where logits are small, the cap where they are large."""
    found = soft_cap_twin(np.array([0.01, -1e6, np.inf, 30.0, np.nan], np.float32), 30.0)
    np.testing.assert_allclose(found, [0.01, -30.0, 30.0, 30.0 * np.tanh(1.0), np.nan], rtol=1e-6)


def awkward_logits(kind: str, n_vocab: int) -> Logits:
    values = np.random.default_rng(2).normal(0, 4, n_vocab).astype(np.float32)
    if kind == "ascending":
        return np.sort(values)
    if kind == "descending":
        return np.sort(values)[::-1].copy()
    if kind == "constant":
        return np.full(n_vocab, -1.5, np.float32)
    if kind == "all NaN":
        return np.full(n_vocab, np.nan, np.float32)
    if kind == "few finite":
        values[:] = -np.inf
        values[[7, n_vocab - 1]] = -3.0, 2.0
    elif kind == "some NaN":
        values[::3] = np.nan
    elif kind == "negative NaN":
        values.view(np.uint32)[5] = 0xFFC00001
    elif kind == "infinite":
        values[[3, 1700]] = np.inf
    elif kind == "signed zeros":
        values = np.where(np.arange(n_vocab) % 2, np.float32(-0.0), np.float32(0.0))
    elif kind == "coarse":  # many ties, also across the edge of the 64
        values = np.round(values * 0.5)
    elif kind == "denormal":
        values = (np.arange(n_vocab) % 97).astype(np.uint32).view(np.float32)
    return values.astype(np.float32)


KINDS = [
    "ascending",
    "descending",
    "constant",
    "all NaN",
    "few finite",
    "some NaN",
    "negative NaN",
    "infinite",
    "signed zeros",
    "coarse",
    "denormal",
]


@pytest.mark.parametrize("kind", KINDS)
def test_awkward_logits(runner: Runner, kind: str) -> None:
    CandidatesCase(CPU_TUNING, 2500, (awkward_logits(kind, 2500),)).run(runner).verify()


def test_a_second_run_leaves_the_same_bits(runner: Runner) -> None:
    case = CandidatesCase(CPU_TUNING, 1333, (awkward_logits("coarse", 1333),))
    for found, again in zip(case.words(runner), case.words(runner), strict=True):
        np.testing.assert_array_equal(found, again)


def test_finish_writes_word_0_only(runner: Runner) -> None:
    FinishCase((1, 0xFFFFFFFF)).run(runner).verify()


def test_a_barrier_stands_before_finish() -> None:
    """Also when the last writer shares no tensor with it."""
    tuning = Tuning("blocks", 8, 1, False)
    program = Program("finish")
    candidates(
        OpContext(program, tuning, "candidates"),
        TensorRef("logits", 100),
        100,
        TensorRef("lists", list_words(tuning, 100)),
        TensorRef("candidates", CANDIDATE_WORDS),
    )
    finish(program, PARAMS, TensorRef("log", 9))
    assert plan_barriers(program.commands)[-1]


@pytest.mark.parametrize(("n_rows", "width"), [(2, 4), (33, 2048), (6, 260)])
def test_rows_that_want_logits_are_picked_in_order(runner: Runner, n_rows: int, width: int) -> None:
    PickCase(CPU_TUNING, n_rows, width).run(runner).verify()
