"""embed against its twin: rows of one random matrix."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vkmoe.gpu.program import Program
from vkmoe.gpu.runner import Runner
from vkmoe.ops.embed import embed
from vkmoe.ops.tuning import Tuning
from vkmoe.reference.matvec import embed as embed_twin
from vkmoe.selftest.comparison import Checks
from vkmoe.selftest.normed import LeftState
from vkmoe.selftest.parameters import PARAMS, params_words
from vkmoe.selftest.weights import place_matrix

__all__ = ["EmbedCase"]


@dataclass(frozen=True)
class EmbedCase:
    """Rows of an embedding matrix, token by token; ids beyond the vocabulary are clamped."""

    tuning: Tuning
    type: str
    n_vocab: int
    n_columns: int
    tokens: tuple[int, ...]
    seed: int = 0

    def run(self, runner: Runner) -> Checks:
        rng = np.random.default_rng(self.seed)
        placed = place_matrix(runner, self.type, self.n_vocab, self.n_columns, rng)
        group_width = 32 * self.tuning.workgroup_size
        left = LeftState(runner, self.n_columns, -(-self.n_columns // group_width), rng)
        program = Program("embed")
        embed(program, self.tuning, placed.matrix, PARAMS, left.refs, "embed")
        checks = Checks()
        values = np.resize(placed.values, (self.n_vocab, self.n_columns))
        for token in self.tokens:
            words = runner.run(program, {PARAMS: params_words(token=token)}, *left.outputs)
            wanted = embed_twin(values, token, left.gain)
            # A weight is a difference of two terms; the row's largest stands for their size.
            magnitude = np.full(self.n_columns, np.abs(wanted.hidden).max())
            left.compare(checks, words, wanted, magnitude, group_width)
        return checks
