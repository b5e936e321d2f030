"""The feed-forward of the used experts: gate/up with SiLU, then down, weighted sum and residual.

Experts are reached through the addresses that `router_topk` looked up, or a fixed span (dense
feed-forward). Shaders: expert_gate_up.comp, expert_down.comp. Twins: vkmoe/reference/experts.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from vkmoe.gpu.kernels import kernel
from vkmoe.gpu.program import Program, Range, TensorRef, memory_range
from vkmoe.ops.matvec import BLOCK_WEIGHTS
from vkmoe.ops.norms import NormInput, NormOutput
from vkmoe.ops.tuning import Tuning

__all__ = ["ExpertShape", "SpanMatrix", "expert_down", "expert_gate_up"]

EXPERT_GATE_UP = kernel(
    "expert_gate_up",
    "r:x r:norm_partials r:routing rw:act",
    "address:span u32:gate_offset u32:up_offset u32:n_rows u32:row_bytes u32:n_blocks u32:n_slots "
    "u32:n_partials f32:inverse_width f32:eps",
    "workgroup_size rows pass",
)
EXPERT_DOWN = kernel(
    "expert_down",
    "r:act r:routing rw:hidden w:gained w:partials",
    "address:span address:gain u32:down_offset u32:n_rows u32:row_bytes u32:n_blocks u32:n_slots "
    "u32:slot_vec4s",
    "workgroup_size rows",
)

BOTH, GATE_ONLY, UP_ONLY = 0, 1, 2


@dataclass(frozen=True)
class SpanMatrix:
    """One matrix of an expert: where it starts in the span, and its form."""

    type: str
    offset: int
    n_rows: int
    n_columns: int
    row_bytes: int

    @property
    def n_blocks(self) -> int:
        return self.n_columns // BLOCK_WEIGHTS[self.type]

    @property
    def n_bytes(self) -> int:
        return self.n_rows * self.row_bytes


@dataclass(frozen=True)
class ExpertShape:
    """The layout of one expert's span, the same for all experts of a layer."""

    gate: SpanMatrix
    up: SpanMatrix
    down: SpanMatrix
    span_bytes: int


def expert_gate_up(
    program: Program,
    tuning: Tuning,
    shape: ExpertShape,
    x: TensorRef,
    routing: TensorRef,
    act: TensorRef,
    n_slots: int,
    norm: NormInput,
    homes: tuple[Range, ...],
    label: str,
    span: int = 0,
) -> None:
    """act[slot] = silu(gate @ norm(x)) * (up @ norm(x)) for the routed slots, or the fixed `span`.

    `homes` are the bytes the routed experts may lie in. One dispatch, or two when gate and up have
    different types.
    """
    passes = [(shape.gate, BOTH)]
    if shape.gate.type != shape.up.type:
        passes = [(shape.gate, GATE_ONLY), (shape.up, UP_ONLY)]
    reads = (memory_range(span, shape.span_bytes),) if span else homes
    n_rows = shape.gate.n_rows
    assert act.n_words >= n_slots * n_rows
    for matrix, which in passes:
        rows = max(1, tuning.rows // 2) if which == BOTH else tuning.rows  # dots stay the same
        program.append(
            EXPERT_GATE_UP.dispatch(
                f"expert_gate_up.{matrix.type.lower()}{tuning.dot_suffix}",
                {"workgroup_size": tuning.workgroup_size, "rows": rows, "pass": which},
                {"x": x, "norm_partials": norm.partials, "routing": routing, "act": act},
                {
                    "span": span,
                    "gate_offset": shape.gate.offset,
                    "up_offset": shape.up.offset,
                    "n_rows": n_rows,
                    "row_bytes": matrix.row_bytes,
                    "n_blocks": matrix.n_blocks,
                    "n_slots": n_slots,
                    "n_partials": norm.n_partials,
                    "inverse_width": 1.0 / norm.width,
                    "eps": norm.eps,
                },
                (-(-n_rows // rows), n_slots, 1),
                label,
                ranges={
                    "act": act.words(0, n_slots * n_rows),
                    "norm_partials": norm.partials.words(0, norm.n_partials),
                },
                memory_reads=reads,
            )
        )


def expert_down(
    program: Program,
    tuning: Tuning,
    shape: ExpertShape,
    act: TensorRef,
    routing: TensorRef,
    n_slots: int,
    output: NormOutput,
    homes: tuple[Range, ...],
    label: str,
    span: int = 0,
) -> int:
    """hidden += sum of weight * (down @ act) over the slots. Returns its number of partials."""
    matrix = shape.down
    n_groups = -(-matrix.n_rows // tuning.rows)
    expert_reads = (memory_range(span, shape.span_bytes),) if span else homes
    program.append(
        EXPERT_DOWN.dispatch(
            f"expert_down.{matrix.type.lower()}{tuning.dot_suffix}",
            {"workgroup_size": tuning.workgroup_size, "rows": tuning.rows},
            {
                "act": act,
                "routing": routing,
                "hidden": output.hidden,
                "gained": output.gained,
                "partials": output.partials,
            },
            {
                "span": span,
                "gain": output.gain,
                "down_offset": matrix.offset,
                "n_rows": matrix.n_rows,
                "row_bytes": matrix.row_bytes,
                "n_blocks": matrix.n_blocks,
                "n_slots": n_slots,
                "slot_vec4s": matrix.n_columns // 4,
            },
            (n_groups, 1, 1),
            label,
            memory_reads=(*expert_reads, memory_range(output.gain, 4 * matrix.n_rows)),
        )
    )
    return output.n_partials(n_groups)
