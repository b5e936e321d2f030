"""matvec_heads against its twin: a stack of matrices, each with a part of x of its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.runner import SENTINEL, Runner
from vkmoe.ops.matvec import matvec_heads
from vkmoe.ops.tuning import Tuning
from vkmoe.reference.matvec import matvec_heads as heads_twin
from vkmoe.selftest.comparison import Checks
from vkmoe.selftest.weights import place_matrix

__all__ = ["HeadsCase"]


@dataclass(frozen=True)
class HeadsCase:
    """`n_heads` matrices [n_rows, n_columns]; x has NaN before, between and behind their parts."""

    tuning: Tuning
    type: str
    n_heads: int
    n_rows: int
    n_columns: int
    x_offset: int = 0
    x_gap: int = 0  # words between the parts
    seed: int = 0

    def run(self, runner: Runner) -> Checks:
        rng = np.random.default_rng(self.seed)
        n_rows = self.n_heads * self.n_rows
        placed = place_matrix(runner, self.type, n_rows, self.n_columns, rng)
        stride = self.n_columns + self.x_gap
        parts = rng.standard_normal((self.n_heads, self.n_columns)).astype(np.float32)
        laid_out = np.full((self.n_heads, stride), np.nan, np.float32)
        laid_out[:, : self.n_columns] = parts
        x = np.append(np.full(self.x_offset, np.nan, np.float32), laid_out)
        x_ref, y_ref = TensorRef("x", x.size), TensorRef("y", n_rows + 1)
        program = Program("matvec_heads")
        matvec_heads(
            program,
            self.tuning,
            placed.matrix,
            self.n_heads,
            x_ref,
            y_ref,
            "heads",
            x_ref,
            x_offset=self.x_offset,
            x_stride=stride,
        )
        (words,) = runner.run(program, {x_ref: x}, y_ref)
        weights = placed.values.reshape(self.n_heads, self.n_rows, self.n_columns)
        found = words[:-1].view(np.float32).reshape(self.n_heads, self.n_rows)
        checks = Checks()
        magnitude = heads_twin(np.abs(weights), np.abs(parts))
        checks.close("y of heads", found, heads_twin(weights, parts), magnitude)
        checks.equal("the word behind y", words[-1:], np.array([SENTINEL], np.uint32))
        return checks
