"""Compares pick_rows, soft_cap, both kernels of candidates, and finish with their twins.

Ids, logits and logs must be equal; sums and capped logits are within rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice

import numpy as np
from numpy.typing import NDArray

from vkmoe.batch import TokenBatch
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.runner import SENTINEL, Runner
from vkmoe.gpu.token_io import pack_params, param_words
from vkmoe.kernels.comparison import Checks, KernelCase, Prepared, Words
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.family import Family, Setting, Setup, Trial, Used, Work, trial
from vkmoe.kernels.inputs import PARAMS, normal, params_words
from vkmoe.kernels.logits import twins
from vkmoe.kernels.logits.operations import (
    CANDIDATE_WORDS,
    IDS_AT,
    LIST_WORDS,
    LOGITS_AT,
    N_CANDIDATES,
    CandidatesReader,
    candidates,
    finish,
    list_words,
    n_lists,
    pick_rows,
    soft_cap,
)
from vkmoe.kernels.rows import ALL, N_DRAWN, RowBatch, RowCase, Rowed, RowsCase
from vkmoe.kernels.tuning import Tuning

NO_ID, NO_LOGIT = 0xFFFFFFFF, -np.inf  # behind the last entry of a list

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class SoftCapCase(RowCase):
    """Checks caps of logits of all sizes, some infinite, some NaN; `cap` is a float32."""

    tuning: Tuning
    n_vocab: int
    cap: float = 30.0

    def append(self, runner: Runner, op: OpContext, batch: RowBatch) -> Rowed:
        logits = batch.tensor("logits", self.n_vocab + 3)
        soft_cap(op, logits, self.n_vocab, self.cap)
        rows = np.array([self._draw(row) for row in ALL])

        def compare(row: int, checks: Checks, words: Sequence[Words]) -> None:
            found, wanted = words[0][:-3].view(np.float32), twins.soft_cap(rows[row], self.cap)
            checks.equal("NaN", np.isnan(found), np.isnan(wanted))
            checks.close_where_finite("logits", found, wanted, np.abs(wanted) + 1e-30)
            checks.untouched("the words behind", words[0][-3:])

        return Rowed({logits: rows}, (logits,), compare)

    def _draw(self, seed: int) -> Logits:
        """Draw float32 [n_vocab]: half about as large as the cap, half from 1e-9 to 1e9 of it."""
        rng = np.random.default_rng([9, seed])
        n, powers = self.n_vocab, rng.uniform(-9, 9, self.n_vocab)
        sizes = np.where(rng.random(n) < 0.5, 1.0, 10**powers)
        drawn = (self.cap * sizes * rng.normal(0, 1, n)).astype(np.float32)
        for at, odd in enumerate((np.inf, -np.inf, np.nan, 0.0, 3e38, -3e38)):
            drawn[7 * at + seed :: 997] = odd
        return drawn


@dataclass(frozen=True)
class CandidatesCase(RowCase):
    """Checks the 64 largest of `n_vocab` logits: lists per chunk, then their merge.

    Without `logits`, random ones are taken, and some with ties.
    """

    tuning: Tuning
    n_vocab: int
    logits: tuple[Logits, ...] = ()

    @property
    def n_compared(self) -> int:
        return len(self.logits) or 2

    def append(self, runner: Runner, op: OpContext, batch: RowBatch) -> Rowed:
        logits = batch.tensor("logits", self.n_vocab + 3)
        lists = batch.tensor("lists", list_words(self.tuning, self.n_vocab))
        output = batch.tensor("candidates", CANDIDATE_WORDS)
        candidates(op, logits, self.n_vocab, lists, output)
        random = [normal(4, self.n_vocab, row) for row in ALL]
        drawn = self.logits or [
            (one * 0.5).round() if row % 2 else one for row, one in enumerate(random)
        ]
        rows = np.array([*islice(cycle(drawn), max(N_DRAWN, len(drawn)))])

        def compare(row: int, checks: Checks, words: Sequence[Words]) -> None:
            self._compare(rows[row], checks, words)

        return Rowed({logits: rows}, (lists, output), compare)

    def _compare(self, logits: Logits, checks: Checks, words: Sequence[Words]) -> None:
        lists, output = words
        parts = twins.candidates_partial(logits, n_lists(self.tuning, self.n_vocab))
        for found, part in zip(lists.reshape(-1, LIST_WORDS), parts, strict=True):
            _compare_entries(checks, "list", found, int(found[2]), part.ids, part.logits)
            maximum, total = found[:2].view(np.float32).astype(np.float64)
            _compare_sums(checks, "sum of a list", maximum + np.log(total), part.log_sum_exp)
        wanted, result = twins.candidates(logits), CandidatesReader(output, self.n_vocab).read()
        _compare_entries(checks, "candidates", output, len(result.ids), wanted.ids, wanted.logits)
        _compare_sums(checks, "log-sum-exp", result.log_sum_exp, wanted.log_sum_exp)
        checks.equal("NaN flag", np.array(result.has_nan), np.array(wanted.has_nan))


def _compare_entries(
    checks: Checks, what: str, words: Words, count: int, ids: NDArray[np.int32], logits: Logits
) -> None:
    """Compare ids and logits in order, exactly; words behind them say that nothing is there."""
    wanted_ids = np.full(LOGITS_AT - IDS_AT, NO_ID, np.int64)
    wanted_logits = np.full(LIST_WORDS - LOGITS_AT, NO_LOGIT, np.float32)
    wanted_ids[: len(ids)], wanted_logits[: len(ids)] = ids, logits
    checks.equal(f"{what}: count", np.array(count), np.array(len(ids)))
    checks.equal(f"{what}: ids", words[IDS_AT:LOGITS_AT].astype(np.int64), wanted_ids)
    checks.equal(f"{what}: logits", words[LOGITS_AT:LIST_WORDS].view(np.float32), wanted_logits)


def _compare_sums(checks: Checks, what: str, found: float, wanted: float) -> None:
    checks.close(what, np.array(found), np.array(wanted), 1.0 + abs(wanted))


@dataclass(frozen=True)
class FinishCase(KernelCase):
    """Checks that finish leaves its proof in two words of the log, nothing elsewhere.

    Each serial comes after another, and as the fifth of its run.
    """

    serials: tuple[int, ...]

    def prepare(self, runner: Runner) -> Prepared:
        log, program = TensorRef("log", 9), Program("finish")
        finish(program, PARAMS, log)

        def compare(serial: int, before: Words, checks: Checks, words: Sequence[Words]) -> None:
            checks.equal("log", words[0], twins.finish(before, serial))

        rounds = []
        for serial in self.serials:
            other = np.full(log.n_words, SENTINEL, np.uint32)
            same = np.concatenate([[np.uint32(serial), np.uint32(4)], other[2:]])
            for before in (other, same):
                inputs = {PARAMS: params_words(serial=serial), log: before}
                rounds.append((inputs, partial(compare, serial, before)))
        return Prepared(program, (log,), rounds)


EMPTIEST = FinishCase((1,))  # one workgroup, which stores one word


@dataclass(frozen=True)
class PickCase(KernelCase):
    """Checks which rows of a batch pick_rows takes: every third one of `n_rows` wants logits.

    Of those the head runs for the `first` and all behind it.
    """

    tuning: Tuning
    n_rows: int
    width: int
    first: int = 0

    def prepare(self, runner: Runner) -> Prepared:
        n_rows, width = self.n_rows, self.width
        wants = tuple(row % 3 == 1 for row in range(n_rows))
        zeros, n_picked = (0,) * n_rows, sum(wants) - self.first
        x = TensorRef("x", n_rows * (width + 8), n_rows)
        y = TensorRef("y", (n_picked + 1) * (width + 4), n_picked + 1)
        params, program = TensorRef("params", param_words(n_rows)), Program("pick")
        op = OpContext(program, self.tuning, "pick", n_rows=n_picked)
        pick_rows(op, x, y, width, params)
        rows = normal(1, n_rows * (width + 8), seed=5).reshape(n_rows, -1)
        words = np.zeros(params.n_words, np.uint32)
        batch = TokenBatch(zeros, zeros, zeros, wants, "prompt")
        pack_params(words.data, batch, 0, serial=1, first_picked=self.first)

        def compare(checks: Checks, words: Sequence[Words]) -> None:
            found = words[0].reshape(n_picked + 1, -1)
            wanted = twins.pick_rows(rows[:, :width], wants)[self.first :]
            checks.equal("picked rows", found[:-1, :width].view(np.float32), wanted)
            checks.untouched("what is between rows", found[:-1, width:])
            checks.untouched("the row behind them", found[-1])

        return Prepared(program, (y,), [({x: rows.reshape(-1), params: words}, compare)])


# ----- what is compared -----


def _soft_cap(setting: Setting) -> Iterator[Trial]:
    case = SoftCapCase(setting.tuning, 3001)
    yield trial(case, SoftCapCase(setting.tuning, 77_777, 2.5), RowsCase(case))


def _candidates(setting: Setting) -> Iterator[Trial]:
    rows = RowsCase(CandidatesCase(setting.tuning, 1801))
    yield trial(CandidatesCase(setting.tuning, 5003), rows)


def _pick_rows(setting: Setting) -> Iterator[Trial]:
    sizes = ((17, 516), (17, 516, 3), (2, 4))
    yield trial(*(PickCase(setting.tuning, *size) for size in sizes))


def _finish(setting: Setting) -> Iterator[Trial]:
    yield trial(FinishCase((0xFFFFFFFF,)))


# ----- what a model uses -----


MOST_PROBED = 8192  # logits, of more than as many


def _probed_vocab(used: Used) -> int:
    """Cut the logits; as many are behind whole chunks as of all."""
    n_vocab = int(used.numbers["n_vocab"])
    return n_vocab if n_vocab < 2 * MOST_PROBED else MOST_PROBED + n_vocab % MOST_PROBED


def _soft_cap_probe(used: Used) -> SoftCapCase:
    return SoftCapCase(used.tuning, _probed_vocab(used), used.numbers["cap"])


def _candidates_probe(used: Used) -> CandidatesCase:
    return CandidatesCase(used.tuning, _probed_vocab(used))


def _merge_probe(used: Used) -> CandidatesCase:
    """Merge as many lists as the model has."""
    return CandidatesCase(used.tuning, 2 * N_CANDIDATES * used.numbers["n_lists"] + 77)


def _pick_rows_probe(used: Used) -> PickCase:
    return PickCase(used.tuning, 17, 4 * used.numbers["row_vec4s"])


def _finish_probe(used: Used) -> FinishCase:
    return FinishCase((7,))


# ----- what is measured -----


def _soft_cap_works(setup: Setup) -> Iterator[Work]:
    n_vocab = setup.shapes.n_vocab
    case = SoftCapCase(setup.tuning, n_vocab)

    yield Work(f"soft cap of {n_vocab}", 8 * n_vocab, case.run)


def _candidates_works(setup: Setup) -> Iterator[Work]:
    n_vocab, tuning = setup.shapes.n_vocab, setup.tuning

    merges = setup.variant.family == "candidates_merge"
    n_words = list_words(tuning, n_vocab) if merges else n_vocab
    yield Work(f"candidates of {n_vocab}", 4 * n_words, CandidatesCase(tuning, n_vocab).run)


def _pick_rows_works(setup: Setup) -> Iterator[Work]:
    width, n_rows = setup.shapes.width, 24  # of which 8 want logits
    case = PickCase(setup.tuning, n_rows, width)
    yield Work(f"8 of {n_rows} rows of {width}", 4 * 8 * width, case.run)


def _finish_works(setup: Setup) -> Iterator[Work]:
    yield Work("one word", 0, EMPTIEST.run)


FAMILIES = {
    "soft_cap": Family(_soft_cap, _soft_cap_works, probe=_soft_cap_probe),
    "candidates_partial": Family(_candidates, _candidates_works, probe=_candidates_probe),
    "candidates_merge": Family(_candidates, _candidates_works, probe=_merge_probe),
    "pick_rows": Family(_pick_rows, _pick_rows_works, probe=_pick_rows_probe),
    "finish": Family(_finish, _finish_works, probe=_finish_probe),
}
