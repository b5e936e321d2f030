"""This module has the NumPy twins of attention.comp, latent_attention.comp, attention_combine.comp,
append_rows.comp, append_latent_rows.comp and prompt_attention.comp.

They compute in float64; what is cached rounds as the cache's type does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.choices import KvType
from vkmoe.kernels.attention.caches import cache_row, hadamard
from vkmoe.kernels.matmul.twins import HALF_UNIT
from vkmoe.kernels.norms.twins import rms_norm
from vkmoe.kv_types import KvTypes

Floats = NDArray[np.floating]
Wide = NDArray[np.float64]
SPLIT_STEP = 32


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
    kv_types: KvTypes  # of the caches
    value_norm: bool = False  # of v, without a gain
    gains_last: bool = False  # of q and k, behind RoPE
    hadamard_blocks: tuple[int, int] = (1, 1)  # of keys and of values


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
    kv_type: KvType  # of the cache
    hadamard_block: int = 1


class Appended(NamedTuple):
    """Holds what a row leaves: its turned queries, and its rows as caches hold them.

    Both are transformed where rows of the cache are.
    """

    queries: Wide  # [n_heads, row_dim], not scaled
    cached: tuple[Floats, ...]  # key and value [n_kv_heads, head_dim], or [1, kv_rank + rope_dim]


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


def append_row(inputs: AttentionInputs, position: int) -> Appended:
    """Norm and rotate q and k of one row; v is cached as it is, or normed head by head."""
    (key_type, value_type), (of_keys, of_values) = inputs.kv_types, inputs.hadamard_blocks
    queries = hadamard(_norm_rotate(inputs, inputs.q, inputs.q_gain, position), of_keys)
    key = hadamard(_norm_rotate(inputs, inputs.k, inputs.k_gain, position), of_keys)
    value: Floats = inputs.v
    if inputs.value_norm:
        ones = np.ones(value.shape[1])
        value = np.array([rms_norm(head, ones, inputs.eps) for head in value])
    cached = cache_row(key, key_type), cache_row(hadamard(value, of_values), value_type)
    return Appended(queries, cached)


def append_latent_row(inputs: LatentInputs, position: int) -> Appended:
    """Rotate the rotary parts of one row, and norm its compressed part."""
    rope, style = inputs.rope[position], inputs.rope_style
    turned = rotate(inputs.q_rope.astype(np.float64), rope, style)
    compressed, rest = np.split(inputs.kv.astype(np.float64), [len(inputs.gain)])
    normed = rms_norm(compressed, inputs.gain, inputs.eps)
    row = np.concatenate([normed, rotate(rest[None], rope, style)[0]])
    queries = np.hstack([inputs.absorbed.astype(np.float64), turned])
    block = inputs.hadamard_block
    cached = cache_row(hadamard(row[None], block), inputs.kv_type)
    return Appended(hadamard(queries, block), (cached,))


def _norm_rotate(inputs: AttentionInputs, rows: Floats, gain: Floats | None, position: int) -> Wide:
    """Apply norm, where there is a gain, and RoPE to heads [n, head_dim] of q or k."""
    wide = rows.astype(np.float64)
    if gain is not None:
        squares = wide * wide
        mean = squares.mean() if gain.ndim == 2 else squares.mean(axis=1, keepdims=True)
        wide = wide / np.sqrt(mean + inputs.eps)
    rope, style = inputs.rope[position], inputs.rope_style
    if gain is None or inputs.gains_last:
        turned = rotate(wide, rope, style)
        return turned if gain is None else turned * gain.astype(np.float64)
    return rotate(wide * gain.astype(np.float64), rope, style)


def attention(queries: Floats, keys: Floats, values: Floats, n_splits: int) -> Wide:
    """Compute partials [n_heads, n_splits, value_dim + 2] of queries over the rows that they see.

    `queries` [n_heads, row_dim], scaled; `keys` [n_kv_heads, n_seen, row_dim]; `values`
    [n_kv_heads, n_seen, value_dim]. Rows of unused splits are NaN.
    """
    groups = queries.astype(np.float64).reshape(len(keys), -1, queries.shape[1])
    n_seen, width = values.shape[1:]
    partials = np.full((*groups.shape[:2], n_splits, width + 2), np.nan)
    length = split_positions(n_seen - 1, n_splits)
    for split, start in enumerate(range(0, n_seen, length)):
        span = slice(start, start + length)
        scores = groups @ keys[:, span].astype(np.float64).swapaxes(1, 2)
        top = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - top)
        sums = weights @ values[:, span].astype(np.float64)
        total = weights.sum(axis=-1, keepdims=True)
        partials[:, :, split] = np.concatenate([sums, top, total], axis=-1)
    return partials.reshape(len(queries), n_splits, width + 2)


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


def prompt_attention(
    queries: Floats,
    keys: Floats,
    values: Floats,
    positions: Sequence[int],
    window: int = 0,
    sinks: Floats | None = None,
) -> Wide:
    """Compute the softmax of every row over what it sees, times the values.

    `queries` [n_rows, n_heads, row_dim], scaled; `keys` and `values` are each row's own regions
    [n_rows, n_kv_heads, context, dim], with all that it sees in place; `sinks` [n_heads]: a logit
    more in the denominator.
    Returns [n_rows, n_heads, value_dim].
    """
    out = []
    for query, key, value, position in zip(queries, keys, values, positions, strict=True):
        seen = slice(first_seen(position, window), position + 1)
        partials = attention(query, key[:, seen], value[:, seen], 1)
        out.append(attention_combine(partials, position, window, sinks))
    return np.array(out)


def prompt_matrix_bound(
    queries: Floats, keys: Floats, values: Floats, positions: Sequence[int], window: int = 0
) -> Wide:
    """Bound the error on matrix units (prompt_matrix.glsl): [n_rows, n_heads].

    Say u = 2^-11, S is the largest sum of |q * k| that a head has of a position, X and K its
    largest |q| and sum of |k|, V the largest |v|. Scores are off by 2 u S where both factors are
    rounded, 2^-18 X K by what is flushed of queries, and 2^-22 S of each product. Their
    exponentials are off by the same share, in weights and total; weights and values are rounded
    besides, and weights below 2^-29 of the largest flushed.
    """
    n_heads, n_kv_heads = queries.shape[1], keys.shape[1]
    bounds = []
    for query, key, value, position in zip(queries, keys, values, positions, strict=True):
        seen = slice(first_seen(position, window), position + 1)
        cached = np.repeat(np.abs(key[:, seen]), n_heads // n_kv_heads, axis=0)
        sizes = np.abs(query.astype(np.float64))
        products = np.einsum("hd,htd->ht", sizes, cached).max(1)
        flushed = 2.0**-18 * sizes.max(1) * cached.sum(2).max(1)
        scores = (2.01 * HALF_UNIT + query.shape[1] * 2.0**-22) * products + flushed
        weights = 2.0 * np.expm1(scores) + 3.01 * HALF_UNIT + cached.shape[1] * 2.0**-28
        bounds.append(weights * np.abs(value[:, seen]).max())
    return np.array(bounds)
