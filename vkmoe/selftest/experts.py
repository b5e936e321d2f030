"""expert_gate_up and expert_down against their twins, through routed addresses or a fixed span."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vkmoe.gpu.program import Program, Range, TensorRef, memory_range
from vkmoe.gpu.runner import SENTINEL, Runner
from vkmoe.ops.experts import ExpertShape, SpanMatrix, expert_down, expert_gate_up
from vkmoe.ops.router import RouterShape, routing_words
from vkmoe.ops.tuning import Tuning
from vkmoe.quants import device_row_bytes, to_device
from vkmoe.reference.experts import expert_down as down_twin
from vkmoe.reference.experts import expert_gate_up as gate_up_twin
from vkmoe.reference.experts import silu
from vkmoe.selftest.comparison import Checks
from vkmoe.selftest.matvec import LeftState, NormedInput
from vkmoe.selftest.weights import Bytes, decode_rows, random_rows

__all__ = ["DownCase", "Experts", "GateUpCase"]

SPAN_ALIGNMENT = 256
GAP_BYTE = 0xFF  # between the matrices of a span: NaN in every type
Wide = NDArray[np.float64]


class Experts:
    """`n_experts` random spans of gate, up [inner, width] and down [width, inner], and a routing.

    A type of None leaves its matrix empty. The slots use experts in no order, each once if there
    are as many slots as experts; without `routed`, the one slot is span 0.
    """

    def __init__(
        self,
        runner: Runner,
        types: tuple[str | None, str | None, str | None],
        n_experts: int,
        n_slots: int,
        inner: int,
        width: int,
        routed: bool,
        rng: np.random.Generator,
    ) -> None:
        self._rng = rng
        shapes = ((inner, width), (inner, width), (width, inner))
        matrices: list[SpanMatrix] = []
        for kind, (n_rows, n_columns) in zip(types, shapes, strict=True):
            end = matrices[-1].offset + matrices[-1].n_bytes if matrices else 0
            offset = -(-end // SPAN_ALIGNMENT) * SPAN_ALIGNMENT
            row_bytes = device_row_bytes(kind or "F32", n_columns)
            matrices.append(
                SpanMatrix(kind or "F32", offset, n_rows if kind else 0, n_columns, row_bytes)
            )
        span_bytes = -(-(matrices[2].offset + matrices[2].n_bytes) // SPAN_ALIGNMENT)
        gate, up, down = matrices
        self.shape = ExpertShape(gate, up, down, span_bytes * SPAN_ALIGNMENT)
        spans = np.full((n_experts, self.shape.span_bytes), GAP_BYTE, np.uint8)
        self._rows = [self._fill(spans, matrix) for matrix in matrices]
        address = runner.place(spans)
        self.homes: tuple[Range, ...] = (memory_range(address, spans.nbytes),)
        self.span = 0 if routed else address
        self.n_slots = n_slots if routed else 1
        self.ids = np.zeros(1, np.int64)
        if routed:
            self.ids = (
                rng.permutation(n_experts)
                if n_slots == n_experts
                else rng.integers(0, n_experts, n_slots)
            )
        self.weights = rng.uniform(-1.0, 1.0, self.n_slots).astype(np.float32)
        addresses = address + self.ids.astype(np.uint64) * np.uint64(self.shape.span_bytes)
        self.routing_ref = TensorRef(
            "routing", routing_words(RouterShape(max(n_experts, n_slots), self.n_slots))
        )
        self.routing = np.concatenate(
            [
                self.ids.astype(np.uint32),
                self.weights.view(np.uint32),
                addresses.astype(np.uint64).view(np.uint32),
            ]
        )
        if not routed:  # what a fixed span must not look at
            self.routing = np.full(self.routing_ref.n_words, SENTINEL, np.uint32)
            self.weights = np.ones(1, np.float32)

    def of_slots(self, which: int) -> NDArray[np.float32]:
        """Values of gate (0), up (1) or down (2) of every slot: [n_slots, n_rows, n_columns]."""
        matrix = (self.shape.gate, self.shape.up, self.shape.down)[which]
        values = decode_rows(matrix.type, self._rows[which], matrix.n_columns)
        return values.reshape(-1, matrix.n_rows, matrix.n_columns)[self.ids]

    def _fill(self, spans: Bytes, matrix: SpanMatrix) -> Bytes:
        """Write a matrix into every span; returns its file rows, expert after expert."""
        n_experts = len(spans)
        if not matrix.n_rows:
            return np.zeros((0, 0), np.uint8)
        rows = random_rows(matrix.type, n_experts * matrix.n_rows, matrix.n_columns, self._rng)
        laid_out = to_device(matrix.type, rows, matrix.n_columns).reshape(n_experts, -1)
        spans[:, matrix.offset : matrix.offset + matrix.n_bytes] = laid_out
        return rows


@dataclass(frozen=True)
class GateUpCase:
    """act = silu(gate @ x) * (up @ x); gates and ups of different types take two dispatches."""

    tuning: Tuning
    types: tuple[str, str]
    n_experts: int
    n_slots: int
    n_rows: int
    n_columns: int
    n_partials: int = 3
    routed: bool = True
    seed: int = 0

    def run(self, runner: Runner) -> Checks:
        program, experts, source, act = self._make(runner)
        inputs = {**source.inputs, experts.routing_ref: experts.routing}
        (words,) = runner.run(program, inputs, act)
        checks = Checks()
        wanted, magnitude = self._twin(experts, source)
        checks.close("act", words[:-1].view(np.float32).reshape(wanted.shape), wanted, magnitude)
        checks.equal("the word behind act", words[-1:], np.array([SENTINEL], np.uint32))
        return checks

    def time(self, runner: Runner) -> float | None:
        """GB of weights per second on the device."""
        program, experts, source, _ = self._make(runner)
        runner.run(program, {**source.inputs, experts.routing_ref: experts.routing})
        runtime = runner.nanoseconds(program)
        n_bytes = experts.n_slots * (experts.shape.gate.n_bytes + experts.shape.up.n_bytes)
        return n_bytes / runtime if runtime else None

    def _make(self, runner: Runner) -> tuple[Program, Experts, NormedInput, TensorRef]:
        rng = np.random.default_rng(self.seed)
        experts = Experts(
            runner,
            (*self.types, None),
            self.n_experts,
            self.n_slots,
            self.n_rows,
            self.n_columns,
            self.routed,
            rng,
        )
        source = NormedInput(self.n_columns, self.n_partials, rng)
        act = TensorRef("act", experts.n_slots * self.n_rows + 1)
        program = Program("expert_gate_up")
        expert_gate_up(
            program,
            self.tuning,
            experts.shape,
            source.x_ref,
            experts.routing_ref,
            act,
            experts.n_slots,
            source.norm,
            experts.homes,
            "gate/up",
            experts.span,
        )
        return program, experts, source, act

    def _twin(self, experts: Experts, source: NormedInput) -> tuple[Wide, Wide]:
        """The wanted values and how far each may be off: |silu'| <= 1.1 carries gate's error."""
        gate, up, x = experts.of_slots(0), experts.of_slots(1), source.x.astype(np.float64)
        scale = source.scale
        g, u = (scale * (values.astype(np.float64) @ x) for values in (gate, up))
        g_size, u_size = (
            scale * (np.abs(values.astype(np.float64)) @ np.abs(x)) for values in (gate, up)
        )
        magnitude = 1.1 * g_size * np.abs(u) + np.abs(silu(g)) * u_size
        return gate_up_twin(gate, up, source.x, scale), magnitude


@dataclass(frozen=True)
class DownCase:
    """hidden += weighted sum over the slots of down @ act."""

    tuning: Tuning
    type: str
    n_experts: int
    n_slots: int
    n_rows: int
    n_columns: int
    routed: bool = True
    seed: int = 0

    def run(self, runner: Runner) -> Checks:
        program, experts, left, act, act_ref = self._make(runner)
        words = runner.run(
            program,
            {act_ref: act, experts.routing_ref: experts.routing, left.refs.hidden: left.before},
            *left.outputs,
        )
        down = experts.of_slots(2)
        wanted = down_twin(down, act, experts.weights, left.before, left.gain)
        terms = np.einsum("src,sc->sr", np.abs(down).astype(np.float64), np.abs(act))
        magnitude = np.abs(left.before) + np.abs(experts.weights).astype(np.float64) @ terms
        checks = Checks()
        left.compare(checks, words, wanted, magnitude, self.tuning.rows)
        return checks

    def time(self, runner: Runner) -> float | None:
        """GB of weights per second on the device."""
        program, experts, _, act, act_ref = self._make(runner)
        runner.run(program, {act_ref: act, experts.routing_ref: experts.routing})
        runtime = runner.nanoseconds(program)
        return experts.n_slots * experts.shape.down.n_bytes / runtime if runtime else None

    def _make(
        self,
        runner: Runner,
    ) -> tuple[Program, Experts, LeftState, NDArray[np.float32], TensorRef]:
        rng = np.random.default_rng(self.seed)
        experts = Experts(
            runner,
            (None, None, self.type),
            self.n_experts,
            self.n_slots,
            self.n_columns,
            self.n_rows,
            self.routed,
            rng,
        )
        left = LeftState(runner, self.n_rows, -(-self.n_rows // self.tuning.rows), rng)
        act = rng.standard_normal((experts.n_slots, self.n_columns)).astype(np.float32)
        act_ref = TensorRef("act", act.size)
        program = Program("expert_down")
        expert_down(
            program,
            self.tuning,
            experts.shape,
            act_ref,
            experts.routing_ref,
            experts.n_slots,
            left.refs,
            experts.homes,
            "down",
            experts.span,
        )
        return program, experts, left, act, act_ref
