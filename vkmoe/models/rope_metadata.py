"""Reads a file's rotary embedding: the keys `<architecture>.rope.*` and the tensors of factors.

What is made of it is the subject of rope.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np

from vkmoe.errors import ModelFileError
from vkmoe.facts import RopeSpec
from vkmoe.gguf_file.header import shown
from vkmoe.models.finder import VECTOR_TYPES
from vkmoe.models.metadata import MAX_SIZE, Metadata
from vkmoe.quants import decode

__all__ = ["factor_tensors", "read_rope"]

FREQUENCIES = "rope_freqs.weight"  # divisors for any context, as Llama 3.1 has them
LONGROPE = ("rope_factors_short.weight", "rope_factors_long.weight")
_HINT = "the file was converted wrongly or is damaged"
LEAST_FACTOR, LARGEST_FACTOR = 1e-6, 1e6  # no rule makes others, and no angle overflows


def factor_tensors(rope: RopeSpec) -> tuple[str, ...]:
    """The tensors that `rope` was read from: nobody else needs them."""
    if rope.scaling == "longrope":
        return LONGROPE
    return (FREQUENCIES,) if rope.factors else ()


def read_rope(
    metadata: Metadata,
    head_dim: int,
    style: Literal["neox", "normal"] = "neox",
    *,
    truncate: bool = True,
) -> RopeSpec:
    """The rotary embedding of heads that are `head_dim` wide.

    `truncate`: whether yarn's ramp begins and ends at whole pairs, of which files say nothing.
    Raises ModelFileError.
    """
    dim = metadata.size("rope.dimension_count", head_dim, largest=head_dim)
    if dim % 2:
        metadata.refuse("rope.dimension_count", dim, "must be even")
    kind = metadata.text("rope.scaling.type", "linear")  # as in files older than this key
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
    if kind == "yarn":
        return _yarn(metadata, rope)
    if (given := rope.attention_factor) not in (None, 1.0):
        metadata.refuse("rope.scaling.attn_factor", given, "not known without yarn or longrope")
    plain = RopeSpec(dim, rope.base, style, factors=_factors(metadata, FREQUENCIES, dim))
    if kind == "none" or (kind == "linear" and rope.factor == 1):
        return plain
    if kind == "linear":
        return replace(plain, scaling="linear", factor=rope.factor)
    metadata.refuse("rope.scaling.type", shown(kind), "vkmoe knows none, linear, yarn and longrope")


def _attention_factor(metadata: Metadata) -> float | None:
    """What sines and cosines are multiplied by; None: what follows from the scaling."""
    keys = ("yarn_attn_factor", "attn_factor")
    values = [metadata.not_negative(f"rope.scaling.{key}", 0.0) for key in keys]
    return next((value for value in values if value), None)


def _yarn(metadata: Metadata, rope: RopeSpec) -> RopeSpec:
    if rope.original_context < 1:
        metadata.refuse(
            "rope.scaling.original_context_length", rope.original_context, "yarn needs it"
        )
    if rope.base <= 1:
        metadata.refuse("rope.freq_base", rope.base, "yarn needs more than 1")
    factors = _factors(metadata, FREQUENCIES, rope.dim)
    return replace(rope, scaling="yarn", factors=factors)


def _longrope(metadata: Metadata, rope: RopeSpec) -> RopeSpec:
    """Ding et al. 2024 (arXiv:2402.13753); the attention factor of Phi-3, where the file has none:
    sqrt(1 + ln(stretch) / ln(original context)).
    """
    short, long = (_factors(metadata, name, rope.dim) for name in LONGROPE)
    for name, factors in zip(LONGROPE, (short, long), strict=True):
        if not factors:
            raise ModelFileError(f"{metadata.file.path}: tensor {name} is missing", _HINT)
    context = metadata.size("context_length")
    original = rope.original_context or context
    stretch = context / original
    magnitude = 1.0
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
    """The factors in a tensor [dim / 2]; () if there is no such tensor."""
    file = metadata.file
    tensor = file.tensors.get(name)
    if tensor is None:
        return ()
    if tuple(tensor.shape) != (dim // 2,) or tensor.type not in VECTOR_TYPES:
        raise ModelFileError(
            f"{file.path}: {name} has shape {list(tensor.shape)} and type {tensor.type}, expected "
            f"[{dim // 2}] floats",
            _HINT,
        )
    values = decode(tensor.type, file.data(name), dim // 2)
    if not ((values >= LEAST_FACTOR) & (values <= LARGEST_FACTOR)).all():
        raise ModelFileError(f"{file.path}: {name} has factors that are none", _HINT)
    return tuple(float(value) for value in np.asarray(values, np.float64))
