"""The join of attention's splits: the second dispatch of `attention` and of `latent_attention`.

Shader: attention_combine.comp. Twin: vkmoe/reference/attention.py.
"""

from __future__ import annotations

from vkmoe.gpu.kernels import kernel
from vkmoe.gpu.program import Program, TensorRef, memory_range
from vkmoe.ops.attention_shapes import AttentionShape, LatentShape
from vkmoe.ops.attention_split import AttentionSplit

__all__ = ["combine_splits"]

ATTENTION_COMBINE = kernel(
    "attention_combine",
    "r:partials r:params w:out",
    "address:sinks u32:context u32:window",
    "workgroup_size head_dim n_splits",
)


def combine_splits(
    program: Program,
    shape: AttentionShape | LatentShape,
    split: AttentionSplit,
    params: TensorRef,
    partials: TensorRef,
    out: TensorRef,
    label: str,
    *,
    window: int = 0,
    sinks: int = 0,
) -> None:
    """out f32 [n_heads * value_dim] = the splits' partials, joined; `sinks` 0 = none."""
    n_partials, n_out = split.partials_words(shape), shape.n_heads * shape.value_dim
    assert partials.n_words >= n_partials and out.n_words >= n_out, (partials, out)
    program.append(
        ATTENTION_COMBINE.dispatch(
            "attention_combine",
            {
                "workgroup_size": split.workgroup_size,
                "head_dim": shape.value_dim,
                "n_splits": split.n_splits,
            },
            {"partials": partials, "params": params, "out": out},
            {"sinks": sinks, "context": shape.context, "window": window},
            (shape.n_heads, 1, 1),
            label,
            ranges={"partials": partials.words(0, n_partials), "out": out.words(0, n_out)},
            memory_reads=(memory_range(sinks, 4 * shape.n_heads),) if sinks else (),
        )
    )
