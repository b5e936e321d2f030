"""Decode attention of one token over compressed rows (multi-head latent attention, absorbed form).

DeepSeek-V2, arXiv:2405.04434, section 2.1; shapes: attention_shapes.py. Shaders:
latent_attention.comp, attention_combine.comp. Twin: vkmoe/reference/latent_attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from vkmoe.gpu.program import Program, TensorRef
from vkmoe.ops.attention_shapes import LatentShape
from vkmoe.ops.attention_split import AttentionSplit

__all__ = ["LatentCache", "LatentShape", "latent_attention"]


@dataclass(frozen=True)
class LatentCache:
    """Addresses of one layer's cache and of what its attention reads besides."""

    rows: int  # [context][kv_rank + rope_dim], in the shape's kv_type
    rope_table: int
    gain: int  # f32 [kv_rank], of the norm of the compressed part


def latent_attention(
    program: Program,
    shape: LatentShape,
    split: AttentionSplit,
    cache: LatentCache,
    absorbed: TensorRef,
    q: TensorRef,
    kv: TensorRef,
    params: TensorRef,
    partials: TensorRef,
    out: TensorRef,
    label: str,
    *,
    q_offset: int = 0,
    kv_offset: int = 0,
) -> None:
    """out = attention of the token in `params` over the cache, to which its row is appended.

    `absorbed` f32 [n_heads * kv_rank]; `q` raw f32 [n_heads][nope_dim + rope_dim] from word
    `q_offset`, of which the rope part is read; `kv` raw f32 [kv_rank + rope_dim] from word
    `kv_offset`; q and kv may be one tensor. out f32 [n_heads * kv_rank]. Two dispatches.
    """
    assert absorbed.n_words >= shape.n_heads * shape.kv_rank
    assert q.n_words >= q_offset + shape.q_width and kv.n_words >= kv_offset + shape.row_dim
    assert partials.n_words >= split.partials_words(shape)
    assert out.n_words >= shape.n_heads * shape.kv_rank
    raise AssertionError(f"{label}: latent_attention.comp is not compiled yet")
