"""Appends the gates of what tokens bring to a layer besides the state. Shader: gate_inputs.comp."""

from __future__ import annotations

from vkmoe.gpu.kernels import kernel
from vkmoe.gpu.program import TensorRef
from vkmoe.kernels.context import OpContext

GATE_INPUTS = kernel(
    "gate_inputs",
    "rw:gates r:inputs",
    "u32:width u32:gates_pitch u32:inputs_offset u32:inputs_pitch",
    "workgroup_size",
)


def gate_inputs(
    op: OpContext, gates: TensorRef, inputs: TensorRef, offset: int, width: int
) -> None:
    """Append gates = gelu(gates) * inputs, f32 [width] of each row of the batch.

    The inputs of a row begin at its word `offset`.
    """
    op.append(
        GATE_INPUTS.dispatch(
            "gate_inputs",
            {
                **vars(op.tuning),
                **{"width": width, "inputs_offset": offset},
                **{"gates_pitch": gates.row_words, "inputs_pitch": inputs.row_words},
            },
            {
                "gates": gates.rows(op.n_rows, 0, width),
                "inputs": inputs.rows(op.n_rows, offset, width),
            },
            (-(-width // op.tuning.workgroup_size), 1, op.n_rows),
            op.label,
        )
    )
