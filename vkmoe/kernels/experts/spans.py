"""Draws experts and places them on the device, for the cases of the kernels that read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.choices import Layout
from vkmoe.gpu.program import Range, memory_range
from vkmoe.gpu.runner import SENTINEL, Runner
from vkmoe.kernels.comparison import Checks, Words
from vkmoe.kernels.experts.operations import (
    DESCRIPTOR_BYTES,
    ExpertBlock,
    ExpertShape,
    SpanBiases,
    SpanMatrix,
    described,
    descriptors,
    kept_bytes,
)
from vkmoe.kernels.inputs import decode_rows, drawn_scales, random_rows
from vkmoe.kernels.memory.operations import LandingMemory
from vkmoe.kernels.router.operations import RoutingLog, shared_weight_word
from vkmoe.kernels.rows import ALL, RowBatch
from vkmoe.quants import device_row_bytes, to_device
from vkmoe.quants.types import Bytes

GATE, UP, DOWN = range(3)  # the matrices of a span
SPAN_ALIGNMENT, BIAS_ALIGNMENT = 256, 16
POISON = 0xFF  # bytes that are NaN in every type
N_LAYERS, LAYER = 3, 1  # of the log


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


class Spans:
    """Draws random spans of experts; those that are not `used` and the gaps in the others are NaN.

    `damaged_row` is a row that is NaN in every matrix.
    """

    def __init__(
        self,
        shape: ExpertShape,
        n_experts: int,
        used: NDArray[np.integer],
        layout: Layout,
        rng: np.random.Generator,
        damaged_row: int | None = None,
    ) -> None:
        self.shape, self._layout, self._rng = shape, layout, rng
        self._matrices = (shape.gate, shape.up, shape.down)
        self.data = np.full((n_experts, shape.span_bytes), POISON, np.uint8)
        self._scales = [drawn_scales(matrix.type, n_experts, rng) for matrix in self._matrices]
        self._rows = [
            self._fill(matrix, scales, damaged_row)
            for matrix, scales in zip(self._matrices, self._scales, strict=True)
        ]
        starts = shape.biases or (None, None, None)
        # [n_experts, n_rows] of GATE, UP and DOWN; zeros where there are none
        self.biases = [
            self._fill_biases(start, matrix.n_rows)
            for start, matrix in zip(starts, self._matrices, strict=True)
        ]
        self.data[np.setdiff1d(np.arange(n_experts), used)] = POISON

    def values(self, which: int) -> NDArray[np.float32]:
        """Decode GATE, UP or DOWN of every expert: [n_experts, n_rows, n_columns]."""
        matrix = self._matrices[which]
        if not matrix.n_rows:
            return np.zeros((len(self.data), 0, matrix.n_columns), np.float32)
        values = decode_rows(matrix.type, self._rows[which], matrix.n_columns)
        values = values.reshape(len(self.data), matrix.n_rows, matrix.n_columns)
        return np.asarray(values * self._scales[which][:, None, None], np.float32)

    def place(self, runner: Runner) -> PlacedSpans:
        """Place the spans; CPUs reach each by the addresses of its parts."""
        shape, n_experts, address = self.shape, len(self.data), runner.place(self.data)
        steps = np.arange(n_experts, dtype=np.uint64)
        addresses = address + steps * np.uint64(shape.span_bytes)
        memory: tuple[Range, ...] = (memory_range(address, self.data.nbytes),)
        if self._layout == "planes":
            return PlacedSpans(shape, addresses, memory)
        made = descriptors(shape, addresses)
        made.scales[:] = np.stack(self._scales, axis=1)
        parts = made.words
        first = runner.place(parts)
        addresses = first + steps * np.uint64(DESCRIPTOR_BYTES)
        memory = (*memory, memory_range(first, parts.nbytes))
        return PlacedSpans(described(shape), addresses, memory)

    def _fill(
        self, matrix: SpanMatrix, scales: NDArray[np.float32], damaged_row: int | None
    ) -> Bytes:
        """Write a matrix into every span; returns its file rows, expert after expert."""
        n_experts = len(self.data)
        if not matrix.n_rows:
            return np.zeros((0, 0), np.uint8)
        rows = random_rows(matrix.type, n_experts * matrix.n_rows, matrix.n_columns, self._rng)
        if damaged_row is not None:
            rows[damaged_row :: matrix.n_rows] = POISON
        of_rows = np.repeat(scales, matrix.n_rows)
        laid_out = to_device(
            matrix.type, rows, matrix.n_columns, layout=self._layout, scale=of_rows
        )
        part = slice(matrix.offset, matrix.offset + matrix.n_bytes)
        self.data[:, part] = laid_out.reshape(n_experts, -1)
        return rows

    def _fill_biases(self, start: int | None, n_rows: int) -> NDArray[np.float32]:
        """Write biases into every span, some beyond where gpt-oss clamps."""
        if start is None:
            return np.zeros((len(self.data), n_rows), np.float32)
        values = self._rng.uniform(-9.0, 9.0, (len(self.data), n_rows)).astype(np.float32)
        self.data[:, start : start + 4 * n_rows] = values.view(np.uint8)
        return values


class PlacedExperts:
    """Draws `use.n_experts` spans of gate and up [inner, width] and down [width, inner].

    A type of None leaves its matrix empty. Each row of a batch uses the same experts, from another
    one on.
    """

    def __init__(
        self,
        runner: Runner,
        batch: RowBatch,
        types: Sequence[str | None],
        use: Use,
        form: tuple[int, int],
        rng: np.random.Generator,
    ) -> None:
        """Draw and place everything; `form` is (inner, width)."""
        self._use, layout = use, runner.device.info.layout
        self.shape = span_layout(types, *form, use.biased, layout)
        self.ids = self._draw_ids(rng)
        self.n_slots = len(self.ids)
        self._weights = rng.uniform(-1.0, 1.0, self.n_slots).astype(np.float32)
        if not use.routed and use.weight_slot is None:
            self._weights = np.ones(1, np.float32)
        self._spans = Spans(self.shape, use.n_experts, self.ids, layout, rng, use.damaged_row)
        self._placed = self._spans.place(runner)
        self.log = RoutingLog(N_LAYERS, use.n_slots, batch.n_rows)
        # One landing place at least, so that it has an address.
        landing = np.full((max(1, len(use.kept or ())), self.shape.span_bytes), POISON, np.uint8)
        self._landing = memory_range(runner.place(landing), landing.size)
        self.routing = np.array([self._routed(row) if use.routed else self._fixed() for row in ALL])
        self.routing_ref = batch.tensor("routing", self.routing.shape[1])

    @property
    def block(self) -> ExpertBlock:
        """Describe the experts, as the routing names them or as the fixed span."""
        use = self._use
        return ExpertBlock(
            self._placed.shape,
            self.routing_ref,
            self.n_slots,
            self._placed.memory,
            None if use.kept is None else LandingMemory((self._landing,), self.log, LAYER),
            span=0 if use.routed else int(self._placed.addresses[0]),
            weight_rank=use.weight_slot,
            sparse=use.n_absent > 0,
        )

    def of_slots(self, which: int, row: int) -> NDArray[np.float32]:
        """Return GATE, UP or DOWN of every slot of a row: [n_slots, n_rows, n_columns]."""
        return self._spans.values(which)[np.roll(self.ids, row)]

    def biases_of_slots(self, which: int, row: int) -> NDArray[np.float32]:
        """Return biases of GATE, UP or DOWN of every slot of a row: [n_slots, n_rows]."""
        return self._spans.biases[which][np.roll(self.ids, row)]

    def weights(self, row: int) -> NDArray[np.float32]:
        """Return the weights of the slots of a row."""
        return np.roll(self._weights, row)

    def compare_landing(self, runner: Runner, log: Words, half: int, checks: Checks) -> None:
        """Check that landing places hold their homes' bytes, and nothing else; homes are unchanged.

        `half` 0: gate and up were stored and noted in `log`, 1: down.
        """
        slots, spans = list(self._use.kept or ()), self._spans.data
        found, read = self.landed(runner), kept_bytes(self.shape)
        wanted = np.full(found.shape, POISON, np.uint8)
        wanted[: len(slots), read] = spans[self.ids[slots]][:, read]
        checks.equal("landing places", found, wanted)
        homes = runner.fetch(self._placed.memory[0].start, spans.size)
        checks.equal("homes", homes.reshape(spans.shape), spans)
        expected = np.full(len(log), SENTINEL, np.uint32)
        words = self.log.views(expected).filled[0, LAYER, :, half]
        words[:] = 0
        words[slots] = 1 + self.ids[slots]
        checks.equal("log", log, expected)

    def landed(self, runner: Runner) -> Bytes:
        """Read the landing places: uint8 [n kept slots, span_bytes]; at least one."""
        start, end = self._landing.start, self._landing.end
        return runner.fetch(start, end - start).reshape(-1, self.shape.span_bytes)

    def _draw_ids(self, rng: np.random.Generator) -> NDArray[np.int64]:
        n_experts, n_slots = self._use.n_experts, self._use.n_slots
        if not self._use.routed:
            return np.zeros(1, np.int64)
        if n_slots == n_experts:
            return rng.permutation(n_experts)
        return rng.integers(0, n_experts, n_slots)

    def _fixed(self) -> Words:
        """Make the words of a routing of which none may be read but perhaps a weight."""
        if self._use.weight_slot is None:
            return np.full(6, SENTINEL, np.uint32)
        words = np.full(shared_weight_word(self._use.weight_slot) + 1, SENTINEL, np.uint32)
        words[-1:] = self._weights.view(np.uint32)
        return words

    def _routed(self, row: int) -> Words:
        """Make the words of ids, weights, addresses and partners of a row."""
        span_bytes, kept = self.shape.span_bytes, list(self._use.kept or ())
        addresses = self._placed.addresses[self.ids]
        addresses[self.n_slots - self._use.n_absent :] = 0
        partners = np.zeros(self.n_slots, np.uint64)
        partners[kept] = self._landing.start + span_bytes * np.arange(len(kept), dtype=np.uint64)
        parts = self.ids.astype(np.uint32), self._weights, addresses, partners
        return np.concatenate([np.roll(part, row).view(np.uint32) for part in parts])


class PlacedSpans(NamedTuple):
    """Says where the spans of experts lie, and by what kernels find the parts of each."""

    shape: ExpertShape
    addresses: NDArray[np.uint64]  # of each expert
    memory: tuple[Range, ...]


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
