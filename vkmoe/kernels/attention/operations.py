"""Appends attention of a batch: over keys and values of grouped heads, or over compressed rows.

Both rotate, append to the cache, and read it in splits, which another dispatch joins; where rows of
a batch may be of one sequence, all append in a dispatch of their own. Over compressed rows it is
multi-head latent attention in its absorbed form (DeepSeek-V2, arXiv:2405.04434, section 2.1).
Shaders: attention.comp, latent_attention.comp, attention_combine.comp.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from vkmoe.gpu.kernels import kernel
from vkmoe.gpu.program import Range, TensorRef, memory_range
from vkmoe.kernels.attention.shapes import (
    ROPE_STYLES,
    AttentionShape,
    AttentionSplit,
    LatentShape,
    type_numbers,
)
from vkmoe.kernels.context import OpContext

__all__ = [
    "AttentionTensors",
    "KvCache",
    "LatentCache",
    "LatentQkv",
    "attention",
    "constant_reads",
    "latent_attention",
    "regions",
]

ATTENTION = kernel(
    "attention",
    "r:qkv r:params w:partials",
    "address:k_cache address:v_cache address:q_gain address:k_gain address:rope_table "
    "u32:context f32:eps f32:scale u32:window u32:mode u32:n_regions "
    "u32:qkv_pitch u32:partials_pitch",
    "workgroup_size head_dim n_heads n_kv_heads rotary_dim rope_style norm_mode n_splits "
    "team_lanes step_positions workgroup_heads k_type v_type",
)
LATENT_ATTENTION = kernel(
    "latent_attention",
    "r:absorbed r:params r:q r:kv w:partials",
    "address:rows address:rope_table address:gain "
    "u32:context u32:q_offset u32:kv_offset f32:eps f32:scale u32:mode u32:n_regions "
    "u32:absorbed_pitch u32:q_pitch u32:kv_pitch u32:partials_pitch",
    "workgroup_size kv_rank rope_dim nope_dim rope_style n_splits "
    "team_lanes step_positions workgroup_heads k_type",
)
ATTENTION_COMBINE = kernel(
    "attention_combine",
    "r:partials r:params w:out",
    "address:sinks u32:context u32:window u32:partials_pitch u32:out_pitch",
    "workgroup_size head_dim n_splits",
)
WHOLE, APPEND, READ = range(3)  # modes of a dispatch, as attention_cache.glsl numbers them
NORM_MODES = {"none": 0, "per_head": 1, "full_width": 2}


@dataclass(frozen=True)
class KvCache:
    """Holds addresses of a layer's caches and what else its attention reads. Gain 0 = no norm.

    Each cache has `n_regions` behind one another, one for each sequence.
    `sinks`: f32 [n_heads], one logit per head for the softmax's denominator; 0 = none.
    """

    keys: int
    values: int
    rope_table: int
    q_gain: int = 0
    k_gain: int = 0
    sinks: int = 0
    n_regions: int = 1  # of each cache, one for a sequence; the shape's cache_bytes are one's


class AttentionTensors(NamedTuple):
    """Holds what all dispatches of an attention work on, whatever its kind."""

    params: TensorRef  # of the batch
    partials: TensorRef  # scratch: AttentionSplit.partials_words
    out: TensorRef  # f32 [n_heads * value_dim]


def attention(
    op: OpContext,
    shape: AttentionShape,
    split: AttentionSplit,
    cache: KvCache,
    qkv: TensorRef,
    tensors: AttentionTensors,
) -> None:
    """Append out = attention of each row of `params` over its region, once its k and v are there.

    qkv f32 [qkv_width] raw; out f32 [n_heads * head_dim]. Two dispatches; three for several rows.
    """
    split.check(shape)
    assert shape.norm == "none" or (cache.q_gain and cache.k_gain)
    assert shape.sinks == (cache.sinks != 0), (shape, cache)
    caches = regions((cache.keys, cache.values), shape, cache.n_regions)
    numbers = {
        **vars(shape),
        **vars(split),
        **vars(cache),
        **type_numbers(shape),
        **_pitches(qkv=qkv, partials=tensors.partials),
        "rope_style": ROPE_STYLES[shape.rope_style],
        "norm_mode": NORM_MODES[shape.norm],
        "k_cache": cache.keys,
        "v_cache": cache.values,
    }
    for mode in _modes(op):
        op.append(
            ATTENTION.dispatch(
                f"attention{split.suffix}",
                {**numbers, "mode": mode},
                {
                    "qkv": qkv.rows(op.n_rows, 0, shape.qkv_width),
                    "params": tensors.params,
                    "partials": tensors.partials.rows(op.n_rows, 0, split.partials_words(shape)),
                },
                _groups(op, shape, split, mode),
                op.label,
                reads=(*caches, *constant_reads(shape, cache)),
                writes=caches if mode != READ else (),
            )
        )
    _join_splits(op, shape, split, tensors, sinks=cache.sinks)


def _modes(op: OpContext) -> tuple[int, ...]:
    """List what dispatches do: several rows may be of one sequence, and then see each other."""
    return (WHOLE,) if op.n_rows == 1 else (APPEND, READ)


def _groups(
    op: OpContext, shape: AttentionShape | LatentShape, split: AttentionSplit, mode: int
) -> tuple[int, int, int]:
    n_splits = 1 if mode == APPEND else split.n_splits
    return shape.n_heads // split.workgroup_heads, n_splits, op.n_rows


def _pitches(**tensors: TensorRef) -> dict[str, int]:
    """Say how far the rows of tensors lie apart, as kernels name it."""
    return {f"{name}_pitch": tensor.row_words for name, tensor in tensors.items()}


def regions(
    caches: Iterable[int], shape: AttentionShape | LatentShape, n_regions: int
) -> tuple[Range, ...]:
    """List the memory of a layer's caches, all regions of each."""
    places = zip(caches, shape.cache_bytes, strict=True)
    return tuple(memory_range(cache, n_regions * n_bytes) for cache, n_bytes in places)


def constant_reads(shape: AttentionShape, cache: KvCache) -> tuple[Range, ...]:
    """List the memory of the RoPE table and the norm gains."""
    reads = [memory_range(cache.rope_table, shape.rope_bytes)]
    if shape.norm != "none":
        full_width = shape.norm == "full_width"
        for gain, n_heads in ((cache.q_gain, shape.n_heads), (cache.k_gain, shape.n_kv_heads)):
            reads.append(memory_range(gain, 4 * shape.head_dim * (n_heads if full_width else 1)))
    return tuple(reads)


@dataclass(frozen=True)
class LatentCache:
    """Holds addresses of one layer's cache and of what its attention reads besides."""

    rows: int  # [n_regions][context][kv_rank + rope_dim], in the shape's kv_type
    rope_table: int
    gain: int  # f32 [kv_rank], of the norm of the compressed part
    n_regions: int = 1  # as in KvCache


class LatentQkv(NamedTuple):
    """Holds what each row brings to latent attention; q and kv may be one tensor."""

    absorbed: TensorRef  # f32 [n_heads * kv_rank]
    q: TensorRef  # raw f32 [n_heads][nope_dim + rope_dim], of which the rope part is read
    kv: TensorRef  # raw f32 [kv_rank + rope_dim]
    q_offset: int = 0  # word at which q begins
    kv_offset: int = 0


def latent_attention(
    op: OpContext,
    shape: LatentShape,
    split: AttentionSplit,
    cache: LatentCache,
    qkv: LatentQkv,
    tensors: AttentionTensors,
) -> None:
    """Append out = attention of each row of `params` over its region, once its own is there.

    out f32 [n_heads * kv_rank]. Two dispatches; three for several rows.
    """
    split.check(shape)
    cached = regions((cache.rows,), shape, cache.n_regions)
    numbers = {
        **vars(shape),
        **vars(split),
        **vars(cache),
        **type_numbers(shape),
        **_pitches(absorbed=qkv.absorbed, q=qkv.q, kv=qkv.kv, partials=tensors.partials),
        "rope_style": ROPE_STYLES[shape.rope_style],
        "q_offset": qkv.q_offset,
        "kv_offset": qkv.kv_offset,
    }
    constant = (
        memory_range(cache.rope_table, shape.rope_bytes),
        memory_range(cache.gain, 4 * shape.kv_rank),
    )
    for mode in _modes(op):
        op.append(
            LATENT_ATTENTION.dispatch(
                f"latent_attention{split.suffix}",
                {**numbers, "mode": mode},
                {
                    "absorbed": qkv.absorbed.rows(op.n_rows, 0, shape.n_heads * shape.kv_rank),
                    "params": tensors.params,
                    "q": qkv.q.rows(op.n_rows, qkv.q_offset, shape.q_width),
                    "kv": qkv.kv.rows(op.n_rows, qkv.kv_offset, shape.row_dim),
                    "partials": tensors.partials.rows(op.n_rows, 0, split.partials_words(shape)),
                },
                _groups(op, shape, split, mode),
                op.label,
                reads=(*cached, *constant),
                writes=cached if mode != READ else (),
            )
        )
    _join_splits(op, shape, split, tensors)


def _join_splits(
    op: OpContext,
    shape: AttentionShape | LatentShape,
    split: AttentionSplit,
    tensors: AttentionTensors,
    sinks: int = 0,
) -> None:
    """Append out f32 [n_heads * value_dim] = the splits' partials, joined; `sinks` 0 = none."""
    op.append(
        ATTENTION_COMBINE.dispatch(
            "attention_combine",
            {
                **vars(split),
                **_pitches(partials=tensors.partials, out=tensors.out),
                "head_dim": shape.value_dim,
                "sinks": sinks,
                "context": shape.context,
                "window": shape.window,
            },
            {
                "partials": tensors.partials.rows(op.n_rows, 0, split.partials_words(shape)),
                "params": tensors.params,
                "out": tensors.out.rows(op.n_rows, 0, shape.n_heads * shape.value_dim),
            },
            (shape.n_heads, 1, op.n_rows),
            f"{op.label} combine",
            reads=(memory_range(sinks, 4 * shape.n_heads),) if sinks else (),
        )
    )
