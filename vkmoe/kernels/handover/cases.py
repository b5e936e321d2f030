"""Compares find_experts and join_rows with their twins.

Ids, weights and addresses must be equal; sums are within rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

import numpy as np

from vkmoe.gpu.program import memory_range
from vkmoe.gpu.runner import Runner
from vkmoe.kernels.comparison import Checks, Words
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.family import Family, Setting, Setup, Trial, Used, Work, trial
from vkmoe.kernels.handover import twins
from vkmoe.kernels.handover.operations import JOINED_VEC4S, find_experts, join_rows
from vkmoe.kernels.inputs import LeftState
from vkmoe.kernels.router.cases import ROUTERS
from vkmoe.kernels.router.operations import RouterShape, routing_words
from vkmoe.kernels.rows import N_DRAWN, PAIR, RowBatch, RowCase, Rowed, RowsCase
from vkmoe.kernels.tuning import Tuning

LAYER, N_LAYERS = 1, 3


@dataclass(frozen=True)
class FindCase(RowCase):
    """Checks the addresses of experts of which `absent` have none, and the order they come in.

    These are shares of the experts of a row; rows take turns. The last id is one that the model
    does not have: it counts as the last expert.
    """

    tuning: Tuning
    shape: RouterShape
    absent: tuple[float, ...] = (0.0, 0.5, 1.0)

    @property
    def n_compared(self) -> int:
        return len(self.absent)

    def append(self, runner: Runner, op: OpContext, batch: RowBatch) -> Rowed:
        shape, n_used = self.shape, self.shape.n_used
        rng = np.random.default_rng([shape.n_experts, n_used])
        table = rng.integers(1, 1 << 63, (N_LAYERS, shape.n_experts), np.uint64)
        table[:, 1:-1:2] = 0
        address = runner.place(table)
        routing = batch.tensor("routing", routing_words(shape) + 1)
        memory = memory_range(address, table.nbytes)
        find_experts(op, routing, batch.params_ref, shape, LAYER, memory)
        words = rng.integers(0, 1 << 32, (N_DRAWN, 6 * n_used), np.uint64).astype(np.uint32)
        for row, share in zip(words, cycle(self.absent), strict=False):
            n_absent = round(share * n_used)
            ids = np.arange(shape.n_experts - 1)
            found, lacking = rng.permutation(ids[::2]), rng.permutation(ids[1::2])
            chosen = np.concatenate([lacking[:n_absent], found[: n_used - n_absent]])
            row[:n_used] = rng.permutation(chosen)
            row[n_used - 1] = shape.n_experts + 5

        def compare(row: int, checks: Checks, found: Sequence[Words]) -> None:
            left, behind = np.split(found[0], [6 * n_used])
            checks.equal("routing", left, twins.find_experts(words[row], table[LAYER]))
            checks.untouched("the words behind it", behind)

        return Rowed({routing: words}, (routing,), compare, lambda of: of.params(table=address))


@dataclass(frozen=True)
class JoinCase(RowCase):
    """Checks what is added to a row of `width`; `leaves`: and what is left for the next norm.

    Unless it `adds`, what it is given becomes the row.
    """

    tuning: Tuning
    width: int
    leaves: bool = True
    adds: bool = True

    def append(self, runner: Runner, op: OpContext, batch: RowBatch) -> Rowed:
        rng = np.random.default_rng(self.width)
        given = batch.tensor("given", self.width)
        values = rng.standard_normal((N_DRAWN, self.width)).astype(np.float32)
        group_width = 4 * JOINED_VEC4S * self.tuning.workgroup_size
        left = LeftState(runner, batch, self.width, group_width, rng, self.adds)
        output = left.refs if self.leaves else replace(left.refs, gain=0)
        n_partials = join_rows(op, given, batch.params_ref, output, self.width)
        assert (n_partials > 0) == self.leaves

        def compare(row: int, checks: Checks, words: Sequence[Words]) -> None:
            wanted = twins.join_rows(values[row], left.before[row], left.gain)
            magnitude = np.abs(values[row]) + np.abs(left.before[row])
            if self.leaves:
                left.compare(checks, words, wanted, magnitude.astype(np.float64))
            else:
                left.compare_hidden(checks, words, wanted, magnitude)

        inputs = {given: values, **left.inputs}
        return Rowed(inputs, left.outputs, compare, lambda of: of.params())


def _find_experts(setting: Setting) -> Iterator[Trial]:
    cases = [FindCase(setting.tuning, shape) for shape, _ in ROUTERS]
    yield trial(*cases, *(RowsCase(case, PAIR) for case in cases))


def _join_rows(setting: Setting) -> Iterator[Trial]:
    tuning = setting.tuning
    cases = (JoinCase(tuning, 4), JoinCase(tuning, 1028), JoinCase(tuning, 516, False))
    yield trial(*cases, RowsCase(JoinCase(tuning, 516), PAIR))
    alone = [JoinCase(tuning, 516, leaves, adds=False) for leaves in (True, False)]
    yield trial(*alone, RowsCase(alone[0], PAIR), what="without adding")


def _find_experts_works(setup: Setup) -> Iterator[Work]:
    router = setup.shapes.router
    case = FindCase(setup.tuning, router, absent=(0.5,))
    yield Work(f"find {router.n_used} of {router.n_experts}", 8 * router.n_used, case.run)


def _join_rows_works(setup: Setup) -> Iterator[Work]:
    width = setup.shapes.width
    yield Work(f"join {width}", 4 * 3 * width, JoinCase(setup.tuning, width).run)


def _find_experts_probe(used: Used) -> FindCase:
    """Use at most half of the experts, as a case has an address for every other one."""
    n_experts = used.numbers["n_experts"]
    n_used = max(1, min(used.numbers["n_used"], (n_experts - 1) // 2))
    absent = (0.0, 0.5, 1.0) if n_experts > 2 else (0.0,)
    return FindCase(used.tuning, RouterShape(n_experts, n_used), absent)


def _join_rows_probe(used: Used) -> JoinCase:
    leaves, adds = (used.numbers[name] != 0 for name in ("gain", "adds"))
    return JoinCase(used.tuning, 4 * used.numbers["row_vec4s"], leaves, adds)


FAMILIES = {
    "find_experts": Family(_find_experts, _find_experts_works, probe=_find_experts_probe),
    "join_rows": Family(_join_rows, _join_rows_works, probe=_join_rows_probe),
}
