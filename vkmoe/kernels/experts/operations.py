"""Appends the feed-forward of the experts that each row of a batch uses: gate/up, activation, down,
weighted sum, residual.

Experts are reached through the addresses that `router_topk` looked up, or a fixed span (dense
feed-forward, shared expert). Missed experts may come to lie on the device in the same submit: a
kernel gathers them first, or variants that keep store what they read at an expert's partner.
Shaders: expert_gate_up.comp, expert_down.comp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.facts import Activation
from vkmoe.gpu.kernels import KernelSpec, kernel
from vkmoe.gpu.program import Bound, Range, TensorRef, memory_range
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.launches import kernel_class
from vkmoe.kernels.matvec.operations import Rows
from vkmoe.kernels.memory.operations import LandingMemory
from vkmoe.kernels.norms.operations import NOT_NORMED, NormInput, NormOutput
from vkmoe.kernels.router.operations import shared_weight_word
from vkmoe.quants.layouts import used_row_bytes

_GATE_UP = (
    "r:x r:norm_partials r:routing rw:act",
    "address:span u32:gate_offset u32:up_offset u32:gate_bias u32:up_bias u32:n_rows u32:row_bytes "
    "u32:n_blocks u32:n_slots u32:n_partials f32:inverse_width f32:eps "
    "u32:x_pitch u32:partials_pitch u32:routing_pitch u32:act_pitch",
    "workgroup_size rows pass activation biased loaded_words",
)
_DOWN = (
    "r:act r:routing rw:hidden w:gained w:partials",
    "address:span address:gain u32:down_offset u32:down_bias u32:weight_word u32:n_rows "
    "u32:row_bytes u32:n_blocks u32:n_slots u32:slot_vec4s u32:act_pitch u32:routing_pitch "
    "u32:hidden_pitch u32:partials_pitch",
    "workgroup_size rows biased loaded_words sparse adds",
)


def _keeping(name: str, bindings: str, push: str, constants: str) -> KernelSpec:
    """Register the variant of a kernel that keeps: it has the log besides."""
    return kernel(f"{name}_keep", f"{bindings} w:log", f"{push} u32:first_filled", constants)


# `n_slots` counts used experts, of which `slot_vec4s` is what one has of `act`.
EXPERT_GATE_UP = kernel("expert_gate_up", *_GATE_UP)
EXPERT_GATE_UP_KEEP = _keeping("expert_gate_up", *_GATE_UP)
EXPERT_DOWN = kernel("expert_down", *_DOWN)
EXPERT_DOWN_KEEP = _keeping("expert_down", *_DOWN)

# Addresses of gate, up, down, and of their biases; bytes of gate, up and down that are read ahead.
DESCRIPTOR_BYTES = 88
BOTH, GATE_ONLY, UP_ONLY = 0, 1, 2
# As the shader numbers them.
ACTIVATIONS: tuple[Activation, ...] = ("silu", "swiglu_oai", "geglu")
NO_WORD = 0xFFFFFFFF
MOST_KEPT_WORDS = 8  # of 16 bytes: with more, AMD's cards have room for 4 to 6 waves in place of 8


# ----- what an expert is, and where it lies -----


@dataclass(frozen=True)
class SpanMatrix(Rows):
    """Describes one matrix of an expert: where it starts in the span, and its form."""

    type: str
    offset: int
    n_rows: int
    n_columns: int
    row_bytes: int


class SpanBiases(NamedTuple):
    """Says where the biases start in a span, in bytes: f32 vectors, one number for each row."""

    gate: int
    up: int
    down: int


@dataclass(frozen=True)
class ExpertShape:
    """Lays out one expert's span, the same for all experts of a layer."""

    gate: SpanMatrix
    up: SpanMatrix
    down: SpanMatrix
    span_bytes: int
    biases: SpanBiases | None = None

    @property
    def numbers(self) -> dict[str, int]:
        """Return what kernels need to find matrices and biases in a span, as they name it."""
        biases = self.biases or SpanBiases(0, 0, 0)
        return {
            "biased": int(self.biases is not None),
            "gate_offset": self.gate.offset,
            "up_offset": self.up.offset,
            "down_offset": self.down.offset,
            "gate_bias": biases.gate,
            "up_bias": biases.up,
            "down_bias": biases.down,
        }


def described(shape: ExpertShape) -> ExpertShape:
    """Return how CPUs find an expert's parts, which need not lie together: by their addresses.

    At an expert's address stand those of its matrices and biases (`descriptor`).
    """
    matrices = (shape.gate, shape.up, shape.down)
    gate, up, down = (replace(matrix, offset=8 * i) for i, matrix in enumerate(matrices))
    biases = SpanBiases(24, 32, 40) if shape.biases is not None else None
    return ExpertShape(gate, up, down, DESCRIPTOR_BYTES, biases)


class Descriptors(NamedTuple):
    """Holds what CPUs read at the addresses of experts, in one array."""

    words: NDArray[np.uint64]  # [n_experts, 11]

    @classmethod
    def of(cls, n_experts: int) -> Descriptors:
        """Make descriptors of nothing, whose matrices have the scale 1."""
        made = cls(np.zeros((n_experts, DESCRIPTOR_BYTES // 8), np.uint64))
        made.scales[:] = 1.0
        return made

    @property
    def addresses(self) -> NDArray[np.uint64]:
        """Return the addresses of gate, up, down and of their biases, or 0: [n_experts, 6]."""
        return self.words[:, :6]

    @property
    def sizes(self) -> NDArray[np.uint64]:
        """Return the bytes of gate, up and down where the file is larger than memory: [n, 3]."""
        return self.words[:, 6:9]

    @property
    def scales(self) -> NDArray[np.float32]:
        """Return what the weights of gate, up and down are multiplied by: [n_experts, 3]."""
        return self.words[:, 9:].view(np.float32)[:, :3]


def descriptors(shape: ExpertShape, spans: NDArray[np.uint64]) -> Descriptors:
    """Make the descriptors of experts that lie whole at `spans` [n_experts], in memory."""
    made = Descriptors.of(len(spans))
    offsets = (shape.gate.offset, shape.up.offset, shape.down.offset, *(shape.biases or (0, 0, 0)))
    made.addresses[:] = spans[:, None] + np.array(offsets, np.uint64)
    return made


def kept_bytes(shape: ExpertShape) -> NDArray[np.bool_]:
    """Mark the bytes of a span [span_bytes] that kernels read: all but padding of rows and ends."""
    kept = np.zeros(shape.span_bytes, np.bool_)
    matrices = (shape.gate, shape.up, shape.down)
    for matrix in matrices:
        row_bytes = used_row_bytes(matrix.type, matrix.n_columns)
        rows = kept[matrix.offset : matrix.offset + matrix.n_bytes]
        rows.reshape(matrix.n_rows, matrix.row_bytes)[:, : -(-row_bytes // 4) * 4] = True
    for start, matrix in zip(shape.biases or (), matrices, strict=False):
        kept[start : start + 4 * matrix.n_rows] = True
    return kept


@dataclass(frozen=True)
class ExpertBlock:
    """Describes experts of one feed-forward and shape: those the routing names, or one fixed span.

    With `landing`, what is read of an expert that has a partner is stored there, and noted.
    """

    shape: ExpertShape
    routing: TensorRef
    n_used: int = 1
    ranges: tuple[Range, ...] = ()  # the bytes that routed experts may lie in
    landing: LandingMemory | None = None
    span: int = 0  # address of the fixed expert; 0: the routed ones
    weight_rank: int | None = None  # rank of the fixed expert's weight in the routing; None: 1
    sparse: bool = False  # used experts without an address come last, and are left out

    def __post_init__(self) -> None:
        assert self.weight_rank is None or self.span, "only a fixed span takes a weight of its own"
        assert not self.landing or self.landing.n_used == self.n_used, self
        assert not (self.sparse and self.span), "a fixed span has an address"

    @property
    def memory(self) -> tuple[Range, ...]:
        """List the ranges that are read by address."""
        return (memory_range(self.span, self.shape.span_bytes),) if self.span else self.ranges

    def numbers(self, op: OpContext) -> dict[str, object]:
        """Return what kernels need besides a matrix, as they name it."""
        words = op.tuning.loaded_words
        numbers = {**vars(op.tuning), **self.shape.numbers, "span": self.span}
        numbers |= {"n_slots": self.n_used, "routing_pitch": self.routing.row_words}
        if self.landing:  # registers for where what is loaded is stored come on top
            numbers["loaded_words"] = min(words // 2, MOST_KEPT_WORDS)
            numbers["first_filled"] = self.landing.first_word
        return numbers

    def bound(self, op: OpContext) -> dict[str, Bound]:
        """Bind the routing, and the log if experts are kept."""
        log = {"log": self.landing.bound} if self.landing else {}
        return {"routing": self.routing.rows(op.n_rows), **log}

    @property
    def landing_ranges(self) -> tuple[Range, ...]:
        return self.landing.ranges if self.landing else ()


# ----- the kernels -----


def gate_up_passes(shape: ExpertShape) -> list[tuple[SpanMatrix, int]]:
    """List the dispatches of gate and up: one, or two where their types differ."""
    if shape.gate.type != shape.up.type:
        return [(shape.gate, GATE_ONLY), (shape.up, UP_ONLY)]
    return [(shape.gate, BOTH)]


def expert_gate_up(
    op: OpContext,
    experts: ExpertBlock,
    x: TensorRef,
    act: TensorRef,
    norm: NormInput | None,
    activation: Activation = "silu",
) -> None:
    """Append act[rank] = f(gate @ norm(x), up @ norm(x)) for the used experts, or the fixed span.

    Of each row of the batch; without `norm` x is taken as it is. f(g, u) is silu(g) * u, with
    "swiglu_oai" that of gpt-oss, with "geglu" gelu(g) * u; biases, if any, are added before.
    """
    spec, n_used = EXPERT_GATE_UP_KEEP if experts.landing else EXPERT_GATE_UP, experts.n_used
    for matrix, which in gate_up_passes(experts.shape):
        n_rows, n_columns = n_used * matrix.n_rows, matrix.n_columns
        launch = op.tuning.launch(kernel_class("expert_gate_up", matrix.type, n_rows, n_columns))
        rows = max(1, launch.rows // 2) if which == BOTH else launch.rows  # of two dot products
        dispatch = spec.dispatch(
            f"{spec.name}.{matrix.type.lower()}{op.tuning.dot_suffix}",
            {
                **experts.numbers(op),
                **launch._asdict(),
                **matrix.numbers,
                **(norm.numbers if norm else NOT_NORMED),
                **{"rows": rows, "pass": which, "activation": ACTIVATIONS.index(activation)},
                **{"x_pitch": x.row_words // 4, "act_pitch": act.row_words},
            },
            {
                "x": x.rows(op.n_rows),
                "norm_partials": norm.tensor(op.n_rows) if norm else x.part(0, 0),  # not read
                "act": act.rows(op.n_rows, 0, n_rows),
                **experts.bound(op),
            },
            (-(-matrix.n_rows // rows), n_used, op.n_rows),
            op.label,
            reads=experts.memory,
            writes=experts.landing_ranges,
        )
        op.launch(dispatch, launch)


def expert_down(op: OpContext, experts: ExpertBlock, act: TensorRef, output: NormOutput) -> int:
    """Append hidden += sum of weight * (down @ act + bias) over the used experts.

    Of each row of the batch; returns the number of partials of one. The weight of a fixed span is
    1, or that of `weight_rank`: the one behind the used ones, a shared expert's. Where the output
    does not add, a row without any expert stays what it is, or becomes 0 if the block is sparse:
    its experts are elsewhere.
    """
    matrix, rank = experts.shape.down, experts.weight_rank
    spec = EXPERT_DOWN_KEEP if experts.landing else EXPERT_DOWN
    n_columns = experts.n_used * matrix.n_columns
    launch = op.tuning.launch(kernel_class("expert_down", matrix.type, matrix.n_rows, n_columns))
    n_groups = -(-matrix.n_rows // launch.rows)
    dispatch = spec.dispatch(
        f"{spec.name}.{matrix.type.lower()}{op.tuning.dot_suffix}",
        {
            **experts.numbers(op),
            **launch._asdict(),
            **matrix.numbers,
            **output.numbers,
            "sparse": int(experts.sparse),
            "weight_word": NO_WORD if rank is None else shared_weight_word(rank),
            "slot_vec4s": matrix.n_columns // 4,
            "act_pitch": act.row_words // 4,
        },
        {"act": act.rows(op.n_rows), **output.tensors(op.n_rows), **experts.bound(op)},
        (n_groups, 1, op.n_rows),
        op.label,
        reads=(*experts.memory, memory_range(output.gain, 4 * matrix.n_rows)),
        writes=experts.landing_ranges,
    )
    op.launch(dispatch, launch)
    return output.n_partials(n_groups)
