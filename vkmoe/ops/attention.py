"""Appends attention of one token: norm, RoPE, KV append, split softmax over the cache, the join.

Shaders: attention.comp, attention_combine.comp. Twins: vkmoe/reference/attention.py.
The join is also the second dispatch of latent_attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from vkmoe.gpu.kernels import kernel
from vkmoe.gpu.program import Program, Range, TensorRef, memory_range
from vkmoe.ops.attention_shapes import ROPE_STYLES, AttentionShape, AttentionSplit, LatentShape

__all__ = ["AttentionTensors", "KvCache", "attention", "combine_splits"]

ATTENTION = kernel(
    "attention",
    "r:qkv r:params w:partials",
    "address:k_cache address:v_cache address:q_gain address:k_gain address:rope_table "
    "u32:context f32:eps f32:scale u32:window",
    "workgroup_size head_dim n_heads n_kv_heads rotary_dim rope_style norm_mode n_splits "
    "team_lanes step_positions workgroup_heads",
)
NORM_MODES = {"none": 0, "per_head": 1, "full_width": 2}


@dataclass(frozen=True)
class KvCache:
    """Holds addresses of a layer's caches and what else its attention reads. Gain 0 = no norm.

    `sinks`: f32 [n_heads], one logit per head for the softmax's denominator; 0 = none.
    """

    keys: int
    values: int
    rope_table: int
    q_gain: int = 0
    k_gain: int = 0
    sinks: int = 0


class AttentionTensors(NamedTuple):
    """Holds what both dispatches of an attention work on, whatever its kind."""

    params: TensorRef  # of the token
    partials: TensorRef  # scratch: AttentionSplit.partials_words
    out: TensorRef  # f32 [n_heads * value_dim]


def attention(
    program: Program,
    shape: AttentionShape,
    split: AttentionSplit,
    cache: KvCache,
    qkv: TensorRef,
    tensors: AttentionTensors,
    label: str,
) -> None:
    """Append out = attention of the token in `params` over the cache, once its k and v are there.

    qkv f32 [qkv_width] raw; out f32 [n_heads * head_dim]. Two dispatches.
    """
    split.check(shape)
    assert qkv.n_words >= shape.qkv_width
    assert shape.norm == "none" or (cache.q_gain and cache.k_gain)
    assert shape.sinks == (cache.sinks != 0), (shape, cache)
    suffix = "+subgroup" if split.subgroup else ""
    caches = (
        memory_range(cache.keys, shape.cache_bytes),
        memory_range(cache.values, shape.cache_bytes),
    )
    program.append(
        ATTENTION.dispatch(
            f"attention.{shape.kv_type.lower()}{suffix}",
            {
                "workgroup_size": split.workgroup_size,
                "head_dim": shape.head_dim,
                "n_heads": shape.n_heads,
                "n_kv_heads": shape.n_kv_heads,
                "rotary_dim": shape.rotary_dim,
                "rope_style": ROPE_STYLES[shape.rope_style],
                "norm_mode": NORM_MODES[shape.norm],
                "n_splits": split.n_splits,
                "team_lanes": split.team_lanes,
                "step_positions": split.step_positions,
                "workgroup_heads": split.workgroup_heads,
            },
            {"qkv": qkv, "params": tensors.params, "partials": tensors.partials},
            {
                "k_cache": cache.keys,
                "v_cache": cache.values,
                "q_gain": cache.q_gain,
                "k_gain": cache.k_gain,
                "rope_table": cache.rope_table,
                "context": shape.context,
                "eps": shape.eps,
                "scale": shape.scale,
                "window": shape.window,
            },
            (shape.n_heads // split.workgroup_heads, split.n_splits, 1),
            label,
            ranges={
                "qkv": qkv.words(0, shape.qkv_width),
                "partials": tensors.partials.words(0, split.partials_words(shape)),
            },
            memory_reads=(*caches, *_constant_reads(shape, cache)),
            memory_writes=caches,
        )
    )
    combine_splits(program, shape, split, tensors, label, window=shape.window, sinks=cache.sinks)


def _constant_reads(shape: AttentionShape, cache: KvCache) -> tuple[Range, ...]:
    """List the memory of the RoPE table and the norm gains."""
    reads = [memory_range(cache.rope_table, shape.rope_bytes)]
    if shape.norm != "none":
        full_width = shape.norm == "full_width"
        for gain, n_heads in ((cache.q_gain, shape.n_heads), (cache.k_gain, shape.n_kv_heads)):
            reads.append(memory_range(gain, 4 * shape.head_dim * (n_heads if full_width else 1)))
    return tuple(reads)


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
    tensors: AttentionTensors,
    label: str,
    *,
    window: int = 0,
    sinks: int = 0,
) -> None:
    """Append out f32 [n_heads * value_dim] = the splits' partials, joined; `sinks` 0 = none."""
    params, partials, out = tensors
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
            f"{label} combine",
            ranges={"partials": partials.words(0, n_partials), "out": out.words(0, n_out)},
            memory_reads=(memory_range(sinks, 4 * shape.n_heads),) if sinks else (),
        )
    )
