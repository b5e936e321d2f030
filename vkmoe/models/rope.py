"""The rotary table: cosines and sines of every position, computed once on the host in float64.

RoPE: Su et al. 2021 (arXiv:2104.09864); yarn: Peng et al. 2023 (arXiv:2309.00071), section 3.2-3.4;
longrope: Ding et al. 2024 (arXiv:2402.13753).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from vkmoe.facts import RopeSpec

__all__ = ["rope_table"]

SLICE_POSITIONS = 4096  # float64 is held for so many only: a long context has a large table


def rope_table(rope: RopeSpec, n_positions: int) -> NDArray[np.float32]:
    """(cos, sin) of each pair at each position: float32 [n_positions, dim / 2, 2].

    longrope has other factors where there are more positions than the original context has.
    """
    frequencies, magnitude = _frequencies(rope, n_positions)
    table = np.empty((n_positions, len(frequencies), 2), np.float32)
    for start in range(0, n_positions, SLICE_POSITIONS):
        rows = table[start : start + SLICE_POSITIONS]
        angles = np.arange(start, start + len(rows), dtype=np.float64)[:, None] * frequencies
        rows[..., 0] = np.cos(angles) * magnitude
        rows[..., 1] = np.sin(angles) * magnitude
    return table


def _frequencies(rope: RopeSpec, n_positions: int) -> tuple[NDArray[np.float64], float]:
    """Angle per position of each pair, and what sines and cosines are multiplied by."""
    pairs = np.arange(0, rope.dim, 2, dtype=np.float64)
    plain = rope.base ** (-pairs / rope.dim)
    is_long = rope.scaling == "longrope" and n_positions > rope.original_context
    if factors := rope.long_factors if is_long else rope.factors:
        plain = plain / np.array(factors, np.float64)
    if rope.scaling == "none":
        return plain, 1.0
    if rope.scaling == "longrope":
        return plain, rope.attention_factor or 1.0
    if rope.scaling == "linear":
        return plain / rope.factor, 1.0
    low, high = (_pair_that_turns(rope, turns) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = np.clip((pairs / 2 - low) / max(high - low, 0.001), 0.0, 1.0)
    frequencies = plain * (1.0 - ramp) + plain / rope.factor * ramp
    default = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1.0 else 1.0
    return frequencies, default if rope.attention_factor is None else rope.attention_factor


def _pair_that_turns(rope: RopeSpec, turns: float) -> float:
    """Index of the pair that makes `turns` full turns over the original context."""
    ratio = rope.original_context / (turns * 2 * math.pi)
    return rope.dim * math.log(ratio) / (2 * math.log(rope.base))
