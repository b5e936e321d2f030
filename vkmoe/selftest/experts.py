"""Compares expert_gate_up and expert_down with their twins, at routed addresses or a fixed span.

Of slots that are kept, what is read must also be in their landing places, byte for byte, and the
results must be those of the kernel that does not keep, bit by bit: the driver made two pipelines.
Whatever no kernel may look at is NaN: the gaps between the matrices of a span, the experts that no
slot uses, the routing of a fixed span, and landing places before something is stored there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vkmoe.facts import Activation
from vkmoe.gpu.program import Program, TensorRef, memory_range
from vkmoe.gpu.runner import SENTINEL, Runner
from vkmoe.ops.context import OpContext
from vkmoe.ops.experts import (
    ExpertBlock,
    ExpertShape,
    LandingMemory,
    SpanBiases,
    SpanMatrix,
    expert_down,
    expert_gate_up,
    kept_bytes,
)
from vkmoe.ops.router import RoutingLog, shared_weight_word
from vkmoe.ops.tuning import Tuning
from vkmoe.quants import device_row_bytes, to_device
from vkmoe.reference.experts import expert_down as down_twin
from vkmoe.reference.experts import expert_gate_up as gate_up_twin
from vkmoe.reference.experts import silu
from vkmoe.reference.matvec import matvec as matvec_twin
from vkmoe.selftest.comparison import Checks
from vkmoe.selftest.inputs import Bytes, decode_rows, random_rows
from vkmoe.selftest.norms import LeftState, NormedInput

__all__ = ["DownCase", "GateUpCase", "Use"]

Wide = NDArray[np.float64]
Words = NDArray[np.uint32]


@dataclass(frozen=True)
class GateUpCase:
    """Checks act = f(gate @ x, up @ x); gates and ups of different types take two dispatches."""

    tuning: Tuning
    types: tuple[str, str]
    use: Use
    n_rows: int
    n_columns: int
    n_partials: int = 3
    seed: int = 0
    activation: Activation = "silu"

    def run(self, runner: Runner) -> Checks:
        """Compare; values that damaged weights decide are left out."""
        experts, source, words, log = self._run(runner)
        checks = Checks()
        if experts.landing:
            experts.compare_landing(runner, log, 0, checks)
            _compare_plain(self, runner, (words,), checks)
        wanted, magnitude = self._twin(experts, source)
        act_found = words[:-1].view(np.float32).reshape(wanted.shape)
        sound = np.isfinite(wanted)
        checks.n_left_out = int(np.count_nonzero(~sound))
        checks.close("act", act_found[sound], wanted[sound], magnitude[sound])
        checks.equal("the word behind act", words[-1:], np.array([SENTINEL], np.uint32))
        return checks

    def words(self, runner: Runner) -> tuple[_Experts, tuple[Words, ...]]:
        """Return the bits of act, nothing compared."""
        experts, _, words, _ = self._run(runner)
        return experts, (words,)

    def _run(self, runner: Runner) -> tuple[_Experts, NormedInput, Words, Words]:
        program, experts, source, act = self._make(runner)
        inputs = {**source.inputs, experts.routing_ref: experts.routing}
        words, log = runner.run(program, inputs, act, experts.log_ref)
        return experts, source, words, log

    def time(self, runner: Runner) -> float | None:
        """Measure GB of weights per second on the device."""
        program, experts, source, _ = self._make(runner)
        runner.run(program, {**source.inputs, experts.routing_ref: experts.routing})
        runtime = runner.nanoseconds(program)
        n_bytes = experts.n_slots * (experts.shape.gate.n_bytes + experts.shape.up.n_bytes)
        return n_bytes / runtime if runtime else None

    def _make(self, runner: Runner) -> tuple[Program, _Experts, NormedInput, TensorRef]:
        rng = np.random.default_rng(self.seed)
        types = (*self.types, None)
        experts = _Experts(runner, types, self.use, self.n_rows, self.n_columns, rng)
        source = NormedInput(self.n_columns, self.n_partials, rng)
        act = TensorRef("act", experts.n_slots * self.n_rows + 1)
        program = Program("expert_gate_up")
        op = OpContext(program, self.tuning, "gate/up")
        expert_gate_up(op, experts.block, source.x_ref, act, source.norm, self.activation)
        return program, experts, source, act

    def _twin(self, experts: _Experts, source: NormedInput) -> tuple[Wide, Wide]:
        """Compute the wanted values, and how far each may be off.

        |d silu(g) / dg| <= 1.1 carries what gate's sum is off, |silu(g)| what up's is. The clamped
        kind adds 1 to up, and its slopes are no larger.
        """
        gate, up, scale = experts.of_slots(0), experts.of_slots(1), source.scale
        biases = experts.biases_of_slots(0), experts.biases_of_slots(1)
        parts, sizes = [], []
        for matrix, bias in zip((gate, up), biases, strict=True):
            added = np.zeros(1) if bias is None else bias.astype(np.float64)
            parts.append(matvec_twin(matrix, source.x, scale) + added)
            sizes.append(matvec_twin(np.abs(matrix), np.abs(source.x), scale) + np.abs(added))
        shift = 0.0 if self.activation == "silu" else 1.0
        of_gate = 1.1 * sizes[0] * (np.abs(parts[1]) + shift)
        of_up = (np.abs(parts[0]) if shift else np.abs(silu(parts[0]))) * (sizes[1] + shift)
        wanted = gate_up_twin(gate, up, source.x, scale, biases, self.activation)
        return wanted, of_gate + of_up


@dataclass(frozen=True)
class DownCase:
    """Checks hidden += weighted sum over the slots of down @ act."""

    tuning: Tuning
    type: str
    use: Use
    n_rows: int
    n_columns: int
    seed: int = 0

    def run(self, runner: Runner) -> Checks:
        experts, left, act, (*words, log) = self._run(runner)
        down = experts.of_slots(2)
        biases = experts.biases_of_slots(2)
        wanted = down_twin(down, act, experts.weights, left.before, left.gain, biases)
        terms = np.einsum("src,sc->sr", np.abs(down).astype(np.float64), np.abs(act))
        if biases is not None:
            terms += np.abs(biases)
        magnitude = np.abs(left.before) + np.abs(experts.weights).astype(np.float64) @ terms
        checks = Checks()
        if experts.landing:
            experts.compare_landing(runner, log, 1, checks)
            _compare_plain(self, runner, words, checks)
        left.compare(checks, words, wanted, magnitude, self.tuning.rows)
        return checks

    def words(self, runner: Runner) -> tuple[_Experts, tuple[Words, ...]]:
        """Return the bits of hidden, gained and the partial sums, nothing compared."""
        experts, _, _, words = self._run(runner)
        return experts, words[:-1]

    def _run(
        self, runner: Runner
    ) -> tuple[_Experts, LeftState, NDArray[np.float32], tuple[Words, ...]]:
        program, experts, left, act, act_ref = self._make(runner)
        inputs = {act_ref: act, experts.routing_ref: experts.routing}
        inputs |= {left.refs.hidden: left.before}
        words = runner.run(program, inputs, *left.outputs, experts.log_ref)
        return experts, left, act, words

    def time(self, runner: Runner) -> float | None:
        """Measure GB of weights per second on the device."""
        program, experts, _, act, act_ref = self._make(runner)
        runner.run(program, {act_ref: act, experts.routing_ref: experts.routing})
        runtime = runner.nanoseconds(program)
        return experts.n_slots * experts.shape.down.n_bytes / runtime if runtime else None

    def _make(
        self,
        runner: Runner,
    ) -> tuple[Program, _Experts, LeftState, NDArray[np.float32], TensorRef]:
        rng = np.random.default_rng(self.seed)
        types = (None, None, self.type)
        experts = _Experts(runner, types, self.use, self.n_columns, self.n_rows, rng)
        left = LeftState(runner, self.n_rows, -(-self.n_rows // self.tuning.rows), rng)
        act = rng.standard_normal((experts.n_slots, self.n_columns)).astype(np.float32)
        act_ref = TensorRef("act", act.size)
        program = Program("expert_down")
        op = OpContext(program, self.tuning, "down")
        expert_down(op, experts.block, act_ref, left.refs)
        return program, experts, left, act, act_ref


def _compare_plain(
    case: GateUpCase | DownCase, runner: Runner, words: Sequence[Words], checks: Checks
) -> None:
    """Compare what a kernel that keeps left with what the plain one leaves."""
    plain = replace(case, use=replace(case.use, kept=None))
    with Runner(runner.device) as other:
        _, wanted = plain.words(other)
    for found, same in zip(words, wanted, strict=True):
        checks.equal("bits of the plain kernel", found, same)


SPAN_ALIGNMENT, BIAS_ALIGNMENT = 256, 16
POISON = 0xFF  # bytes that are NaN in every type
N_LAYERS, LAYER = 3, 1  # of the log


@dataclass(frozen=True)
class Use:
    """Says how experts are used: their number and that of the slots; not `routed`: one fixed span.

    Every slot has an expert of its own if there are as many, else they are drawn. `damaged_row` is
    a row that is NaN in every matrix of every expert. The slots of `kept`, if it is given, have a
    landing place that what is read of them is stored to. Spans may have biases; the weight of the
    fixed span may be that of a routing slot.
    """

    n_experts: int
    n_slots: int
    routed: bool = True
    damaged_row: int | None = None
    kept: tuple[int, ...] | None = None
    biased: bool = False
    weight_slot: int | None = None


class _Experts:
    """Draws `use.n_experts` random spans of gate and up [inner, width] and down [width, inner].

    A type of None leaves its matrix empty.
    """

    def __init__(
        self,
        runner: Runner,
        types: Sequence[str | None],
        use: Use,
        inner: int,
        width: int,
        rng: np.random.Generator,
    ) -> None:
        self._rng, self._use = rng, use
        self.shape = _layout(types, inner, width, use.biased)
        self.ids = self._draw_ids()
        self.n_slots = len(self.ids)
        self.weights = rng.uniform(-1.0, 1.0, self.n_slots).astype(np.float32)
        spans = np.full((use.n_experts, self.shape.span_bytes), POISON, np.uint8)
        matrices = (self.shape.gate, self.shape.up, self.shape.down)
        self._rows = [self._fill(spans, matrix) for matrix in matrices]
        self._biases = [
            self._fill_biases(spans, start, matrix.n_rows)
            for start, matrix in zip(self.shape.biases or (), matrices, strict=False)
        ]
        spans[np.setdiff1d(np.arange(use.n_experts), self.ids)] = POISON
        address = runner.place(spans)
        self._spans, self._address = spans, address
        self._log = RoutingLog(N_LAYERS, use.n_slots)
        self.log_ref = self._log.tensor
        self._landing_address = 0
        self.landing = self._land(runner)
        n_words = 6 * self.n_slots
        if use.weight_slot is not None:
            n_words = shared_weight_word(use.weight_slot) + 1
        self.routing_ref = TensorRef("routing", n_words)
        self.routing = self._routing(address)
        self.block = ExpertBlock(
            self.shape,
            self.routing_ref,
            self.n_slots,
            (memory_range(address, spans.nbytes),),
            self.landing,
            span=0 if use.routed else address,
            weight_rank=use.weight_slot,
        )

    def of_slots(self, which: int) -> NDArray[np.float32]:
        """Decode gate (0), up (1) or down (2) of every slot: [n_slots, n_rows, n_columns]."""
        matrix = (self.shape.gate, self.shape.up, self.shape.down)[which]
        values = decode_rows(matrix.type, self._rows[which], matrix.n_columns)
        return values.reshape(-1, matrix.n_rows, matrix.n_columns)[self.ids]

    def biases_of_slots(self, which: int) -> NDArray[np.float32] | None:
        """Return biases of gate (0), up (1) or down (2) of every slot [n_slots, n_rows], if any."""
        return self._biases[which][self.ids] if self._biases else None

    def compare_landing(
        self, runner: Runner, log: NDArray[np.uint32], half: int, checks: Checks
    ) -> None:
        """Check that landing places hold their homes' bytes, and nothing else; homes are unchanged.

        `half` 0: gate and up were stored and noted in `log`, 1: down.
        """
        use = self._use
        assert use.kept is not None
        found = self.landed(runner)
        wanted, kept = np.full(found.shape, POISON, np.uint8), kept_bytes(self.shape)
        for place, slot in enumerate(use.kept):
            wanted[place, kept] = self._spans[self.ids[slot], kept]
        checks.equal("landing places", found, wanted)
        homes = runner.fetch(self._address, self._spans.size).reshape(self._spans.shape)
        checks.equal("homes", homes, self._spans)
        expected = np.full(self.log_ref.n_words, SENTINEL, np.uint32)
        words = self._log.views(expected).filled[0, LAYER, :, half]
        words[:] = 0
        words[list(use.kept)] = 1 + self.ids[list(use.kept)]
        checks.equal("log", log, expected)

    def landed(self, runner: Runner) -> Bytes:
        """Read the landing places: uint8 [n kept slots, span_bytes]; at least one."""
        n_places, n_bytes = max(1, len(self._use.kept or ())), self.shape.span_bytes
        return runner.fetch(self._landing_address, n_places * n_bytes).reshape(n_places, n_bytes)

    def _land(self, runner: Runner) -> LandingMemory | None:
        """Make landing places for the kept slots, in a row."""
        if self._use.kept is None:
            return None
        places = np.full(max(1, len(self._use.kept)) * self.shape.span_bytes, POISON, np.uint8)
        self._landing_address = runner.place(places)
        memory = memory_range(self._landing_address, places.size)
        return LandingMemory((memory,), self.log_ref, self._log.filled(LAYER))

    def _draw_ids(self) -> NDArray[np.int64]:
        n_experts, n_slots = self._use.n_experts, self._use.n_slots
        if not self._use.routed:
            return np.zeros(1, np.int64)
        if n_slots == n_experts:
            return self._rng.permutation(n_experts)
        return self._rng.integers(0, n_experts, n_slots)

    def _fill(self, spans: Bytes, matrix: SpanMatrix) -> Bytes:
        """Write a matrix into every span; returns its file rows, expert after expert."""
        n_experts = len(spans)
        if not matrix.n_rows:
            return np.zeros((0, 0), np.uint8)
        rows = random_rows(matrix.type, n_experts * matrix.n_rows, matrix.n_columns, self._rng)
        if self._use.damaged_row is not None:
            rows[self._use.damaged_row :: matrix.n_rows] = POISON
        laid_out = to_device(matrix.type, rows, matrix.n_columns).reshape(n_experts, -1)
        spans[:, matrix.offset : matrix.offset + matrix.n_bytes] = laid_out
        return rows

    def _fill_biases(self, spans: Bytes, start: int, n_rows: int) -> NDArray[np.float32]:
        """Write biases [n_experts, n_rows] into every span, some beyond where gpt-oss clamps."""
        values = self._rng.uniform(-9.0, 9.0, (len(spans), n_rows)).astype(np.float32)
        spans[:, start : start + 4 * n_rows] = values.view(np.uint8)
        return values

    def _fixed_routing(self) -> NDArray[np.uint32]:
        """Make words of which none may be read but perhaps a weight."""
        words = np.full(self.routing_ref.n_words, SENTINEL, np.uint32)
        if self._use.weight_slot is None:
            self.weights = np.ones(1, np.float32)
        else:
            words[-1:] = self.weights.view(np.uint32)
        return words

    def _routing(self, address: int) -> NDArray[np.uint32]:
        """Make words of ids, weights, addresses and partners, as router_topk leaves them."""
        if not self._use.routed:
            return self._fixed_routing()
        span_bytes = np.uint64(self.shape.span_bytes)
        addresses = np.uint64(address) + self.ids.astype(np.uint64) * span_bytes
        partners = np.zeros(self.n_slots, np.uint64)
        for index, slot in enumerate(self._use.kept or ()):
            partners[slot] = self._landing_address + index * self.shape.span_bytes
        parts = (self.ids.astype(np.uint32), self.weights, addresses, partners)
        return np.concatenate([part.view(np.uint32) for part in parts])


def _layout(types: Sequence[str | None], inner: int, width: int, biased: bool) -> ExpertShape:
    """Lay out gate, up and down, each at a multiple of SPAN_ALIGNMENT; then biases."""
    matrices: list[SpanMatrix] = []
    end = 0
    shapes = ((inner, width), (inner, width), (width, inner))
    for kind, (n_rows, n_columns) in zip(types, shapes, strict=True):
        name = kind or "F32"
        row_bytes = device_row_bytes(name, n_columns)
        matrices.append(SpanMatrix(name, end, n_rows if kind else 0, n_columns, row_bytes))
        end = -(-(end + matrices[-1].n_bytes) // SPAN_ALIGNMENT) * SPAN_ALIGNMENT
    gate, up, down = matrices
    if not biased:
        return ExpertShape(gate, up, down, end)
    starts = []  # with a gap of a byte at least behind each
    for matrix in matrices:
        starts.append(end)
        end = -(-(end + 4 * matrix.n_rows + 1) // BIAS_ALIGNMENT) * BIAS_ALIGNMENT
    return ExpertShape(gate, up, down, end, SpanBiases(*starts))
