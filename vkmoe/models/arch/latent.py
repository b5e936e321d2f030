"""Reads models with multi-head latent attention: DeepSeek-V2, V3 and V3.2, GLM-5, Mistral 4.

They have leading dense layers, shared experts, and routed ones chosen within groups, by softmax or
by sigmoid and a bias. DeepSeek-V2: arXiv:2405.04434; V3: arXiv:2412.19437. Where attention becomes
another one behind some position, the context ends there.
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
from vkmoe.models.layers.rope import read_rope
from vkmoe.models.metadata import Metadata

BLOCK = 32  # rows of matrices are whole blocks
GROWS, STEP = "attention.temperature_scale", "attention.temperature_length"  # of queries


def read_deepseek2(file: GgufFile) -> ModelSpec:
    """Read the spec of a deepseek2 file."""
    metadata = Metadata(file)
    return _latent_spec(metadata, _latent_attention(metadata))


def read_deepseek32(file: GgufFile) -> ModelSpec:
    """Read the spec of a deepseek32 or glm-dsa file: DeepSeek-V3's layers, with an indexer.

    It chooses all positions up to a number that a file has, and attention is then V3's. So the
    indexer's tensors are not used. In GLM-5.2 some layers have no indexer.
    """
    metadata = Metadata(file)
    n_chosen = metadata.size("attention.indexer.top_k")
    # What an indexer computes, in which layers, and sections that text has alike.
    metadata.ignore(*(f"attention.indexer.{key}" for key in ("head_count", "key_length", "types")))
    metadata.ignore("rope.dimension_sections")
    latent = replace(_latent_attention(metadata), indexer=True)
    why = "beyond them its indexer leaves positions out, which vkmoe does not do"
    return common.limited(_latent_spec(metadata, latent), n_chosen, why)


def read_mistral4(file: GgufFile) -> ModelSpec:
    """Read the spec of a mistral4 file, whose queries grow with their position.

    They do so in steps of so many positions; within the first one they do not.
    """
    metadata = Metadata(file)
    grows = metadata.not_negative(GROWS, 0.0)
    step = metadata.size(STEP) if grows else metadata.count(STEP, 1 << 24)
    spec = _latent_spec(metadata, _latent_attention(metadata))
    experts = spec.experts
    if experts is not None and experts.n_groups > 1 and experts.gating == "softmax":
        raise UnsupportedModelError(
            f"{file.path}: {metadata.prefix}expert_group_count is {experts.n_groups}",
            f"for {metadata.prefix[:-1]} vkmoe knows one group of all experts",
        )
    why = "beyond them its queries grow, which vkmoe does not do"
    return common.limited(spec, step, why) if grows else spec


def _latent_spec(metadata: Metadata, latent: LatentSpec) -> ModelSpec:
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


def _latent_attention(metadata: Metadata) -> LatentSpec:
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
