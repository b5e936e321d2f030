"""This module has the NumPy twins of attention.comp, latent_attention.comp, attention_combine.comp.

They compute in float64; what is cached rounds as the cache's type does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.choices import KvType
from vkmoe.kernels.attention.caches import cache_row
from vkmoe.kernels.norms.twins import rms_norm
from vkmoe.kv_types import KvTypes

__all__ = [
    "AttentionInputs",
    "AttentionResult",
    "LatentInputs",
    "LatentResult",
    "attention",
    "attention_combine",
    "first_seen",
    "latent_attention",
    "latent_row",
    "norm_rotate",
    "rotate",
    "split_positions",
]

Floats = NDArray[np.floating]
Wide = NDArray[np.float64]
SPLIT_STEP = 32


class AttentionResult(NamedTuple):
    """Holds what the kernel leaves: partials, and the rows appended to caches at the position."""

    partials: Wide  # [n_heads, n_splits, head_dim + 2], rows of unused splits are NaN
    key: Floats  # [n_kv_heads, head_dim], rounded as in the cache
    value: Floats


@dataclass(frozen=True)
class AttentionInputs:
    """Holds one token's raw q, k, v and what is needed to norm and rotate them.

    Gains are [head_dim] (norm per head), [heads, head_dim] (norm over the full width), or None.
    """

    q: Floats  # [n_heads, head_dim]
    k: Floats  # [n_kv_heads, head_dim]
    v: Floats
    q_gain: Floats | None
    k_gain: Floats | None
    rope: Floats  # [context, rotary_dim / 2, 2], (cos, sin)
    rope_style: str  # "neox": halves, "normal": adjacent pairs
    eps: float
    scale: float
    kv_types: KvTypes  # of the caches


def first_seen(position: int, window: int) -> int:
    """Find the first position seen: one of the last `window`, or of all where that is 0."""
    return max(0, position + 1 - window) if window else 0


def split_positions(last: int, n_splits: int) -> int:
    """Count the positions per split: whole multiples of 32, so that n_splits cover 0 ... last."""
    even_share = last // n_splits + 1
    return -(-even_share // SPLIT_STEP) * SPLIT_STEP


def rotate(rows: Wide, rope: Floats, style: str) -> Wide:
    """Apply RoPE (Su et al. 2021) to rows [n, head_dim] by the pairs (cos, sin) of one position."""
    n_pairs = len(rope)
    cosine, sine = rope.astype(np.float64).T
    step = slice(0, 2 * n_pairs, 2), slice(1, 2 * n_pairs, 2)
    halves = slice(0, n_pairs), slice(n_pairs, 2 * n_pairs)
    first, second = halves if style == "neox" else step
    result = rows.copy()
    result[:, first] = rows[:, first] * cosine - rows[:, second] * sine
    result[:, second] = rows[:, second] * cosine + rows[:, first] * sine
    return result


def attention(
    inputs: AttentionInputs,
    k_cache: Floats,
    v_cache: Floats,
    position: int,
    n_splits: int,
    window: int = 0,
    appended_key: Floats | None = None,
) -> AttentionResult:
    """Compute the partials of each split; of the caches, rows seen below the position count.

    Caches are [n_kv_heads, context, head_dim]. `appended_key` [n_kv_heads, head_dim] takes the
    place of the computed k in the scores, so that one key rounded to the other neighbouring half
    does not count as an error of everything else.
    """
    n_kv_heads, context, _ = k_cache.shape
    position = min(position, context - 1)
    query = inputs.scale * norm_rotate(inputs, inputs.q, inputs.q_gain, position)
    key_type, value_type = inputs.kv_types
    key = cache_row(norm_rotate(inputs, inputs.k, inputs.k_gain, position), key_type)
    value = cache_row(inputs.v, value_type)
    last = key if appended_key is None else appended_key
    seen = slice(first_seen(position, window), position)
    keys = np.concatenate([k_cache[:, seen], last[:, None]], axis=1).astype(np.float64)
    values = np.concatenate([v_cache[:, seen], value[:, None]], axis=1).astype(np.float64)
    groups = np.split(query, n_kv_heads)
    rows = zip(groups, keys, values, strict=True)
    partials = np.concatenate([_split_partials(*group, n_splits) for group in rows])
    return AttentionResult(partials, key, value)


def _split_partials(query: Wide, keys: Wide, values: Wide, n_splits: int) -> Wide:
    """Compute partials [heads, n_splits, value_dim + 2] of heads that share the rows they see.

    `query` [heads, row_dim], scaled; `keys` [n_seen, row_dim]; `values` [n_seen, value_dim].
    """
    width = values.shape[1]
    partials = np.full((len(query), n_splits, width + 2), np.nan)
    length = split_positions(len(keys) - 1, n_splits)
    for split, start in enumerate(range(0, len(keys), length)):
        span = slice(start, start + length)
        scores = query @ keys[span].T
        top = scores.max(axis=1, keepdims=True)
        weights = np.exp(scores - top)
        partials[:, split, :width] = weights @ values[span]
        partials[:, split, width:] = np.hstack([top, weights.sum(axis=1, keepdims=True)])
    return partials


def attention_combine(
    partials: Floats, position: int, window: int = 0, sinks: Floats | None = None
) -> Wide:
    """Join partials [n_heads, n_splits, value_dim + 2] to the heads' outputs [n_heads, value_dim].

    `sinks` [n_heads]: a logit per head that adds to the softmax's denominator alone.
    """
    n_splits = partials.shape[1]
    last = position - first_seen(position, window)
    used = partials[:, : last // split_positions(last, n_splits) + 1].astype(np.float64)
    sums, tops, totals = used[..., :-2], used[..., -2], used[..., -1]
    top = tops.max(axis=1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks.astype(np.float64)[:, None])
    factors = np.exp(tops - top)
    total = (factors * totals).sum(axis=1, keepdims=True)
    if sinks is not None:
        total += np.exp(sinks.astype(np.float64)[:, None] - top)
    joined: Wide = np.einsum("hs,hsd->hd", factors, sums) / total
    return joined


def norm_rotate(inputs: AttentionInputs, rows: Floats, gain: Floats | None, position: int) -> Wide:
    """Apply norm, where there is a gain, and RoPE to heads [n, head_dim] of q or k."""
    wide = rows.astype(np.float64)
    if gain is not None:
        squares = wide * wide
        mean = squares.mean() if gain.ndim == 2 else squares.mean(axis=1, keepdims=True)
        wide = wide / np.sqrt(mean + inputs.eps) * gain.astype(np.float64)
    return rotate(wide, inputs.rope[position], inputs.rope_style)


class LatentResult(NamedTuple):
    """Holds what the kernel leaves: partials, and the row appended to the cache at the position."""

    partials: Wide  # [n_heads, n_splits, kv_rank + 2], rows of unused splits are NaN
    row: Floats  # [kv_rank + rope_dim], rounded as in the cache


@dataclass(frozen=True)
class LatentInputs:
    """Holds a token's absorbed queries, raw rotary queries and row; what norms and rotates them.

    The raw row is [kv_rank | rope_dim]; `rope_style`: "neox" halves, "normal" adjacent pairs.
    """

    absorbed: Floats  # [n_heads, kv_rank]
    q_rope: Floats  # [n_heads, rope_dim]
    kv: Floats  # [kv_rank + rope_dim]
    gain: Floats  # [kv_rank]
    rope: Floats  # [context, rope_dim / 2, 2], (cos, sin)
    rope_style: str
    eps: float
    scale: float
    kv_type: KvType  # of the cache


def latent_attention(
    inputs: LatentInputs,
    cache: Floats,
    position: int,
    n_splits: int,
    appended_row: Floats | None = None,
) -> LatentResult:
    """Compute the partials of each split; of the cache, rows below the position count.

    The cache is [context, kv_rank + rope_dim]. `appended_row` takes the place of the computed row
    in scores and sums, so that a dim rounded to the other neighbouring half does not count as an
    error of everything else.
    """
    kv_rank = inputs.absorbed.shape[1]
    position = min(position, len(cache) - 1)
    turned = rotate(inputs.q_rope.astype(np.float64), inputs.rope[position], inputs.rope_style)
    query = inputs.scale * np.hstack([inputs.absorbed.astype(np.float64), turned])
    row = cache_row(latent_row(inputs, position), inputs.kv_type)
    last = row if appended_row is None else appended_row
    rows = np.vstack([cache[:position], last]).astype(np.float64)
    return LatentResult(_split_partials(query, rows, rows[:, :kv_rank], n_splits), row)


def latent_row(inputs: LatentInputs, position: int) -> Wide:
    """Compute the token's row: RMSNorm of the compressed part, RoPE of the rest."""
    compressed, rest = np.split(inputs.kv.astype(np.float64), [len(inputs.gain)])
    turned = rotate(rest[None], inputs.rope[position], inputs.rope_style)[0]
    return np.concatenate([rms_norm(compressed, inputs.gain, inputs.eps), turned])
