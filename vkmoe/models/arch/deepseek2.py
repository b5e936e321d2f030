"""Reads DeepSeek-V2 and V3: multi-head latent attention, leading dense layers, shared experts, and
routed ones chosen within groups, by softmax (V2) or by sigmoid and a bias (V3).

DeepSeek-V2: arXiv:2405.04434; V3: arXiv:2412.19437.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from vkmoe.errors import UnsupportedModelError
from vkmoe.facts import ExpertSpec, FeedForward, LatentSpec, ModelSpec, RopeSpec
from vkmoe.gguf_file import GgufFile
from vkmoe.kernels.attention.shapes import MAX_RANK, MAX_ROPE_DIM, UNIT_DIMS
from vkmoe.kernels.router.operations import MAX_EXPERTS
from vkmoe.models.arch import common
from vkmoe.models.metadata import Metadata
from vkmoe.models.rope import read_rope

BLOCK = 32  # rows of matrices are whole blocks


def read_spec(file: GgufFile) -> ModelSpec:
    """Read the spec of a deepseek2 file."""
    metadata = Metadata(file)
    return latent_spec(metadata, latent_attention(metadata))


def latent_spec(metadata: Metadata, latent: LatentSpec) -> ModelSpec:
    """Read all but the attention, which is alike in all layers. Call it last."""
    file = metadata.file
    n_all = metadata.n_layers
    n_ahead = metadata.count("nextn_predict_layers", n_all - 1)
    n_dense = metadata.count("leading_dense_block_count", n_all)
    experts = _experts(metadata, common.some_layer_has(file, "exp_probs_b.bias"))
    if n_dense >= n_all - n_ahead:
        experts = None
    blocks: Sequence[FeedForward] = common.dense_specs(metadata, experts.width if experts else None)
    if experts is not None:
        blocks = [*blocks[:n_dense], *[experts] * (n_all - n_dense)]
    return common.model_spec(metadata, [latent] * n_all, blocks, n_ahead)


def latent_attention(metadata: Metadata) -> LatentSpec:
    """Read the heads. Newer files describe the cached row as one head under the old names."""
    n_heads = metadata.size("attention.head_count", largest=common.MAX_HEADS)
    rope_dim = metadata.size("rope.dimension_count", largest=MAX_ROPE_DIM)
    rank = metadata.size("attention.kv_lora_rank", largest=MAX_RANK)
    is_absorbed = metadata.has("attention.key_length_mla")
    names = (
        ("key_length_mla", "value_length_mla") if is_absorbed else ("key_length", "value_length")
    )
    query_dim, value_dim = (metadata.size(f"attention.{name}") for name in names)
    if is_absorbed:
        expected = {"key_length": rank + rope_dim, "value_length": rank, "head_count_kv": 1}
    else:
        expected = {"head_count_kv": n_heads}
    for key, value in expected.items():
        found = metadata.size(f"attention.{key}", value)
        if found != value:
            metadata.refuse(f"attention.{key}", found, f"{value} follows from the other keys")
    nope_dim = query_dim - rope_dim
    if nope_dim < BLOCK or nope_dim % BLOCK or rank % BLOCK or rope_dim % UNIT_DIMS:
        raise UnsupportedModelError(
            f"{metadata.file.path}: heads of {nope_dim} + {rope_dim} over {rank} compressed "
            "elements",
            f"vkmoe runs multiples of {BLOCK}, the rotary part a multiple of {UNIT_DIMS}",
        )
    q_rank = metadata.count("attention.q_lora_rank", 1 << 16)
    rope, scale = _rope(metadata, rope_dim, query_dim)
    return LatentSpec(n_heads, rank, nope_dim, value_dim, rope, q_rank, scale)


def _experts(metadata: Metadata, selection_bias: bool) -> ExpertSpec | None:
    """Read the experts; None for a model without any, whose file has few of the keys."""
    if not metadata.count("expert_count", MAX_EXPERTS):
        for key in ("expert_shared_count", "expert_used_count", "expert_feed_forward_length"):
            metadata.count(key, 1 << 24)
        return None
    # Files that do not name their function are of V2, or of V3's kind: those have the bias.
    gatings = (common.SOFTMAX, common.SIGMOID)[:: -1 if selection_bias else 1]
    return common.grouped_experts(
        metadata, renormalise=False, selection_bias=selection_bias, gatings=gatings
    )


def _rope(metadata: Metadata, rope_dim: int, query_dim: int) -> tuple[RopeSpec, float]:
    """Read the rotary embedding, and the scale of the dot products.

    With yarn, scores grow by the square of 0.1 m ln(factor) + 1; a file has 0.1 m. Sines and
    cosines are then left alone: they would take the ratio of that to the same with another m, which
    no model has.
    """
    rope = read_rope(metadata, rope_dim, "normal")
    multiplier = metadata.not_negative("rope.scaling.yarn_log_multiplier", 0.0)
    scale: float = query_dim**-0.5
    if rope.scaling != "yarn" or not multiplier:
        return rope, scale
    growth = multiplier * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    return replace(rope, attention_factor=rope.attention_factor or 1.0), scale * growth**2
