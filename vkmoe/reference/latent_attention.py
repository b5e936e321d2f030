"""This module has the twin of latent_attention.comp, in float64; the cache rounds as its type does.

It follows DeepSeek-V2, arXiv:2405.04434, section 2.1, with k and v up-projections absorbed into q
and output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vkmoe.reference.attention import Floats, Wide, cache_row, rotate, split_partials

__all__ = ["LatentInputs", "LatentResult", "latent_attention"]


class LatentResult(NamedTuple):
    """Holds what the kernel leaves: partials, and the row appended to the cache at the position."""

    partials: Wide  # [n_heads, n_splits, kv_rank + 2], rows of unused splits are NaN
    row: Floats  # [kv_rank + rope_dim], in the cache's type


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
    row = cache_row(_row(inputs, kv_rank, position), cache.dtype.type)
    last = row if appended_row is None else appended_row
    rows = np.vstack([cache[:position], last]).astype(np.float64)
    return LatentResult(split_partials(query, rows, rows[:, :kv_rank], n_splits), row)


def _row(inputs: LatentInputs, kv_rank: int, position: int) -> Wide:
    """Compute the token's row: RMSNorm of the compressed part, RoPE of the rest."""
    wide = inputs.kv.astype(np.float64)
    compressed, rest = wide[:kv_rank], wide[kv_rank:]
    normed = compressed / np.sqrt((compressed**2).mean() + inputs.eps) * inputs.gain
    turned = rotate(rest[None], inputs.rope[position], inputs.rope_style)[0]
    return np.concatenate([normed, turned])
