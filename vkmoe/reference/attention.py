"""NumPy twins of attention.comp and attention_combine.comp, in float64; caches round as they do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "AttentionInputs",
    "AttentionResult",
    "attention",
    "attention_combine",
    "cache_row",
    "rotate",
    "split_positions",
]

Floats = NDArray[np.floating]
Wide = NDArray[np.float64]
SPLIT_STEP = 32
HALF_MAX = 65504.0


class AttentionResult(NamedTuple):
    """What the kernel leaves: partials, and the rows appended to the caches at the position."""

    partials: Wide  # [n_heads, n_splits, head_dim + 2], rows of unused splits are NaN
    key: Floats  # [n_kv_heads, head_dim], in the cache's type
    value: Floats


@dataclass(frozen=True)
class AttentionInputs:
    """One token's raw q, k, v and what is needed to norm and rotate them.

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


def split_positions(position: int, n_splits: int) -> int:
    """Positions per split: whole multiples of 32, so that n_splits cover 0 ... position."""
    even_share = position // n_splits + 1
    return -(-even_share // SPLIT_STEP) * SPLIT_STEP


def rotate(rows: Wide, rope: Floats, style: str) -> Wide:
    """RoPE (Su et al. 2021) of rows [n, head_dim] by the pairs (cos, sin) of one position."""
    n_pairs = len(rope)
    cosine, sine = rope.astype(np.float64).T
    step = slice(0, 2 * n_pairs, 2), slice(1, 2 * n_pairs, 2)
    halves = slice(0, n_pairs), slice(n_pairs, 2 * n_pairs)
    first, second = halves if style == "neox" else step
    result = rows.copy()
    result[:, first] = rows[:, first] * cosine - rows[:, second] * sine
    result[:, second] = rows[:, second] * cosine + rows[:, first] * sine
    return result


def cache_row(rows: Wide, kv_type: type[np.floating]) -> Floats:
    """Rows as the cache holds them: halves round to nearest even and saturate."""
    if kv_type is np.float16:
        return np.clip(rows.astype(np.float32), -HALF_MAX, HALF_MAX).astype(np.float16)
    return rows.astype(kv_type)


def attention(
    inputs: AttentionInputs,
    k_cache: Floats,
    v_cache: Floats,
    position: int,
    n_splits: int,
    appended_key: Floats | None = None,
) -> AttentionResult:
    """Partials of each split. Caches [n_kv_heads, context, head_dim]; rows below position count.

    `appended_key` [n_kv_heads, head_dim] takes the place of the computed k in the scores, so that
    one key rounded to the other neighbouring half does not count as an error of everything else.
    """
    n_heads, head_dim = inputs.q.shape
    n_kv_heads, context, _ = k_cache.shape
    position = min(position, context - 1)
    query = inputs.scale * _norm_rotate(inputs, inputs.q, inputs.q_gain, position)
    key = cache_row(_norm_rotate(inputs, inputs.k, inputs.k_gain, position), k_cache.dtype.type)
    value = cache_row(inputs.v.astype(np.float64), v_cache.dtype.type)
    last = key if appended_key is None else appended_key
    keys = np.concatenate([k_cache[:, :position], last[:, None]], axis=1).astype(np.float64)
    values = np.concatenate([v_cache[:, :position], value[:, None]], axis=1).astype(np.float64)
    partials = np.full((n_heads, n_splits, head_dim + 2), np.nan)
    length = split_positions(position, n_splits)
    for head in range(n_heads):
        kv_head = head * n_kv_heads // n_heads
        for split in range(position // length + 1):
            span = slice(split * length, (split + 1) * length)
            scores = keys[kv_head, span] @ query[head]
            weights = np.exp(scores - scores.max())
            partials[head, split, :head_dim] = weights @ values[kv_head, span]
            partials[head, split, head_dim:] = scores.max(), weights.sum()
    return AttentionResult(partials, key, value)


def attention_combine(partials: Floats, position: int) -> Wide:
    """The heads' outputs [n_heads, head_dim] from partials [n_heads, n_splits, head_dim + 2]."""
    n_splits = partials.shape[1]
    used = partials[:, : position // split_positions(position, n_splits) + 1].astype(np.float64)
    sums, top, totals = used[..., :-2], used[..., -2], used[..., -1]
    factors = np.exp(top - top.max(axis=1, keepdims=True))
    joined: Wide = np.einsum("hs,hsd->hd", factors, sums)
    total: Wide = np.einsum("hs,hs->h", factors, totals)
    return joined / total[:, None]


def _norm_rotate(inputs: AttentionInputs, rows: Floats, gain: Floats | None, position: int) -> Wide:
    wide = rows.astype(np.float64)
    if gain is not None:
        squares = wide * wide
        mean = squares.mean() if gain.ndim == 2 else squares.mean(axis=1, keepdims=True)
        wide = wide / np.sqrt(mean + inputs.eps) * gain.astype(np.float64)
    return rotate(wide, inputs.rope[position], inputs.rope_style)
