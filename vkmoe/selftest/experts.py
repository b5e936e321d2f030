"""Compares expert_gate_up and expert_down with their twins, at routed addresses or a fixed span.

Of slots that are kept, what is read must also be in their landing places, byte for byte, and the
results must be those of the kernel that does not keep, bit by bit: the driver made two pipelines.
Whatever no kernel may look at is NaN: the gaps between the matrices of a span, the experts that no
slot uses, the routing of a fixed span, and landing places before something is stored there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.choices import Layout
from vkmoe.facts import Activation
from vkmoe.gpu.program import Program, Range, TensorRef, memory_range
from vkmoe.gpu.runner import SENTINEL, Runner
from vkmoe.ops.context import OpContext
from vkmoe.ops.experts import (
    DESCRIPTOR_BYTES,
    ExpertBlock,
    ExpertShape,
    LandingMemory,
    SpanBiases,
    SpanMatrix,
    described,
    descriptor,
    expert_down,
    expert_gate_up,
    kept_bytes,
)
from vkmoe.ops.launches import kernel_class
from vkmoe.ops.router import RoutingLog, shared_weight_word
from vkmoe.ops.tuning import Tuning
from vkmoe.quants import device_row_bytes, to_device
from vkmoe.quants.types import Bytes
from vkmoe.reference.experts import expert_down as down_twin
from vkmoe.reference.experts import expert_gate_up as gate_up_twin
from vkmoe.reference.experts import silu
from vkmoe.reference.matvec import matvec as matvec_twin
from vkmoe.selftest.comparison import Checks, KernelCase, Prepared, Words
from vkmoe.selftest.inputs import (
    LeftState,
    NormedInput,
    decode_rows,
    multiplied,
    random_rows,
    routing_of,
)

__all__ = [
    "DownCase",
    "GateUpCase",
    "PlacedExperts",
    "PlacedSpans",
    "Use",
    "activation_sizes",
    "place_spans",
    "span_layout",
]

GATE, UP, DOWN = range(3)  # the matrices of a span
SPAN_ALIGNMENT, BIAS_ALIGNMENT = 256, 16
POISON = 0xFF  # bytes that are NaN in every type
N_LAYERS, LAYER = 3, 1  # of the log

Wide = NDArray[np.float64]


@dataclass(frozen=True)
class Use:
    """Says how experts are used: their number and that of the slots; not `routed`: one fixed span.

    Every slot has an expert of its own if there are as many, else they are drawn. `damaged_row` is
    a row that is NaN in every matrix of every expert. The slots of `kept`, if it is given, have a
    landing place that what is read of them is stored to. Spans may have biases; the weight of the
    fixed span may be that of a routing slot. The last slots may be without an address.
    """

    n_experts: int
    n_slots: int
    routed: bool = True
    damaged_row: int | None = None
    kept: tuple[int, ...] | None = None
    biased: bool = False
    weight_slot: int | None = None
    n_absent: int = 0


@dataclass(frozen=True)
class GateUpCase(KernelCase):
    """Checks act = f(gate @ x, up @ x); gates and ups of different types take two dispatches."""

    tuning: Tuning
    types: tuple[str, str]
    use: Use
    n_rows: int
    n_columns: int
    n_partials: int = 3
    seed: int = 0
    activation: Activation = "silu"

    def prepare(self, runner: Runner) -> Prepared:
        return self.place(runner)[1]

    def place(self, runner: Runner) -> tuple[PlacedExperts, Prepared]:
        """Prepare the case, and return its experts too."""
        rng = np.random.default_rng(self.seed)
        types = (*self.types, None)
        experts = PlacedExperts(runner, types, self.use, self.n_rows, self.n_columns, rng)
        source = NormedInput(self.n_columns, self.n_partials, rng)
        act = TensorRef("act", experts.n_slots * self.n_rows + 1)
        program = Program("expert_gate_up")
        op = OpContext(program, self.tuning, "gate/up")
        expert_gate_up(op, experts.block, source.x_ref, act, source.norm, self.activation)

        def compare(checks: Checks, words: Sequence[Words]) -> None:
            _compare_kept(self, runner, experts, words, checks)
            wanted, magnitude = self._twin(experts, source)
            found = words[0][:-1].view(np.float32).reshape(wanted.shape)
            checks.close_where_finite("act", found, wanted, magnitude)
            checks.untouched("the word behind act", words[0][-1:])

        inputs = {**source.inputs, experts.routing_ref: experts.routing}
        n_bytes = experts.n_slots * (experts.shape.gate.n_bytes + experts.shape.up.n_bytes)
        outputs = (act, experts.log.tensor)
        return experts, Prepared(program, outputs, [(inputs, compare)], n_bytes)

    def _twin(self, experts: PlacedExperts, source: NormedInput) -> tuple[Wide, Wide]:
        """Compute the wanted values, and how far each may be off."""
        gate, up, scale = experts.of_slots(GATE), experts.of_slots(UP), source.scale
        biases = experts.biases_of_slots(GATE), experts.biases_of_slots(UP)
        of_gate, of_up = (multiplied(self.tuning, kind, source.x) for kind in self.types)
        parts, sizes = [], []
        for matrix, x, bias in zip((gate, up), (of_gate, of_up), biases, strict=True):
            parts.append(matvec_twin(matrix, x, scale, bias))
            sizes.append(matvec_twin(np.abs(matrix), np.abs(x), scale, np.abs(bias)))
        wanted = gate_up_twin((gate, up), (of_gate, of_up), scale, biases, self.activation)
        return wanted, activation_sizes(parts, sizes, self.activation)


def activation_sizes(parts: Sequence[Wide], sizes: Sequence[Wide], activation: Activation) -> Wide:
    """Compute how far each activated value may be off, from gate's and up's sums and their sizes.

    |d silu(g) / dg| <= 1.1 carries what gate's sum is off, |silu(g)| what up's is. The clamped kind
    adds 1 to up, and its slopes are no larger.
    """
    shift = 0.0 if activation == "silu" else 1.0
    of_gate = 1.1 * sizes[0] * (np.abs(parts[1]) + shift)
    of_up = (np.abs(parts[0]) if shift else np.abs(silu(parts[0]))) * (sizes[1] + shift)
    result: Wide = of_gate + of_up
    return result


@dataclass(frozen=True)
class DownCase(KernelCase):
    """Checks hidden += weighted sum over the slots of down @ act."""

    tuning: Tuning
    type: str
    use: Use
    n_rows: int
    n_columns: int
    seed: int = 0

    def prepare(self, runner: Runner) -> Prepared:
        return self.place(runner)[1]

    def place(self, runner: Runner) -> tuple[PlacedExperts, Prepared]:
        """Prepare the case, and return its experts too."""
        rng = np.random.default_rng(self.seed)
        types = (None, None, self.type)
        experts = PlacedExperts(runner, types, self.use, self.n_columns, self.n_rows, rng)
        n_columns = experts.n_slots * self.n_columns
        kernel = kernel_class("expert_down", self.type, self.n_rows, n_columns)
        left = LeftState(runner, self.n_rows, self.tuning.launch(kernel).rows, rng)
        act = rng.standard_normal((experts.n_slots, self.n_columns)).astype(np.float32)
        n_there = experts.n_slots - self.use.n_absent
        act[n_there:] = np.nan
        act_ref, program = TensorRef("act", act.size), Program("expert_down")
        expert_down(OpContext(program, self.tuning, "down"), experts.block, act_ref, left.refs)

        def compare(checks: Checks, words: Sequence[Words]) -> None:
            down, biases = experts.of_slots(DOWN)[:n_there], experts.biases_of_slots(DOWN)[:n_there]
            x, weights = (
                multiplied(self.tuning, self.type, act[:n_there]),
                experts.weights[:n_there],
            )
            wanted = down_twin(down, x, weights, left.before, left.gain, biases)
            terms = np.einsum("src,sc->sr", np.abs(down).astype(np.float64), np.abs(x))
            sizes = np.abs(weights).astype(np.float64) @ (terms + np.abs(biases))
            _compare_kept(self, runner, experts, words, checks)
            left.compare(checks, words[:-1], wanted, np.abs(left.before) + sizes)

        inputs = {act_ref: act, experts.routing_ref: experts.routing}
        inputs |= {left.refs.hidden: left.before}
        outputs = (*left.outputs, experts.log.tensor)
        n_bytes = experts.n_slots * experts.shape.down.n_bytes
        return experts, Prepared(program, outputs, [(inputs, compare)], n_bytes)


def _compare_kept(
    case: GateUpCase | DownCase,
    runner: Runner,
    experts: PlacedExperts,
    words: Sequence[Words],
    checks: Checks,
) -> None:
    """Compare what a kernel that keeps left, its log last, with homes and with the plain kernel."""
    if case.use.kept is None:
        return
    half = 0 if isinstance(case, GateUpCase) else 1
    experts.compare_landing(runner, words[-1], half, checks)
    with Runner(runner.device) as other:
        plain = replace(case, use=replace(case.use, kept=None)).words(other)
    for found, same in zip(words[:-1], plain[:-1], strict=True):
        checks.equal("bits of the plain kernel", found, same)


class PlacedExperts:
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
        layout = runner.device.info.layout
        self._layout: Layout = layout
        self.shape = span_layout(types, inner, width, use.biased, layout)
        self._matrices = (self.shape.gate, self.shape.up, self.shape.down)
        self.ids = self._draw_ids()
        self.n_slots = len(self.ids)
        self.weights = rng.uniform(-1.0, 1.0, self.n_slots).astype(np.float32)
        self._spans = np.full((use.n_experts, self.shape.span_bytes), POISON, np.uint8)
        self._rows = [self._fill(matrix) for matrix in self._matrices]
        starts = self.shape.biases or (None, None, None)
        self._biases = [
            self._fill_biases(start, matrix.n_rows)
            for start, matrix in zip(starts, self._matrices, strict=True)
        ]
        self._spans[np.setdiff1d(np.arange(use.n_experts), self.ids)] = POISON
        self._placed = place_spans(runner, self.shape, self._spans)
        self.log = RoutingLog(N_LAYERS, use.n_slots)
        # One landing place at least, so that it has an address.
        landing = np.full((max(1, len(use.kept or ())), self.shape.span_bytes), POISON, np.uint8)
        self._landing = memory_range(runner.place(landing), landing.size)
        self.routing = self._routed() if use.routed else self._fixed()
        self.routing_ref = TensorRef("routing", len(self.routing))
        self.block = self.block_of(self.routing_ref)

    def block_of(self, routing: TensorRef) -> ExpertBlock:
        """Describe the experts, as a routing names them or as the fixed span."""
        use = self._use
        return ExpertBlock(
            self._placed.shape,
            routing,
            self.n_slots,
            self._placed.memory,
            None if use.kept is None else LandingMemory((self._landing,), self.log, LAYER),
            span=0 if use.routed else int(self._placed.addresses[0]),
            weight_rank=use.weight_slot,
            sparse=use.n_absent > 0,
        )

    def of_slots(self, which: int) -> NDArray[np.float32]:
        """Decode GATE, UP or DOWN of every slot: [n_slots, n_rows, n_columns]."""
        matrix = self._matrices[which]
        values = decode_rows(matrix.type, self._rows[which], matrix.n_columns)
        return values.reshape(-1, matrix.n_rows, matrix.n_columns)[self.ids]

    def biases_of_slots(self, which: int) -> NDArray[np.float32]:
        """Return biases of GATE, UP or DOWN of every slot [n_slots, n_rows]; zeros without any."""
        return self._biases[which][self.ids]

    def compare_landing(self, runner: Runner, log: Words, half: int, checks: Checks) -> None:
        """Check that landing places hold their homes' bytes, and nothing else; homes are unchanged.

        `half` 0: gate and up were stored and noted in `log`, 1: down.
        """
        slots = list(self._use.kept or ())
        found, read = self.landed(runner), kept_bytes(self.shape)
        wanted = np.full(found.shape, POISON, np.uint8)
        wanted[: len(slots), read] = self._spans[self.ids[slots]][:, read]
        checks.equal("landing places", found, wanted)
        homes = runner.fetch(self._placed.memory[0].start, self._spans.size)
        homes = homes.reshape(self._spans.shape)
        checks.equal("homes", homes, self._spans)
        expected = np.full(len(log), SENTINEL, np.uint32)
        words = self.log.views(expected).filled[0, LAYER, :, half]
        words[:] = 0
        words[slots] = 1 + self.ids[slots]
        checks.equal("log", log, expected)

    def landed(self, runner: Runner) -> Bytes:
        """Read the landing places: uint8 [n kept slots, span_bytes]; at least one."""
        start, end = self._landing.start, self._landing.end
        return runner.fetch(start, end - start).reshape(-1, self.shape.span_bytes)

    def _draw_ids(self) -> NDArray[np.int64]:
        n_experts, n_slots = self._use.n_experts, self._use.n_slots
        if not self._use.routed:
            return np.zeros(1, np.int64)
        if n_slots == n_experts:
            return self._rng.permutation(n_experts)
        return self._rng.integers(0, n_experts, n_slots)

    def _fill(self, matrix: SpanMatrix) -> Bytes:
        """Write a matrix into every span; returns its file rows, expert after expert."""
        n_experts = len(self._spans)
        if not matrix.n_rows:
            return np.zeros((0, 0), np.uint8)
        rows = random_rows(matrix.type, n_experts * matrix.n_rows, matrix.n_columns, self._rng)
        if self._use.damaged_row is not None:
            rows[self._use.damaged_row :: matrix.n_rows] = POISON
        laid_out = to_device(matrix.type, rows, matrix.n_columns, layout=self._layout).reshape(
            n_experts, -1
        )
        self._spans[:, matrix.offset : matrix.offset + matrix.n_bytes] = laid_out
        return rows

    def _fill_biases(self, start: int | None, n_rows: int) -> NDArray[np.float32]:
        """Write biases [n_experts, n_rows] into every span, some beyond where gpt-oss clamps."""
        if start is None:
            return np.zeros((len(self._spans), n_rows), np.float32)
        values = self._rng.uniform(-9.0, 9.0, (len(self._spans), n_rows)).astype(np.float32)
        self._spans[:, start : start + 4 * n_rows] = values.view(np.uint8)
        return values

    def _fixed(self) -> Words:
        """Make the words of a routing of which none may be read but perhaps a weight."""
        if self._use.weight_slot is None:
            self.weights = np.ones(1, np.float32)
            return np.full(6, SENTINEL, np.uint32)
        words = np.full(shared_weight_word(self._use.weight_slot) + 1, SENTINEL, np.uint32)
        words[-1:] = self.weights.view(np.uint32)
        return words

    def _routed(self) -> Words:
        """Make the words of ids, weights, addresses and partners."""
        span_bytes, kept = self.shape.span_bytes, list(self._use.kept or ())
        addresses = self._placed.addresses[self.ids]
        addresses[self.n_slots - self._use.n_absent :] = 0
        partners = np.zeros(self.n_slots, np.uint64)
        partners[kept] = self._landing.start + span_bytes * np.arange(len(kept), dtype=np.uint64)
        return routing_of(self.ids.astype(np.uint32), self.weights, addresses, partners)


class PlacedSpans(NamedTuple):
    """Says where the spans of experts lie, and by what kernels find the parts of each."""

    shape: ExpertShape
    addresses: NDArray[np.uint64]  # of each expert
    memory: tuple[Range, ...]


def place_spans(runner: Runner, shape: ExpertShape, spans: Bytes) -> PlacedSpans:
    """Place spans [n_experts, span_bytes]; CPUs reach each by the addresses of its parts."""
    address = runner.place(spans)
    addresses = address + np.arange(len(spans), dtype=np.uint64) * np.uint64(shape.span_bytes)
    memory = (memory_range(address, spans.nbytes),)
    if runner.device.info.layout == "planes":
        return PlacedSpans(shape, addresses, memory)
    parts = np.stack([descriptor(shape, int(span)) for span in addresses])
    first = runner.place(parts)
    addresses = first + np.arange(len(spans), dtype=np.uint64) * np.uint64(DESCRIPTOR_BYTES)
    return PlacedSpans(described(shape), addresses, (*memory, memory_range(first, parts.nbytes)))


def span_layout(
    types: Sequence[str | None], inner: int, width: int, biased: bool, layout: Layout = "planes"
) -> ExpertShape:
    """Lay out gate, up and down, each at a multiple of SPAN_ALIGNMENT; then biases."""
    matrices: list[SpanMatrix] = []
    end = 0
    shapes = ((inner, width), (inner, width), (width, inner))
    for kind, (n_rows, n_columns) in zip(types, shapes, strict=True):
        name = kind or "F32"
        row_bytes = device_row_bytes(name, n_columns, layout)
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
