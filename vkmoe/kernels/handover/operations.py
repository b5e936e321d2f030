"""Appends what goes between two devices that compute experts of the same rows.

A device hands rows over in the memory `HANDED`, with what was chosen for them, and gets back in
`JOINED` what the other one adds to each; the host lets them take turns. Either finds which of the
experts are its own.
Shaders: find_experts.comp, join_rows.comp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from vkmoe.choices import BufferName
from vkmoe.gpu.kernels import kernel
from vkmoe.gpu.program import Program, Range, TensorRef
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.norms.operations import NormOutput
from vkmoe.kernels.router.operations import RouterShape, routing_words

FIND_EXPERTS = kernel(
    "find_experts",
    "rw:routing r:params",
    "u32:layer u32:n_used u32:routing_pitch",
    "workgroup_size n_experts",
)
JOIN_ROWS = kernel(
    "join_rows",
    "r:params r:given rw:hidden w:gained w:partials",
    "address:gain u32:row_vec4s u32:given_pitch u32:hidden_pitch u32:partials_pitch",
    "workgroup_size adds",
)
JOINED_VEC4S = 8  # that a lane joins
HANDED: BufferName = "handed rows"
JOINED: BufferName = "joined rows"  # both in host memory


class HandedRows(NamedTuple):
    """Describes the rows of a layer that are handed over: the normed state, and the routing."""

    x: TensorRef
    routing: TensorRef

    @property
    def n_bytes(self) -> int:
        """Count the bytes of all rows of both, which lie behind one another."""
        return self.x.n_bytes + self.routing.n_bytes

    def places(self, n_rows: int) -> Iterator[tuple[Range, Range, str]]:
        """Yield the first rows of each tensor, where these go, and what they are called."""
        start = 0
        for tensor in self:
            rows = tensor.rows(n_rows).range
            yield rows, Range(HANDED, start, start + rows.end), tensor.name
            start += tensor.n_bytes


def hand_over(program: Program, rows: HandedRows, n_rows: int) -> None:
    """Append the copies of the first rows to host memory."""
    for source, target, name in rows.places(n_rows):
        program.copy(source, target, f"{name} handed over")


def take_over(program: Program, rows: HandedRows, n_rows: int) -> None:
    """Append the copies of the first rows from there, on the other device."""
    for target, source, name in rows.places(n_rows):
        program.copy(source, target, f"{name} taken over")


def give_back(program: Program, joined: TensorRef, n_rows: int) -> None:
    """Append the copy of what is added to the first rows to host memory."""
    rows = joined.rows(n_rows).range
    program.copy(rows, Range(JOINED, 0, rows.end), "rows given back")


def take_back(program: Program, joined: TensorRef, n_rows: int) -> None:
    """Append the copy of what is added to the first rows from there, on the first device."""
    rows = joined.rows(n_rows).range
    program.copy(Range(JOINED, 0, rows.end), rows, "rows taken back")


def find_experts(
    op: OpContext,
    routing: TensorRef,
    params: TensorRef,
    shape: RouterShape,
    layer: int,
    table: Range,
) -> None:
    """Append routing = the same experts with their addresses in the table, those with one first.

    Of each row of the batch. The others' addresses are null, and so are all partners. `table` is
    the memory of the expert tables, of which the one named in `params` is read; `layer` counts MoE
    layers as it does.
    """
    assert 8 * (layer + 1) * shape.n_experts <= table.end - table.start
    numbers = {**vars(op.tuning), **vars(shape), "layer": layer, "routing_pitch": routing.row_words}
    op.append(
        FIND_EXPERTS.dispatch(
            "find_experts",
            numbers,
            {"routing": routing.rows(op.n_rows, 0, routing_words(shape)), "params": params},
            (1, 1, op.n_rows),
            op.label,
            reads=(table,),
        )
    )


def join_rows(
    op: OpContext, given: TensorRef, params: TensorRef, output: NormOutput, width: int
) -> int:
    """Append hidden += given, f32 [width] of each row that `params` has in use.

    Returns the number of partials of a row; 0 where the output's gain is null: then nothing is left
    for a fused norm.
    """
    assert width % 4 == 0, width
    row_vec4s = width // 4
    n_groups = -(-row_vec4s // (JOINED_VEC4S * op.tuning.workgroup_size))
    op.append(
        JOIN_ROWS.dispatch(
            "join_rows",
            {
                **vars(op.tuning),
                **output.numbers,
                "row_vec4s": row_vec4s,
                "given_pitch": given.row_words // 4,
            },
            {
                "params": params,
                "given": given.rows(op.n_rows, 0, width),
                **output.tensors(op.n_rows),
            },
            (n_groups, 1, op.n_rows),
            op.label,
        )
    )
    return output.n_partials(n_groups) if output.gain else 0
