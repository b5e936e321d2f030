"""Runs a kernel for the rows of a batch: each agrees with its twin, and leaves the bits it leaves
alone, wherever it stands and whatever is beside it.

A case draws inputs for eight rows, the same each time. It runs for one row at a time, and for
several in any order beside rows that are inert, whose inputs are NaN.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.batch import TokenBatch
from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.runner import SENTINEL, Runner
from vkmoe.gpu.token_io import pack_params, param_words
from vkmoe.kernels.comparison import Checks, Inputs, KernelCase, Prepared, Words
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.tuning import Tuning

N_DRAWN = 8  # rows that a case has inputs for
ALL = tuple(range(N_DRAWN))


class RowBatch(NamedTuple):
    """Says which of the drawn rows a batch has, in order, and how many rows its program has."""

    rows: tuple[int, ...]
    n_rows: int

    @property
    def params_ref(self) -> TensorRef:
        return TensorRef("params", param_words(self.n_rows))

    def tensor(self, name: str, n_words: int) -> TensorRef:
        """Name a tensor that has so many words for each row."""
        return TensorRef(name, self.n_rows * n_words, self.n_rows)

    def params(self, tokens: Sequence[int] = (), table: int = 0) -> Words:
        """Make the parameters; `tokens` are those of the drawn rows, if any. Inert rows are NaN."""
        words = np.full(self.params_ref.n_words, SENTINEL, np.uint32)
        of_rows = tuple(tokens[row] for row in self.rows) if tokens else self.rows
        n = len(self.rows)
        batch = TokenBatch(of_rows, self.rows, (0,) * n, (True,) * n)
        pack_params(words.data, batch, table, serial=1)
        return words


PAIR = (RowBatch((3, 0), 2),)  # in another order than they are drawn


class Rowed(NamedTuple):
    """Holds what a case's program reads and leaves; tensors have a row for each of a batch."""

    inputs: Mapping[TensorRef, NDArray[np.generic]]  # [drawn rows, words of a row, or fewer]
    outputs: Sequence[TensorRef]
    compare: Callable[[int, Checks, Sequence[Words]], None]  # a drawn row, and what it left
    params: Callable[[RowBatch], Words] | None = None  # where the program reads them
    inert: Mapping[TensorRef, int] = {}  # words that inert rows of an input hold, where not NaN
    others: Sequence[TensorRef] = ()  # outputs that are not by rows, for `compare` alone

    def given(self, batch: RowBatch) -> Inputs:
        """Return the inputs of a batch."""
        inputs = {batch.params_ref: self.params(batch)} if self.params else {}
        for ref, drawn in self.inputs.items():
            words = np.full((batch.n_rows, ref.row_words), self.inert.get(ref, SENTINEL), "<u4")
            rows = np.ascontiguousarray(drawn).view(np.uint32).reshape(len(drawn), -1)
            words[: len(batch.rows), : rows.shape[1]] = rows[list(batch.rows)]
            inputs[ref] = words
        return inputs


class RowCase(KernelCase):
    """Checks a kernel in one configuration, for rows that are drawn the same each time."""

    tuning: Tuning

    @property
    def n_compared(self) -> int:
        """Count the drawn rows that are compared with the twin, each alone."""
        return 1

    @abstractmethod
    def append(self, runner: Runner, op: OpContext, batch: RowBatch) -> Rowed:
        """Append the kernel for the rows of a batch."""

    def made(self, runner: Runner, batch: RowBatch) -> tuple[Program, Rowed]:
        """Make the program of a batch."""
        program = Program(type(self).__name__)
        op = OpContext(program, self.tuning, "case", n_rows=batch.n_rows)
        return program, self.append(runner, op, batch)

    def prepare(self, runner: Runner) -> Prepared:
        batches = [RowBatch((row,), 1) for row in range(self.n_compared)]
        program, first = self.made(runner, batches[0])
        rounds = []
        for batch in batches:
            rounds.append((first.given(batch), partial(first.compare, batch.rows[0])))
        return Prepared(program, (*first.outputs, *first.others), rounds)

    def run_batch(self, runner: Runner, batch: RowBatch) -> list[Words]:
        """Return the words of each output: [rows of the batch, words of a row]."""
        program, rowed = self.made(runner, batch)
        found = runner.run(program, rowed.given(batch), *rowed.outputs)
        return [words.reshape(batch.n_rows, -1)[: len(batch.rows)] for words in found]


@dataclass(frozen=True)
class BatchCase(KernelCase):
    """Compares rows of a batch with the twin, in a program of `n_rows`."""

    case: RowCase
    n_rows: int

    def prepare(self, runner: Runner) -> Prepared:
        batch = RowBatch(tuple(range(self.n_rows)), self.n_rows)
        program, rowed = self.case.made(runner, batch)

        def compare(checks: Checks, words: Sequence[Words]) -> None:
            by_rows = [found.reshape(self.n_rows, -1) for found in words]
            for row in batch.rows:
                rowed.compare(row, checks, [found[row] for found in by_rows])

        return Prepared(program, rowed.outputs, [(rowed.given(batch), compare)])


@dataclass(frozen=True)
class RowsCase:
    """Checks batches of a case: `n_rows` rows of a program, of which some are inert."""

    case: RowCase
    batches: tuple[RowBatch, ...] = (*PAIR, RowBatch((5, 3, 6), 4), RowBatch(ALL[::-1], 8))

    def run(self, runner: Runner) -> Checks:
        """Compare the rows of all batches with each alone; the runner stands for its device."""
        rows = {row for batch in self.batches for row in batch.rows}
        with runner.another() as other:  # one for all of them: compiling takes the time
            wanted = {row: self.case.run_batch(other, RowBatch((row,), 1)) for row in sorted(rows)}
        checks = Checks()
        for batch in self.batches:
            with runner.another() as other:
                found = self.case.run_batch(other, batch)
            for i, row in enumerate(batch.rows):
                for beside, alone in zip(found, wanted[row], strict=True):
                    checks.equal(f"row {row} of {batch}", beside[i], alone[0])
        return checks
