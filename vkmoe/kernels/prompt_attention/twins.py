"""This module has the NumPy twins of append_rows.comp, append_latent_rows.comp and
prompt_attention.comp.

They compute in float64; what is cached rounds as the cache's type does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.kernels.attention.caches import cache_row
from vkmoe.kernels.attention.twins import (
    AttentionInputs,
    LatentInputs,
    first_seen,
    latent_row,
    norm_rotate,
    rotate,
)

__all__ = ["Appended", "append_latent_row", "append_row", "prompt_attention"]

Floats = NDArray[np.floating]
Wide = NDArray[np.float64]


class Appended(NamedTuple):
    """Holds what a row leaves: its turned queries, and its rows as caches hold them."""

    queries: Wide  # [n_heads, head_dim], or the rotary part alone: [n_heads, rope_dim]
    cached: tuple[Floats, ...]  # key and value [n_kv_heads, head_dim], or [kv_rank + rope_dim]


def append_row(inputs: AttentionInputs, position: int) -> Appended:
    """Norm and rotate q and k of one row; v is cached as it is."""
    queries = norm_rotate(inputs, inputs.q, inputs.q_gain, position)
    key_type, value_type = inputs.kv_types
    key = cache_row(norm_rotate(inputs, inputs.k, inputs.k_gain, position), key_type)
    return Appended(queries, (key, cache_row(inputs.v, value_type)))


def append_latent_row(inputs: LatentInputs, position: int) -> Appended:
    """Rotate the rotary parts of one row, and norm its compressed part."""
    turned = rotate(inputs.q_rope.astype(np.float64), inputs.rope[position], inputs.rope_style)
    return Appended(turned, (cache_row(latent_row(inputs, position), inputs.kv_type),))


def prompt_attention(
    queries: Floats,
    keys: Sequence[Floats],
    values: Sequence[Floats],
    positions: Sequence[int],
    window: int = 0,
    sinks: Floats | None = None,
) -> Wide:
    """Compute the softmax of every row over what it sees, times the values.

    `queries` [n_rows, n_heads, row_dim], scaled; `keys` and `values` are each row's own regions
    [n_kv_heads, context, dim], with all that it sees in place; `sinks` [n_heads]: a logit more in
    the denominator. Returns [n_rows, n_heads, value_dim].
    """
    out = []
    for query, key, value, position in zip(queries, keys, values, positions, strict=True):
        seen = slice(first_seen(position, window), position + 1)
        groups = query.reshape(len(key), -1, query.shape[-1]).astype(np.float64)
        scores = groups @ key[:, seen].astype(np.float64).swapaxes(1, 2)
        top = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        if sinks is not None:
            with np.errstate(over="ignore"):  # a sink far above takes all weight
                total += np.exp(sinks.astype(np.float64).reshape(len(key), -1, 1) - top)
        mixed = weights / total @ value[:, seen].astype(np.float64)
        out.append(mixed.reshape(len(query), -1))
    return np.array(out)
