"""candidates_partial and candidates_merge against their twins, exactly but for the sums."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.ops.replay import Replay
from vkmoe.gpu.device import Device
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.ops.candidates import CANDIDATE_WORDS, candidates, list_words, n_lists
from vkmoe.ops.tuning import Tuning
from vkmoe.reference.candidates import candidates as candidates_twin
from vkmoe.reference.candidates import candidates_partial as partial_twin
from vkmoe.reference.candidates import read_candidates

OUTPUT = TensorRef("candidates", CANDIDATE_WORDS)
CPU_TUNING = Tuning("blocks", 8, 1, False)
GPU_TUNING = Tuning("lanes", 64, 4, True)
LIST_WORDS = 132
Logits = NDArray[np.float32]


def replay(device: Device, tuning: Tuning, n_vocab: int) -> tuple[Replay, TensorRef, TensorRef]:
    """A recorded program, its logits tensor (with room to spare) and its lists tensor."""
    logits = TensorRef("logits", n_vocab + 3)
    lists = TensorRef("lists", list_words(tuning, n_vocab))
    program = Program("candidates")
    candidates(program, tuning, logits, n_vocab, lists, OUTPUT, "candidates")
    return Replay(device, program), logits, lists


def random_logits(n_vocab: int, seed: int = 1) -> Logits:
    return np.random.default_rng(seed).normal(0, 4, n_vocab).astype(np.float32)


def check(words: NDArray[np.uint32], logits: Logits) -> None:
    """Ids, order and logits exactly; the log-sum-exp within rounding."""
    found, wanted = read_candidates(words), candidates_twin(logits)
    np.testing.assert_array_equal(found.ids, wanted.ids)
    np.testing.assert_array_equal(found.logits, wanted.logits)
    assert found.has_nan == wanted.has_nan
    assert found.log_sum_exp == pytest.approx(wanted.log_sum_exp, rel=2e-6, abs=1e-5)
    rest = slice(4 + len(found.ids), 68)
    assert np.all(words[rest] == 0xFFFFFFFF)
    assert np.all(words[68 + len(found.ids):].view(np.float32) == -np.inf)


@pytest.mark.parametrize("tuning", [CPU_TUNING, GPU_TUNING, Tuning("blocks", 16, 1, False)],
                         ids=["8", "64", "16"])
@pytest.mark.parametrize("n_vocab", [1, 32, 65, 1000, 4099, 30011])
def test_random_logits(device: Device, tuning: Tuning, n_vocab: int) -> None:
    run, logits, _ = replay(device, tuning, n_vocab)
    values = random_logits(n_vocab)
    check(run.run({logits: values}, OUTPUT)[0], values)


def awkward_logits(kind: str, n_vocab: int) -> Logits:
    values = random_logits(n_vocab, seed=2)
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


KINDS = ["ascending", "descending", "constant", "all NaN", "few finite", "some NaN", "negative NaN",
         "infinite", "signed zeros", "coarse", "denormal"]


@pytest.mark.parametrize("kind", KINDS)
def test_awkward_logits(device: Device, kind: str) -> None:
    run, logits, _ = replay(device, CPU_TUNING, 2500)
    values = awkward_logits(kind, 2500)
    check(run.run({logits: values}, OUTPUT)[0], values)


def test_lists_of_the_first_kernel(device: Device) -> None:
    """Each chunk's list is descending and complete, and the second run leaves the same bits."""
    n_vocab = 1333
    run, logits, lists = replay(device, CPU_TUNING, n_vocab)
    values = awkward_logits("coarse", n_vocab)
    words, again = (run.run({logits: values}, lists)[0] for _ in range(2))
    np.testing.assert_array_equal(words, again)
    twins = partial_twin(values, n_lists(CPU_TUNING, n_vocab))
    for found, wanted in zip(words.reshape(-1, LIST_WORDS), twins, strict=True):
        assert found[2] == len(wanted.ids)
        np.testing.assert_array_equal(found[4:4 + len(wanted.ids)], wanted.ids)
        np.testing.assert_array_equal(
            found[68:68 + len(wanted.ids)].view(np.float32), wanted.logits)
        maximum, total = found[:2].view(np.float32).astype(np.float64)
        assert maximum + np.log(total) == pytest.approx(wanted.log_sum_exp, abs=1e-5)
