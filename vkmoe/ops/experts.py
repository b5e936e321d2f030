"""The feed-forward of the used experts: gate/up with SiLU, then down, weighted sum and residual.

Experts are reached through the addresses that `router_topk` looked up, or a fixed span (dense
feed-forward). Variants that keep also store what they read of a missed expert at its partner.
Shaders: expert_gate_up.comp, expert_down.comp. Twins: vkmoe/reference/experts.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.gpu.kernels import kernel
from vkmoe.gpu.program import Program, Range, TensorRef, memory_range
from vkmoe.ops.gather import LandingMemory
from vkmoe.ops.matvec import BLOCK_WEIGHTS
from vkmoe.ops.norms import NormInput, NormOutput
from vkmoe.ops.tuning import Tuning
from vkmoe.quants.types import TYPES

__all__ = ["ExpertShape", "SpanBiases", "SpanMatrix", "expert_down", "expert_gate_up", "kept_bytes"]

_GATE_UP = (
    "r:x r:norm_partials r:routing rw:act",
    "address:span u32:gate_offset u32:up_offset u32:n_rows u32:row_bytes u32:n_blocks u32:n_slots "
    "u32:n_partials f32:inverse_width f32:eps",
    "workgroup_size rows pass",
)
_DOWN = (
    "r:act r:routing rw:hidden w:gained w:partials",
    "address:span address:gain u32:down_offset u32:n_rows u32:row_bytes u32:n_blocks u32:n_slots "
    "u32:slot_vec4s",
    "workgroup_size rows",
)


def _keeping(bindings: str, push: str, constants: str) -> tuple[str, str, str]:
    """The same kernel when it keeps."""
    return f"{bindings} w:log", f"{push} u32:first_filled u32:n_used", constants


EXPERT_GATE_UP = kernel("expert_gate_up", *_GATE_UP)
EXPERT_GATE_UP_KEEP = kernel("expert_gate_up_keep", *_keeping(*_GATE_UP))
EXPERT_DOWN = kernel("expert_down", *_DOWN)
EXPERT_DOWN_KEEP = kernel("expert_down_keep", *_keeping(*_DOWN))

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


class SpanBiases(NamedTuple):
    """Where the biases start in a span, in bytes: f32 vectors, one number for each row."""

    gate: int
    up: int
    down: int


@dataclass(frozen=True)
class ExpertShape:
    """The layout of one expert's span, the same for all experts of a layer."""

    gate: SpanMatrix
    up: SpanMatrix
    down: SpanMatrix
    span_bytes: int
    biases: SpanBiases | None = None


def kept_bytes(shape: ExpertShape) -> NDArray[np.bool_]:
    """Which bytes of a span [span_bytes] kernels read, and so store in landing places.

    All of its matrices but the padding at the end of rows, which no kernel looks at.
    """
    kept = np.zeros(shape.span_bytes, np.bool_)
    for matrix in (shape.gate, shape.up, shape.down):
        row_bytes = TYPES[matrix.type].row_bytes(matrix.n_columns)
        rows = kept[matrix.offset : matrix.offset + matrix.n_bytes]
        rows.reshape(matrix.n_rows, matrix.row_bytes)[:, : -(-row_bytes // 4) * 4] = True
    return kept


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
    keep: LandingMemory | None = None,
) -> None:
    """act[slot] = silu(gate @ norm(x)) * (up @ norm(x)) for the routed slots, or the fixed `span`.

    `homes` are the bytes the routed experts may lie in. With `keep`, what is read of a slot that
    has a partner is stored there, and noted. One dispatch, or two when gate and up have different
    types.
    """
    spec = EXPERT_GATE_UP_KEEP if keep else EXPERT_GATE_UP
    passes = [(shape.gate, BOTH)]
    if shape.gate.type != shape.up.type:
        passes = [(shape.gate, GATE_ONLY), (shape.up, UP_ONLY)]
    reads = (memory_range(span, shape.span_bytes),) if span else homes
    n_rows = shape.gate.n_rows
    assert act.n_words >= n_slots * n_rows
    for matrix, which in passes:
        rows = max(1, tuning.rows // 2) if which == BOTH else tuning.rows  # dots stay the same
        program.append(
            spec.dispatch(
                f"{spec.name}.{matrix.type.lower()}{tuning.dot_suffix}",
                {"workgroup_size": tuning.workgroup_size, "rows": rows, "pass": which},
                {"x": x, "norm_partials": norm.partials, "routing": routing, "act": act}
                | _log_tensor(keep),
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
                }
                | _log_push(keep),
                (-(-n_rows // rows), n_slots, 1),
                label,
                ranges={
                    "act": act.words(0, n_slots * n_rows),
                    "norm_partials": norm.partials.words(0, norm.n_partials),
                }
                | _log_range(keep),
                memory_reads=reads,
                memory_writes=keep.ranges if keep else (),
                subgroup_size=tuning.required_subgroup_size,
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
    keep: LandingMemory | None = None,
) -> int:
    """hidden += sum of weight * (down @ act) over the slots. Returns its number of partials.

    `keep` as for `expert_gate_up`.
    """
    matrix, spec = shape.down, EXPERT_DOWN_KEEP if keep else EXPERT_DOWN
    n_groups = -(-matrix.n_rows // tuning.rows)
    expert_reads = (memory_range(span, shape.span_bytes),) if span else homes
    program.append(
        spec.dispatch(
            f"{spec.name}.{matrix.type.lower()}{tuning.dot_suffix}",
            {"workgroup_size": tuning.workgroup_size, "rows": tuning.rows},
            {
                "act": act,
                "routing": routing,
                "hidden": output.hidden,
                "gained": output.gained,
                "partials": output.partials,
            }
            | _log_tensor(keep),
            {
                "span": span,
                "gain": output.gain,
                "down_offset": matrix.offset,
                "n_rows": matrix.n_rows,
                "row_bytes": matrix.row_bytes,
                "n_blocks": matrix.n_blocks,
                "n_slots": n_slots,
                "slot_vec4s": matrix.n_columns // 4,
            }
            | _log_push(keep),
            (n_groups, 1, 1),
            label,
            ranges=_log_range(keep),
            memory_reads=(*expert_reads, memory_range(output.gain, 4 * matrix.n_rows)),
            memory_writes=keep.ranges if keep else (),
            subgroup_size=tuning.required_subgroup_size,
        )
    )
    return output.n_partials(n_groups)


def _log_tensor(keep: LandingMemory | None) -> dict[str, TensorRef]:
    return {"log": keep.log} if keep else {}


def _log_push(keep: LandingMemory | None) -> dict[str, int]:
    return {"first_filled": keep.first_word, "n_used": keep.n_used} if keep else {}


def _log_range(keep: LandingMemory | None) -> dict[str, Range]:
    return {"log": keep.filled} if keep else {}
