"""Appends the transform that rows of some caches are rounded behind, of what is not cached itself.

Queries and sums of values are transformed in their place. Shader: hadamard.comp.
"""

from __future__ import annotations

from typing import NamedTuple

from vkmoe.gpu.kernels import kernel
from vkmoe.gpu.program import TensorRef
from vkmoe.kernels.context import OpContext

HADAMARD = kernel(
    "hadamard",
    "rw:values r:params",
    "u32:offset u32:pitch u32:stride u32:head_dims u32:n_heads",
    "workgroup_size block",
)


class HeadRows(NamedTuple):
    """Says where the heads of each row lie in a tensor, f32, in words."""

    rows: TensorRef
    offset: int  # at which the first head of a row begins
    n_heads: int
    stride: int  # from head to head
    head_dims: int


def hadamard(op: OpContext, heads: HeadRows, block: int, params: TensorRef) -> None:
    """Append heads = H heads / sqrt(block) of each row, block by block; nothing for blocks of 1.

    H is the Walsh-Hadamard matrix. Must hold: blocks divide heads.
    """
    if block == 1:
        return
    assert heads.head_dims % block == 0, (heads, block)
    n_blocks = heads.n_heads * heads.head_dims // block
    n_words = (heads.n_heads - 1) * heads.stride + heads.head_dims
    numbers = {"pitch": heads.rows.row_words, "block": block, **heads._asdict()}
    op.append(
        HADAMARD.dispatch(
            "hadamard",
            {**vars(op.tuning), **numbers},
            {"values": heads.rows.rows(op.n_rows, heads.offset, n_words), "params": params},
            (-(-n_blocks // op.tuning.workgroup_size), op.n_rows, 1),
            f"{op.label} transform",
        )
    )
