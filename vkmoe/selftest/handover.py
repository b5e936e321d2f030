"""Compares find_experts and join_rows with their twins.

Ids, weights and addresses must be equal; sums are within rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from vkmoe.gpu.program import Program, TensorRef, memory_range
from vkmoe.gpu.runner import SENTINEL, Runner
from vkmoe.ops.context import OpContext
from vkmoe.ops.handover import JOINED_VEC4S, find_experts, join_rows
from vkmoe.ops.router import RouterShape, routing_words
from vkmoe.ops.tuning import Tuning
from vkmoe.reference import handover as twins
from vkmoe.selftest.comparison import Checks, KernelCase, Prepared, Words
from vkmoe.selftest.inputs import PARAMS, LeftState, params_words

__all__ = ["FindCase", "JoinCase"]

LAYER, N_LAYERS = 1, 3


@dataclass(frozen=True)
class FindCase(KernelCase):
    """Checks the addresses of experts of which `absent` have none, and the order they come in.

    The last id is one that the model does not have.
    """

    tuning: Tuning
    shape: RouterShape
    absent: Sequence[float] = (0.0, 0.5, 1.0)  # shares of all experts

    def prepare(self, runner: Runner) -> Prepared:
        shape, program = self.shape, Program("find_experts")
        rng = np.random.default_rng([shape.n_experts, shape.n_used])
        entries = rng.integers(1, 1 << 63, (len(self.absent), N_LAYERS, shape.n_experts), np.uint64)
        for version, share in zip(entries, self.absent, strict=True):
            version[:, rng.permutation(shape.n_experts)[: round(share * shape.n_experts)]] = 0
        address = runner.place(entries)
        tables = memory_range(address, entries.nbytes)
        routing = TensorRef("routing", routing_words(shape) + 1)
        op = OpContext(program, self.tuning, "find")
        find_experts(op, routing, PARAMS, shape, LAYER, tables)
        words = rng.integers(0, 1 << 32, 6 * shape.n_used, np.uint64).astype(np.uint32)
        words[: shape.n_used] = rng.permutation(shape.n_experts)[: shape.n_used]
        words[shape.n_used - 1] = shape.n_experts + 5
        rounds = []
        for version, table in enumerate(entries):
            params = params_words(table=address + version * table.nbytes)
            wanted = twins.find_experts(words, table[LAYER])
            inputs = {routing: words, PARAMS: params}
            rounds.append((inputs, partial(self._compare, wanted)))
        return Prepared(program, (routing,), rounds)

    def _compare(self, wanted: Words, checks: Checks, words: Sequence[Words]) -> None:
        n_words = 6 * self.shape.n_used
        checks.equal("routing", words[0][:n_words], wanted)
        checks.untouched("the words behind it", words[0][n_words:])


@dataclass(frozen=True)
class JoinCase(KernelCase):
    """Checks what is added to a row of `width`; `leaves`: and what is left for the next norm."""

    tuning: Tuning
    width: int
    leaves: bool = True

    def prepare(self, runner: Runner) -> Prepared:
        rng, program = np.random.default_rng(self.width), Program("join_rows")
        given = TensorRef("given", self.width)
        values: NDArray[np.float32] = rng.standard_normal(self.width).astype(np.float32)
        left = LeftState(runner, self.width, 4 * JOINED_VEC4S * self.tuning.workgroup_size, rng)
        output = left.refs if self.leaves else replace(left.refs, gain=0)
        op = OpContext(program, self.tuning, "join")
        n_partials = join_rows(op, given, PARAMS, output, self.width)
        assert (n_partials > 0) == self.leaves
        wanted = twins.join_rows(values, left.before, left.gain)
        magnitude = np.abs(values) + np.abs(left.before)

        def compare(checks: Checks, words: Sequence[Words]) -> None:
            if self.leaves:
                left.compare(checks, words, wanted, magnitude.astype(np.float64))
                return
            hidden, *others = words
            joined = hidden[: self.width].view(np.float32)
            checks.close("hidden", joined, wanted.hidden, magnitude)
            for ref, found in zip(left.outputs[1:], others, strict=True):
                checks.untouched(ref.name, found)

        before = np.full(left.refs.hidden.n_words, SENTINEL, np.uint32)
        before[: self.width] = left.before.view(np.uint32)
        inputs = {PARAMS: params_words(), given: values, left.refs.hidden: before}
        return Prepared(program, left.outputs, [(inputs, compare)], 12 * self.width)
