"""Appends the feed-forward of the used experts: gate/up, activation, down, weighted sum, residual.

Experts are reached through the addresses that `router_topk` looked up, or a fixed span (dense
feed-forward, shared expert). Variants that keep also store what they read of a missed expert at its
partner.
Shaders: expert_gate_up.comp, expert_down.comp. Twins: vkmoe/reference/experts.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from vkmoe.facts import Activation
from vkmoe.gpu.kernels import kernel
from vkmoe.gpu.program import Range, TensorRef, memory_range
from vkmoe.ops.context import OpContext
from vkmoe.ops.expert_spans import ExpertShape, SpanBiases
from vkmoe.ops.gather import LandingMemory
from vkmoe.ops.norms import NormInput, NormOutput
from vkmoe.ops.router import shared_weight_word

__all__ = ["ExpertBlock", "expert_down", "expert_gate_up"]

_GATE_UP = (
    "r:x r:norm_partials r:routing rw:act",
    "address:span u32:gate_offset u32:up_offset u32:gate_bias u32:up_bias u32:n_rows u32:row_bytes "
    "u32:n_blocks u32:n_slots u32:n_partials f32:inverse_width f32:eps",
    "workgroup_size rows pass activation biased",
)
_DOWN = (
    "r:act r:routing rw:hidden w:gained w:partials",
    "address:span address:gain u32:down_offset u32:down_bias u32:weight_word u32:n_rows "
    "u32:row_bytes u32:n_blocks u32:n_slots u32:slot_vec4s",
    "workgroup_size rows biased",
)


def _keeping(bindings: str, push: str, constants: str) -> tuple[str, str, str]:
    """Declare the variant that keeps: it has the log besides."""
    return f"{bindings} w:log", f"{push} u32:first_filled", constants


EXPERT_GATE_UP = kernel("expert_gate_up", *_GATE_UP)
EXPERT_GATE_UP_KEEP = kernel("expert_gate_up_keep", *_keeping(*_GATE_UP))
EXPERT_DOWN = kernel("expert_down", *_DOWN)
EXPERT_DOWN_KEEP = kernel("expert_down_keep", *_keeping(*_DOWN))

BOTH, GATE_ONLY, UP_ONLY = 0, 1, 2
ACTIVATIONS: tuple[Activation, ...] = ("silu", "swiglu_oai")  # as the shader numbers them
NO_WORD = 0xFFFFFFFF
NO_BIASES = SpanBiases(0, 0, 0)


@dataclass(frozen=True)
class ExpertBlock:
    """Describes experts of one feed-forward and shape: those the routing names, or one fixed span.

    With `landing`, what is read of a slot that has a partner is stored there, and noted.
    """

    shape: ExpertShape
    routing: TensorRef
    n_slots: int = 1  # used experts
    ranges: tuple[Range, ...] = ()  # the bytes that routed experts may lie in
    landing: LandingMemory | None = None
    span: int = 0  # address of the fixed expert; 0: the routed ones
    weight_slot: int | None = None  # slot of the routing with the fixed expert's weight; None: 1

    def __post_init__(self) -> None:
        assert self.weight_slot is None or self.span, "only a fixed span takes a weight of its own"
        assert not self.landing or self.landing.n_used == self.n_slots, self

    @property
    def memory(self) -> tuple[Range, ...]:
        """List the ranges that are read by address."""
        return (memory_range(self.span, self.shape.span_bytes),) if self.span else self.ranges


def expert_gate_up(
    op: OpContext,
    experts: ExpertBlock,
    x: TensorRef,
    act: TensorRef,
    norm: NormInput,
    activation: Activation = "silu",
) -> None:
    """Append act[slot] = f(gate @ norm(x), up @ norm(x)) for the routed slots, or the fixed span.

    f(g, u) is silu(g) * u, or with "swiglu_oai" that of gpt-oss; biases, if any, are added before.
    One dispatch, or two when gate and up have different types.
    """
    shape, n_slots, keep = experts.shape, experts.n_slots, experts.landing
    spec = EXPERT_GATE_UP_KEEP if keep else EXPERT_GATE_UP
    passes = [(shape.gate, BOTH)]
    if shape.gate.type != shape.up.type:
        passes = [(shape.gate, GATE_ONLY), (shape.up, UP_ONLY)]
    n_rows, biases = shape.gate.n_rows, shape.biases or NO_BIASES
    assert act.n_words >= n_slots * n_rows
    for matrix, which in passes:
        # A row of both takes two dot products: the number of these stays the same.
        rows = max(1, op.tuning.rows // 2) if which == BOTH else op.tuning.rows
        op.append(
            spec.dispatch(
                f"{spec.name}.{matrix.type.lower()}{op.tuning.dot_suffix}",
                {
                    "workgroup_size": op.tuning.workgroup_size,
                    "rows": rows,
                    "pass": which,
                    "activation": ACTIVATIONS.index(activation),
                    "biased": int(shape.biases is not None),
                },
                {"x": x, "norm_partials": norm.partials, "routing": experts.routing, "act": act}
                | _log_tensor(keep),
                {
                    "span": experts.span,
                    "gate_offset": shape.gate.offset,
                    "up_offset": shape.up.offset,
                    "gate_bias": biases.gate,
                    "up_bias": biases.up,
                    "n_rows": n_rows,
                    "row_bytes": matrix.row_bytes,
                    "n_blocks": matrix.n_blocks,
                    "n_slots": n_slots,
                    "n_partials": norm.n_partials,
                    "inverse_width": 1.0 / norm.width,
                    "eps": norm.eps,
                }
                | _log_push(keep),
                (-(-n_rows // rows), n_slots, 1),
                op.label,
                ranges={
                    "act": act.words(0, n_slots * n_rows),
                    "norm_partials": norm.partials.words(0, norm.n_partials),
                }
                | _log_range(keep),
                memory_reads=experts.memory,
                memory_writes=keep.ranges if keep else (),
                subgroup_size=op.tuning.required_subgroup_size,
            )
        )


def expert_down(op: OpContext, experts: ExpertBlock, act: TensorRef, output: NormOutput) -> int:
    """Append hidden += sum of weight * (down @ act + bias) over the slots.

    Returns its number of partials. The weight of a fixed span is 1, or that of routing slot
    `weight_slot`: the one behind the used ones, a shared expert's.
    """
    shape, keep, weight_slot = experts.shape, experts.landing, experts.weight_slot
    matrix, spec = shape.down, EXPERT_DOWN_KEEP if keep else EXPERT_DOWN
    n_groups = -(-matrix.n_rows // op.tuning.rows)
    op.append(
        spec.dispatch(
            f"{spec.name}.{matrix.type.lower()}{op.tuning.dot_suffix}",
            {
                "workgroup_size": op.tuning.workgroup_size,
                "rows": op.tuning.rows,
                "biased": int(shape.biases is not None),
            },
            {
                "act": act,
                "routing": experts.routing,
                "hidden": output.hidden,
                "gained": output.gained,
                "partials": output.partials,
            }
            | _log_tensor(keep),
            {
                "span": experts.span,
                "gain": output.gain,
                "down_offset": matrix.offset,
                "down_bias": (shape.biases or NO_BIASES).down,
                "weight_word": NO_WORD if weight_slot is None else shared_weight_word(weight_slot),
                "n_rows": matrix.n_rows,
                "row_bytes": matrix.row_bytes,
                "n_blocks": matrix.n_blocks,
                "n_slots": experts.n_slots,
                "slot_vec4s": matrix.n_columns // 4,
            }
            | _log_push(keep),
            (n_groups, 1, 1),
            op.label,
            ranges=_log_range(keep),
            memory_reads=(*experts.memory, memory_range(output.gain, 4 * matrix.n_rows)),
            memory_writes=keep.ranges if keep else (),
            subgroup_size=op.tuning.required_subgroup_size,
        )
    )
    return output.n_partials(n_groups)


def _log_tensor(keep: LandingMemory | None) -> dict[str, TensorRef]:
    return {"log": keep.log} if keep else {}


def _log_push(keep: LandingMemory | None) -> dict[str, int]:
    return {"first_filled": keep.first_word} if keep else {}


def _log_range(keep: LandingMemory | None) -> dict[str, Range]:
    return {"log": keep.filled} if keep else {}
