"""This module owns rotary position embedding: what files say of it, and the table kernels read.

`read_rope` reads the keys `<architecture>.rope.*` and the tensors of factors; `rope_table` computes
cosines and sines of every position, once, on the host, in float64. RoPE: Su et al. 2021
(arXiv:2104.09864); yarn: Peng et al. 2023 (arXiv:2309.00071), sections 3.2-3.4; longrope: Ding et
al. 2024 (arXiv:2402.13753).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vkmoe.errors import ModelFileError
from vkmoe.facts import RopeSpec
from vkmoe.gguf_file.header import shown
from vkmoe.models.metadata import MAX_SIZE, WRONG_FILE, Metadata
from vkmoe.models.tensor_finder import VECTOR_TYPES
from vkmoe.models.tensors import LONGROPE_FACTORS, ROPE_FACTORS
from vkmoe.quants import decode

LEAST_FACTOR, LARGEST_FACTOR = 1e-6, 1e6  # no rule makes others, and no angle overflows
STILL_FACTOR = 1e20  # from here on, a pair does not turn at all: Gemma 4's files have 1e30


def read_rope(
    metadata: Metadata,
    head_dim: int,
    style: Literal["neox", "normal"] = "neox",
    truncate: bool = True,
) -> RopeSpec:
    """Read the rotary embedding of heads that are `head_dim` wide. Raises ModelFileError.

    `truncate`: whether yarn's ramp begins and ends at whole pairs, which files do not state.
    """
    dim = metadata.size("rope.dimension_count", head_dim, largest=head_dim)
    if dim % 2:
        metadata.refuse("rope.dimension_count", dim, "must be even")
    kind = metadata.value("rope.scaling.type", str, "linear")  # as in files older than this key
    factor = metadata.positive("rope.scale_linear", 1.0)  # its old name
    rope = RopeSpec(
        dim,
        metadata.positive("rope.freq_base", 10000.0),
        style,
        factor=metadata.positive("rope.scaling.factor", factor),
        original_context=metadata.count("rope.scaling.original_context_length", MAX_SIZE),
        attention_factor=_attention_factor(metadata),
        beta_fast=metadata.positive("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=metadata.positive("rope.scaling.yarn_beta_slow", 1.0),
        truncate=truncate,
    )
    if metadata.number("rope.scaling.yarn_ext_factor", 1.0) != 1:
        metadata.refuse("rope.scaling.yarn_ext_factor", "not 1", "vkmoe knows nothing else")
    if kind == "longrope":
        return _longrope(metadata, rope)
    factors = _factors(metadata, ROPE_FACTORS, dim)
    if kind == "yarn":
        return _yarn(metadata, replace(rope, factors=factors))
    if (given := rope.attention_factor) not in (None, 1.0):
        metadata.refuse("rope.scaling.attn_factor", given, "not known without yarn or longrope")
    if kind not in ("none", "linear"):
        metadata.refuse("rope.scaling.type", shown(kind), "known: none, linear, yarn and longrope")
    plain = RopeSpec(dim, rope.base, style, factors=factors)
    is_linear = kind == "linear" and rope.factor != 1
    return replace(plain, scaling="linear", factor=rope.factor) if is_linear else plain


def read_window_rope(metadata: Metadata, head_dim: int) -> RopeSpec:
    """Read the plain rotary embedding that layers with a window have of their own."""
    dim = metadata.size("rope.dimension_count_swa", head_dim, largest=head_dim)
    if dim % 2:
        metadata.refuse("rope.dimension_count_swa", dim, "must be even")
    return RopeSpec(dim, metadata.positive("rope.freq_base_swa", 10000.0))


def _attention_factor(metadata: Metadata) -> float | None:
    """Read what sines and cosines are multiplied by; None: it follows from the scaling."""
    keys = ("yarn_attn_factor", "attn_factor")
    values = [metadata.not_negative(f"rope.scaling.{key}", 0.0) for key in keys]
    return next((value for value in values if value), None)


def _yarn(metadata: Metadata, rope: RopeSpec) -> RopeSpec:
    if rope.original_context < 1:
        key = "rope.scaling.original_context_length"
        metadata.refuse(key, rope.original_context, "yarn needs it")
    if rope.base <= 1:
        metadata.refuse("rope.freq_base", rope.base, "yarn needs more than 1")
    return replace(rope, scaling="yarn")


def _longrope(metadata: Metadata, rope: RopeSpec) -> RopeSpec:
    """Read longrope's factors; a file without an attention factor has that of Phi-3.

    It is sqrt(1 + ln(stretch) / ln(original context)).
    """
    for name in LONGROPE_FACTORS:
        if name not in metadata.file.tensors:
            raise ModelFileError(f"{metadata.file.path}: tensor {name} is missing", WRONG_FILE)
    short, long = (_factors(metadata, name, rope.dim) for name in LONGROPE_FACTORS)
    context = metadata.size("context_length")
    original = rope.original_context or context
    stretch, magnitude = context / original, 1.0
    if stretch > 1 and original > 1:
        magnitude = math.sqrt(1 + math.log(stretch) / math.log(original))
    return RopeSpec(
        rope.dim,
        rope.base,
        rope.style,
        "longrope",
        original_context=original,
        attention_factor=rope.attention_factor or magnitude,
        factors=short,
        long_factors=long,
    )


def _factors(metadata: Metadata, name: str, dim: int) -> tuple[float, ...]:
    """Read the factors in a tensor [dim / 2]; () if there is no such tensor.

    That of a pair which does not turn is infinite.
    """
    file = metadata.file
    tensor = file.tensors.get(name)
    if tensor is None:
        return ()
    if tuple(tensor.shape) != (dim // 2,) or tensor.type not in VECTOR_TYPES:
        found = f"shape {list(tensor.shape)} and type {tensor.type}"
        message = f"{file.path}: {name} has {found}, expected [{dim // 2}] floats"
        raise ModelFileError(message, WRONG_FILE)
    values = decode(tensor.type, file.data(name), dim // 2)
    turns = (values >= LEAST_FACTOR) & (values <= LARGEST_FACTOR)
    is_still = (values >= STILL_FACTOR) & np.isfinite(values)
    if not (turns | is_still).all():
        raise ModelFileError(f"{file.path}: {name} has factors that are none", WRONG_FILE)
    factors = np.where(is_still, np.inf, values.astype(np.float64))
    return tuple(float(factor) for factor in factors)


SLICE_POSITIONS = 4096  # float64 is held for so many only: a long context has a large table


def rope_table(rope: RopeSpec, n_positions: int, most: int = 0) -> NDArray[np.float32]:
    """Compute (cos, sin) of each pair at each position: float32 [n_positions, dim / 2, 2].

    longrope has other factors where there may be more positions than the original context has:
    `most`, or `n_positions` where these are more.
    """
    frequencies, magnitude = _frequencies(rope, max(n_positions, most))
    table = np.empty((n_positions, len(frequencies), 2), np.float32)
    for start in range(0, n_positions, SLICE_POSITIONS):
        rows = table[start : start + SLICE_POSITIONS]
        angles = np.arange(start, start + len(rows), dtype=np.float64)[:, None] * frequencies
        rows[..., 0] = np.cos(angles) * magnitude
        rows[..., 1] = np.sin(angles) * magnitude
    return table


def _frequencies(rope: RopeSpec, n_positions: int) -> tuple[NDArray[np.float64], float]:
    """Compute each pair's angle per position, and what sines and cosines are multiplied by."""
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
    """Find the index of the pair that makes `turns` full turns over the original context."""
    ratio = rope.original_context / (turns * 2 * math.pi)
    return rope.dim * math.log(ratio) / (2 * math.log(rope.base))
