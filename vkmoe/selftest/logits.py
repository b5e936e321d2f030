"""Compares router_topk, pick_rows, both kernels of candidates, and finish with their twins.

Ids, addresses, logits and logs must be equal; weights and sums are within rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from vkmoe.batch import TokenBatch
from vkmoe.gpu.program import Program, TensorRef, memory_range
from vkmoe.gpu.runner import SENTINEL, Runner
from vkmoe.gpu.token_io import pack_params, param_words
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
    pick_rows,
)
from vkmoe.ops.context import OpContext
from vkmoe.ops.router import (
    Landing,
    RouterShape,
    RouterTensors,
    RoutingLog,
    router_topk,
    routing_words,
)
from vkmoe.ops.tuning import Tuning
from vkmoe.reference import logits as twins
from vkmoe.selftest.comparison import Checks, KernelCase, Prepared, Words
from vkmoe.selftest.inputs import PARAMS, params_words

__all__ = ["CandidatesCase", "FinishCase", "PickCase", "RouterCase", "random_bias"]

N_LAYERS, LAYER = 3, 1
WEIGHT_LIMIT = 2e-5  # of a weight: the exponential of a float32 driver
NO_ID, NO_LOGIT = 0xFFFFFFFF, -np.inf  # behind the last entry of a list

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class RouterCase(KernelCase):
    """Checks one router of a three-layer model; `bias` [n_experts] is for choosing.

    About half of the experts are at home. `n_landing` places, if any, are gathered to or not; the
    first place of a few is null. Without `logits`, random ones are taken, and some with ties.
    """

    tuning: Tuning
    shape: RouterShape
    n_landing: int = 0
    gather: bool = False
    bias: Logits | None = None
    logits: tuple[Logits, ...] = ()

    def prepare(self, runner: Runner) -> Prepared:
        shape, tuning = self.shape, self.tuning
        rng = np.random.default_rng([shape.n_experts, self.n_landing])
        table = rng.integers(1, 1 << 63, (N_LAYERS, shape.n_experts), np.uint64)
        places = 256 * rng.integers(1, 1 << 55, (N_LAYERS, self.n_landing), np.uint64)
        places[:, self.n_landing // 2 : self.n_landing // 2 + 1] = 0
        entries = np.concatenate([table.reshape(-1), places.reshape(-1)])
        address = runner.place(entries)
        log = RoutingLog(N_LAYERS, shape.n_used)
        routing = TensorRef("routing", routing_words(shape))
        logits_ref, program = TensorRef("logits", shape.n_logits), Program("router")
        router_topk(
            OpContext(program, tuning, "router"),
            shape,
            LAYER,
            RouterTensors(logits_ref, PARAMS, routing, log),
            memory_range(address, entries.nbytes),
            Landing(N_LAYERS, self.n_landing, self.gather),
            selection_bias=0 if self.bias is None else runner.place(self.bias),
        )
        params = params_words(table=address)
        drawn = self.logits or (self.random_logits(1), self.random_logits(2).round())
        compare = partial(self._compare, table[LAYER], places[LAYER])
        rounds = [({logits_ref: one, PARAMS: params}, partial(compare, one)) for one in drawn]
        return Prepared(program, (routing, log.tensor), rounds)

    def _compare(
        self,
        table: NDArray[np.uint64],
        places: NDArray[np.uint64],
        logits: Logits,
        checks: Checks,
        words: Sequence[Words],
    ) -> None:
        shape, (routing, log) = self.shape, words
        wanted = twins.router_topk(
            logits[: shape.n_experts],
            shape.n_used,
            shape.gating,
            shape.renormalise,
            shape.scale,
            self.bias,
            (shape.n_groups, shape.n_groups_used),
        )
        ids, weights, addresses, partners, shared = np.split(
            routing, np.array([1, 2, 4, 6]) * shape.n_used
        )
        checks.equal("ids", ids.astype(np.int64), wanted.ids)
        checks.close(
            "weights", weights.view(np.float32), wanted.weights, wanted.weights + 1e-4, WEIGHT_LIMIT
        )
        found = twins.look_up(table[wanted.ids], places, self.gather)
        checks.equal("addresses", addresses.view(np.uint64), found.addresses)
        checks.equal("partners", partners.view(np.uint64), found.partners)
        if shape.shared_gate:
            gate = twins.shared_weights(logits[shape.n_experts :])
            checks.close("shared weight", shared.view(np.float32), gate, gate, WEIGHT_LIMIT)
        expected_log = np.full(len(log), SENTINEL, np.uint32)
        RoutingLog(N_LAYERS, shape.n_used).views(expected_log).ids[0, LAYER] = wanted.ids
        checks.equal("log", log, expected_log)

    def random_logits(self, seed: int) -> Logits:
        """Draw float32 [n_logits]."""
        return _normal(2, self.shape.n_logits, seed)


def random_bias(n_experts: int, seed: int = 0) -> Logits:
    """Draw float32 [n_experts] in quarters, so that equal logits often have equal biases."""
    rng = np.random.default_rng([seed, n_experts])
    return (rng.integers(-2, 3, n_experts) / 4).astype(np.float32)


@dataclass(frozen=True)
class CandidatesCase(KernelCase):
    """Checks the 64 largest of `n_vocab` logits: lists per chunk, then their merge.

    Without `logits`, random ones are taken, and some with ties.
    """

    tuning: Tuning
    n_vocab: int
    logits: tuple[Logits, ...] = ()

    def prepare(self, runner: Runner) -> Prepared:
        logits_ref = TensorRef("logits", self.n_vocab + 3)
        lists = TensorRef("lists", list_words(self.tuning, self.n_vocab))
        output, program = TensorRef("candidates", CANDIDATE_WORDS), Program("candidates")
        op = OpContext(program, self.tuning, "candidates")
        candidates(op, logits_ref, self.n_vocab, lists, output)
        random = _normal(4, self.n_vocab, seed=1)
        rounds = [
            ({logits_ref: logits}, partial(self._compare, logits))
            for logits in self.logits or (random, (random * 0.5).round())
        ]
        return Prepared(program, (lists, output), rounds)

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


def _normal(size: float, count: int, seed: int) -> Logits:
    return np.random.default_rng(seed).normal(0, size, count).astype(np.float32)


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
        rows = _normal(1, n_rows * (width + 8), seed=5).reshape(n_rows, -1)
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
