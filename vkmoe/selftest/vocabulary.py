"""Compares both kernels of candidates, and finish, with their twins."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.runner import SENTINEL, Runner
from vkmoe.ops.candidates import (
    CANDIDATE_WORDS,
    IDS_AT,
    LIST_WORDS,
    LOGITS_AT,
    CandidatesReader,
    candidates,
    finish,
    list_words,
    n_lists,
)
from vkmoe.ops.context import OpContext
from vkmoe.ops.tuning import Tuning
from vkmoe.reference.candidates import candidates as candidates_twin
from vkmoe.reference.candidates import candidates_partial as partial_twin
from vkmoe.reference.finish import finish as finish_twin
from vkmoe.selftest.comparison import Checks
from vkmoe.selftest.inputs import PARAMS, params_words

__all__ = ["CandidatesCase", "FinishCase"]

Logits = NDArray[np.float32]
NO_ID, NO_LOGIT = 0xFFFFFFFF, -np.inf  # behind the last entry


class CandidatesCase:
    """Checks the 64 largest of `n_vocab` logits: lists per chunk, then their merge."""

    def __init__(self, runner: Runner, tuning: Tuning, n_vocab: int) -> None:
        self._runner, self._n_vocab = runner, n_vocab
        self._n_lists = n_lists(tuning, n_vocab)
        self.logits = TensorRef("logits", n_vocab + 3)
        self.lists = TensorRef("lists", list_words(tuning, n_vocab))
        self.output = TensorRef("candidates", CANDIDATE_WORDS)
        self._program = Program("candidates")
        op = OpContext(self._program, tuning, "candidates")
        candidates(op, self.logits, n_vocab, self.lists, self.output)

    def run(self, logits: Logits, checks: Checks) -> NDArray[np.uint32]:
        """Compare lists and output; returns the output's words."""
        lists, output = self._runner.run(
            self._program, {self.logits: logits}, self.lists, self.output
        )
        twins = partial_twin(logits, self._n_lists)
        for found, twin in zip(lists.reshape(-1, LIST_WORDS), twins, strict=True):
            _entries(checks, "list", found, int(found[2]), twin.ids, twin.logits)
            maximum, total = found[:2].view(np.float32).astype(np.float64)
            _sum(checks, "sum of a list", maximum + np.log(total), twin.log_sum_exp)
        wanted, result = candidates_twin(logits), CandidatesReader(output, self._n_vocab).read()
        _entries(checks, "candidates", output, len(result.ids), wanted.ids, wanted.logits)
        _sum(checks, "log-sum-exp", result.log_sum_exp, wanted.log_sum_exp)
        checks.equal("NaN flag", np.array(result.has_nan), np.array(wanted.has_nan))
        return output

    def random_logits(self, seed: int = 1) -> Logits:
        """Draw float32 [n_vocab]."""
        return np.random.default_rng(seed).normal(0, 4, self._n_vocab).astype(np.float32)


def _entries(
    checks: Checks,
    what: str,
    words: NDArray[np.uint32],
    count: int,
    ids: NDArray[np.int32],
    logits: Logits,
) -> None:
    """Compare ids and logits in order, exactly; words behind them say that nothing is there."""
    wanted_ids = np.full(LOGITS_AT - IDS_AT, NO_ID, np.int64)
    wanted_logits = np.full(LIST_WORDS - LOGITS_AT, NO_LOGIT, np.float32)
    wanted_ids[: len(ids)], wanted_logits[: len(ids)] = ids, logits
    checks.equal(f"{what}: count", np.array(count), np.array(len(ids)))
    checks.equal(f"{what}: ids", words[IDS_AT:LOGITS_AT].astype(np.int64), wanted_ids)
    checks.equal(f"{what}: logits", words[LOGITS_AT:LIST_WORDS].view(np.float32), wanted_logits)


def _sum(checks: Checks, what: str, found: float, wanted: float) -> None:
    checks.close(what, np.array(found), np.array(wanted), 1.0 + abs(wanted))


class FinishCase:
    """Checks that finish leaves the serial number in word 0 of the log, nothing elsewhere."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.log = TensorRef("log", 9)
        self._program = Program("finish")
        finish(self._program, PARAMS, self.log)

    def run(self, serial: int, checks: Checks) -> None:
        before = np.full(self.log.n_words, SENTINEL, np.uint32)
        (after,) = self._runner.run(self._program, {PARAMS: params_words(serial=serial)}, self.log)
        checks.equal("log", after, finish_twin(before, serial))
