"""Appends attention of one token over compressed rows (multi-head latent attention, absorbed form).

DeepSeek-V2, arXiv:2405.04434, section 2.1; shapes: attention_shapes.py. Shaders:
latent_attention.comp, attention_combine.comp. Twin: vkmoe/reference/attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from vkmoe.gpu.kernels import kernel
from vkmoe.gpu.program import Program, TensorRef, memory_range
from vkmoe.ops.attention import AttentionTensors, combine_splits
from vkmoe.ops.attention_shapes import ROPE_STYLES, AttentionSplit, LatentShape

__all__ = ["LatentCache", "LatentQkv", "latent_attention"]

LATENT_ATTENTION = kernel(
    "latent_attention",
    "r:absorbed r:params r:q r:kv w:partials",
    "address:rows address:rope_table address:gain "
    "u32:context u32:q_offset u32:kv_offset f32:eps f32:scale",
    "workgroup_size kv_rank rope_dim nope_dim rope_style n_splits "
    "team_lanes step_positions workgroup_heads",
)


@dataclass(frozen=True)
class LatentCache:
    """Holds addresses of one layer's cache and of what its attention reads besides."""

    rows: int  # [context][kv_rank + rope_dim], in the shape's kv_type
    rope_table: int
    gain: int  # f32 [kv_rank], of the norm of the compressed part


class LatentQkv(NamedTuple):
    """Holds what a token brings to latent attention; q and kv may be one tensor."""

    absorbed: TensorRef  # f32 [n_heads * kv_rank]
    q: TensorRef  # raw f32 [n_heads][nope_dim + rope_dim], of which the rope part is read
    kv: TensorRef  # raw f32 [kv_rank + rope_dim]
    q_offset: int = 0  # word at which q begins
    kv_offset: int = 0


def latent_attention(
    program: Program,
    shape: LatentShape,
    split: AttentionSplit,
    cache: LatentCache,
    qkv: LatentQkv,
    tensors: AttentionTensors,
    label: str,
) -> None:
    """Append out = attention of the token in `params` over the cache, once its row is there.

    out f32 [n_heads * kv_rank]. Two dispatches.
    """
    absorbed, q, kv, q_offset, kv_offset = qkv
    split.check(shape)
    n_absorbed, n_partials = shape.n_heads * shape.kv_rank, split.partials_words(shape)
    cached = memory_range(cache.rows, shape.cache_bytes)
    program.append(
        LATENT_ATTENTION.dispatch(
            f"latent_attention.{shape.kv_type.lower()}{'+subgroup' if split.subgroup else ''}",
            {
                "workgroup_size": split.workgroup_size,
                "kv_rank": shape.kv_rank,
                "rope_dim": shape.rope_dim,
                "nope_dim": shape.nope_dim,
                "rope_style": ROPE_STYLES[shape.rope_style],
                "n_splits": split.n_splits,
                "team_lanes": split.team_lanes,
                "step_positions": split.step_positions,
                "workgroup_heads": split.workgroup_heads,
            },
            {"absorbed": absorbed, "q": q, "kv": kv}
            | {"params": tensors.params, "partials": tensors.partials},
            {
                "rows": cache.rows,
                "rope_table": cache.rope_table,
                "gain": cache.gain,
                "context": shape.context,
                "q_offset": q_offset,
                "kv_offset": kv_offset,
                "eps": shape.eps,
                "scale": shape.scale,
            },
            (shape.n_heads // split.workgroup_heads, split.n_splits, 1),
            label,
            ranges={
                "absorbed": absorbed.words(0, n_absorbed),
                "q": q.words(q_offset, shape.q_width),
                "kv": kv.words(kv_offset, shape.row_dim),
                "partials": tensors.partials.words(0, n_partials),
            },
            memory_reads=(
                cached,
                memory_range(cache.rope_table, shape.rope_bytes),
                memory_range(cache.gain, 4 * shape.kv_rank),
            ),
            memory_writes=(cached,),
        )
    )
    combine_splits(program, shape, split, tensors, label)
