"""Compares rows of a batch with each of them alone, bit by bit: a neighbour changes no answer.

A subject is a kernel with inputs for eight rows. It runs for one row at a time, and for several in
any order beside rows that are inert, whose inputs are NaN; every output of a row must be the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.batch import TokenBatch
from vkmoe.gpu.program import Program, TensorRef, memory_range
from vkmoe.gpu.runner import SENTINEL, Runner
from vkmoe.gpu.token_io import pack_params, param_words
from vkmoe.ops.candidates import CANDIDATE_WORDS, candidates, list_words
from vkmoe.ops.context import OpContext
from vkmoe.ops.experts import expert_down, expert_gate_up
from vkmoe.ops.handover import find_experts, join_rows
from vkmoe.ops.matvec import HeadParts, embed, matvec, matvec_heads, matvec_residual
from vkmoe.ops.norms import NormInput, NormOutput, rms_norm
from vkmoe.ops.router import (
    Landing,
    RouterShape,
    RouterTensors,
    RoutingLog,
    router_topk,
    routing_words,
)
from vkmoe.ops.tuning import Tuning
from vkmoe.selftest.comparison import Checks, Words
from vkmoe.selftest.experts import PlacedExperts, Use
from vkmoe.selftest.inputs import place_matrix

__all__ = [
    "N_DRAWN",
    "CandidateRows",
    "DownRows",
    "EmbedRows",
    "FindRows",
    "GateUpRows",
    "HeadRows",
    "JoinRows",
    "MatvecRows",
    "NormRows",
    "ResidualRows",
    "RouterRows",
    "RowsCase",
    "Subject",
]

N_DRAWN = 8  # rows that a subject has inputs for
ALL = tuple(range(N_DRAWN))
N_PARTIALS = 37
FOUR = Use(4, 4, biased=True)

Numbers = NDArray[np.generic]


class Batch(NamedTuple):
    """Says which of the drawn rows a batch has, in order, and how many rows its program has."""

    rows: tuple[int, ...]
    n_rows: int

    @property
    def tensor(self) -> TensorRef:
        return TensorRef("params", param_words(self.n_rows))

    def params(self, table: int = 0, landing_row: int = 0) -> Words:
        """Make the parameters; token and position of a row are its number. Inert rows are NaN."""
        words = np.full(self.tensor.n_words, SENTINEL, np.uint32)
        flags = (True,) * len(self.rows)
        batch = TokenBatch(self.rows, self.rows, (0,) * len(self.rows), flags)
        pack_params(words.data, batch, table, serial=1, landing_row=landing_row)
        return words


class Rowed(NamedTuple):
    """Holds what a subject's program reads and leaves; tensors have a row for each of a batch."""

    inputs: Mapping[TensorRef, Numbers]  # [N_DRAWN, words of a row]
    outputs: Sequence[TensorRef]
    params: Words | None = None  # where the program reads them
    inert: Mapping[TensorRef, int] = {}  # words that inert rows of an input hold, where not NaN


class Subject(ABC):
    """Appends a kernel that is to be compared; whatever it draws is the same each time."""

    tuning: Tuning

    @abstractmethod
    def append(self, runner: Runner, op: OpContext, batch: Batch) -> Rowed:
        """Append the kernel for the rows of a batch."""

    def run(self, runner: Runner, batch: Batch) -> list[Words]:
        """Return the words of each output: [rows of the batch, words of a row]."""
        program = Program("rows")
        rowed = self.append(
            runner, OpContext(program, self.tuning, "rows", n_rows=batch.n_rows), batch
        )
        inputs: dict[TensorRef, Numbers] = {}
        for ref, drawn in rowed.inputs.items():
            words = np.full((batch.n_rows, ref.row_words), rowed.inert.get(ref, SENTINEL), "<u4")
            given = np.ascontiguousarray(drawn).view(np.uint32).reshape(N_DRAWN, -1)
            words[: len(batch.rows), : given.shape[1]] = given[list(batch.rows)]
            inputs[ref] = words
        if rowed.params is not None:
            inputs[batch.tensor] = rowed.params
        found = runner.run(program, inputs, *rowed.outputs)
        return [words.reshape(batch.n_rows, -1)[: len(batch.rows)] for words in found]


@dataclass(frozen=True)
class RowsCase:
    """Checks batches of a subject: `n_rows` rows of a program, of which some are inert."""

    subject: Subject
    batches: tuple[Batch, ...] = (Batch((3, 0), 2), Batch((5, 3, 6), 4), Batch(ALL[::-1], 8))

    def run(self, runner: Runner) -> Checks:
        """Compare the rows of all batches with each alone; the runner stands for its device."""
        rows = {row for batch in self.batches for row in batch.rows}
        with Runner(runner.device) as other:  # one for all of them: compiling takes the time
            wanted = {row: self.subject.run(other, Batch((row,), 1)) for row in sorted(rows)}
        checks = Checks()
        for batch in self.batches:
            with Runner(runner.device) as other:
                found = self.subject.run(other, batch)
            for i, row in enumerate(batch.rows):
                for beside, alone in zip(found, wanted[row], strict=True):
                    checks.equal(f"row {row} of {batch}", beside[i], alone[0])
        return checks


def _tensor(name: str, batch: Batch, n_words: int) -> TensorRef:
    return TensorRef(name, batch.n_rows * n_words, batch.n_rows)


def _normal(rng: np.random.Generator, n_words: int) -> NDArray[np.float32]:
    return rng.standard_normal((N_DRAWN, n_words)).astype(np.float32)


def _partials(rng: np.random.Generator) -> NDArray[np.float32]:
    return rng.uniform(1.0, 9.0, (N_DRAWN, N_PARTIALS)).astype(np.float32)


class _LeftRows:
    """Makes the tensors of a producer of hidden, [width] a row and as many partial sums at most."""

    def __init__(
        self, runner: Runner, batch: Batch, width: int, n_partials: int, rng: np.random.Generator
    ) -> None:
        self.before = _normal(rng, width)
        gain = rng.uniform(0.5, 1.5, width).astype(np.float32)
        hidden, gained = (_tensor(name, batch, width) for name in ("hidden", "gained"))
        partials = _tensor("partials", batch, n_partials)
        self.refs = NormOutput(hidden, gained, partials, runner.place(gain))
        self.outputs = (hidden, gained, partials)


@dataclass(frozen=True)
class MatvecRows(Subject):
    """Multiplies matrices [(type, rows)] by a vector of each row; scaled by norms, plus biases."""

    tuning: Tuning
    segments: tuple[tuple[str, int], ...]
    n_columns: int = 512

    def append(self, runner: Runner, op: OpContext, batch: Batch) -> Rowed:
        rng = np.random.default_rng(0)
        placed = [place_matrix(runner, kind, n, self.n_columns, rng) for kind, n in self.segments]
        n_rows = sum(n for _, n in self.segments)
        x, y = _tensor("x", batch, self.n_columns), _tensor("y", batch, n_rows)
        partials = _tensor("norm_partials", batch, N_PARTIALS)
        bias = runner.place(rng.standard_normal(n_rows).astype(np.float32))
        norm = NormInput(partials, N_PARTIALS, self.n_columns, 1e-5)
        matvec(op, [item.matrix for item in placed], x, y, norm, bias=bias)
        return Rowed({x: _normal(rng, self.n_columns), partials: _partials(rng)}, (y,))


@dataclass(frozen=True)
class ResidualRows(Subject):
    """Adds one matrix times a vector of each row to its hidden state."""

    tuning: Tuning
    type: str
    n_rows: int = 13
    n_columns: int = 512

    def append(self, runner: Runner, op: OpContext, batch: Batch) -> Rowed:
        rng = np.random.default_rng(1)
        placed = place_matrix(runner, self.type, self.n_rows, self.n_columns, rng)
        left = _LeftRows(runner, batch, self.n_rows, self.n_rows, rng)
        x, bias = _tensor("x", batch, self.n_columns), rng.standard_normal(self.n_rows)
        placed_bias = runner.place(bias.astype(np.float32))
        matvec_residual(op, placed.matrix, x, left.refs, bias=placed_bias)
        return Rowed({x: _normal(rng, self.n_columns), left.refs.hidden: left.before}, left.outputs)


@dataclass(frozen=True)
class HeadRows(Subject):
    """Multiplies a stack of three heads' matrices by their parts of each row."""

    tuning: Tuning
    type: str
    n_rows: int = 11
    n_columns: int = 256

    def append(self, runner: Runner, op: OpContext, batch: Batch) -> Rowed:
        rng, n_heads, stride = np.random.default_rng(2), 3, self.n_columns + 8
        placed = place_matrix(runner, self.type, n_heads * self.n_rows, self.n_columns, rng)
        x = _tensor("x", batch, 4 + n_heads * stride)
        y = _tensor("y", batch, n_heads * self.n_rows)
        matvec_heads(op, placed.matrix, n_heads, HeadParts(x, stride, 4), y, scratch=x)
        return Rowed({x: _normal(rng, x.row_words)}, (y,))


@dataclass(frozen=True)
class EmbedRows(Subject):
    """Fetches the rows of an embedding that the tokens of a batch name."""

    tuning: Tuning
    type: str
    n_columns: int = 768

    def append(self, runner: Runner, op: OpContext, batch: Batch) -> Rowed:
        rng = np.random.default_rng(3)
        placed = place_matrix(runner, self.type, N_DRAWN - 1, self.n_columns, rng)
        left = _LeftRows(runner, batch, self.n_columns, self.n_columns // 32, rng)
        embed(op, placed.matrix, batch.tensor, left.refs)
        return Rowed({}, left.outputs, batch.params())


@dataclass(frozen=True)
class NormRows(Subject):
    """Normalises a part of each row."""

    tuning: Tuning
    width: int = 391

    def append(self, runner: Runner, op: OpContext, batch: Batch) -> Rowed:
        rng, offset = np.random.default_rng(4), 5
        x, y = _tensor("x", batch, offset + self.width + 2), _tensor("y", batch, self.width)
        gain = runner.place(rng.uniform(-2.0, 2.0, self.width).astype(np.float32))
        rms_norm(op, x, y, self.width, gain, 1e-6, x_offset=offset)
        return Rowed({x: _normal(rng, x.row_words)}, (y,))


class _ExpertRows(Subject):
    """Makes routings in which each row uses all experts, from another one on."""

    use: Use

    def _routing(self, experts: PlacedExperts, batch: Batch) -> tuple[TensorRef, Words]:
        n_used = len(experts.ids)
        parts = np.split(experts.routing, [n_used, 2 * n_used])
        entries = parts[2].view(np.uint64).reshape(2, n_used)
        rows = [
            np.concatenate(
                [np.roll(part, row) for part in parts[:2]]
                + [np.roll(part, row).view(np.uint32) for part in entries]
            )
            for row in ALL
        ]
        return _tensor("routing", batch, len(rows[0]) + 1), np.array(rows)


@dataclass(frozen=True)
class GateUpRows(_ExpertRows):
    """Computes gate and up of the experts of each row; `types` may differ."""

    tuning: Tuning
    types: tuple[str, str]
    n_rows: int = 5
    n_columns: int = 512
    use: Use = FOUR

    def append(self, runner: Runner, op: OpContext, batch: Batch) -> Rowed:
        rng = np.random.default_rng(5)
        kinds = (*self.types, None)
        experts = PlacedExperts(runner, kinds, self.use, self.n_rows, self.n_columns, rng)
        routing, routings = self._routing(experts, batch)
        x, partials = (
            _tensor(name, batch, n) for name, n in (("x", self.n_columns), ("sums", N_PARTIALS))
        )
        act = _tensor("act", batch, len(experts.ids) * self.n_rows + 3)
        norm = NormInput(partials, N_PARTIALS, self.n_columns, 5.0)
        block = experts.block_of(routing)
        expert_gate_up(op, block, x, act, norm)
        drawn = {x: _normal(rng, self.n_columns), partials: 1e4 * _partials(rng), routing: routings}
        return Rowed(drawn, (act,), inert={routing: 0})


@dataclass(frozen=True)
class DownRows(_ExpertRows):
    """Adds the weighted sum of the experts of each row to its hidden state."""

    tuning: Tuning
    type: str
    n_rows: int = 13
    n_columns: int = 256
    use: Use = FOUR

    def append(self, runner: Runner, op: OpContext, batch: Batch) -> Rowed:
        rng = np.random.default_rng(6)
        kinds = (None, None, self.type)
        experts = PlacedExperts(runner, kinds, self.use, self.n_columns, self.n_rows, rng)
        routing, routings = self._routing(experts, batch)
        act = _tensor("act", batch, len(experts.ids) * self.n_columns)
        left = _LeftRows(runner, batch, self.n_rows, self.n_rows, rng)
        expert_down(op, experts.block_of(routing), act, left.refs)
        drawn = {act: _normal(rng, act.row_words), routing: routings}
        return Rowed(drawn | {left.refs.hidden: left.before}, left.outputs, inert={routing: 0})


@dataclass(frozen=True)
class RouterRows(Subject):
    """Chooses experts of each row; no row has places to land in."""

    tuning: Tuning
    shape: RouterShape

    def append(self, runner: Runner, op: OpContext, batch: Batch) -> Rowed:
        rng, shape = np.random.default_rng(7), self.shape
        table = rng.integers(1, 1 << 63, (2, shape.n_experts), np.uint64)
        address = runner.place(table)
        log = RoutingLog(2, shape.n_used, batch.n_rows)
        logits = _tensor("logits", batch, shape.n_logits + 2)
        routing = _tensor("routing", batch, routing_words(shape))
        tensors = RouterTensors(logits, batch.tensor, routing, log)
        memory = memory_range(address, table.nbytes)
        router_topk(op, shape, 1, tensors, memory, Landing(2, 0))
        return Rowed({logits: 2 * _normal(rng, shape.n_logits)}, (routing,), batch.params(address))


@dataclass(frozen=True)
class FindRows(Subject):
    """Finds the experts of each row in a table that lacks some."""

    tuning: Tuning
    shape: RouterShape

    def append(self, runner: Runner, op: OpContext, batch: Batch) -> Rowed:
        rng, shape = np.random.default_rng(9), self.shape
        table = rng.integers(1, 1 << 63, (2, shape.n_experts), np.uint64)
        table[:, ::3] = 0
        address = runner.place(table)
        routing = _tensor("routing", batch, routing_words(shape))
        memory = memory_range(address, table.nbytes)
        find_experts(op, routing, batch.tensor, shape, 1, memory)
        words = np.zeros((N_DRAWN, 2 * shape.n_used), np.uint32)
        for row in words:
            row[: shape.n_used] = rng.permutation(shape.n_experts)[: shape.n_used]
        words[:, shape.n_used :] = _normal(rng, shape.n_used).view(np.uint32)
        return Rowed({routing: words}, (routing,), batch.params(address))


@dataclass(frozen=True)
class JoinRows(Subject):
    """Adds to the hidden state of each row."""

    tuning: Tuning
    width: int = 516

    def append(self, runner: Runner, op: OpContext, batch: Batch) -> Rowed:
        rng = np.random.default_rng(10)
        left = _LeftRows(runner, batch, self.width, self.width // 32 + 1, rng)
        given = _tensor("given", batch, self.width)
        join_rows(op, given, batch.tensor, left.refs, self.width)
        inputs = {given: _normal(rng, self.width), left.refs.hidden: left.before}
        return Rowed(inputs, left.outputs, batch.params())


@dataclass(frozen=True)
class CandidateRows(Subject):
    """Finds the largest logits of each row."""

    tuning: Tuning
    n_vocab: int = 1801

    def append(self, runner: Runner, op: OpContext, batch: Batch) -> Rowed:
        rng = np.random.default_rng(8)
        logits, lists, output = (
            _tensor(name, batch, n_words)
            for name, n_words in (
                ("logits", self.n_vocab + 1),
                ("lists", list_words(self.tuning, self.n_vocab)),
                ("candidates", CANDIDATE_WORDS),
            )
        )
        candidates(op, logits, self.n_vocab, lists, output)
        return Rowed({logits: 4 * _normal(rng, self.n_vocab)}, (output,))
