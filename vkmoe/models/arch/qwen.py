"""Reads Qwen2-MoE and Qwen3 with and without experts: grouped attention, neox RoPE, SiLU."""

from __future__ import annotations

from dataclasses import replace

from vkmoe.facts import ModelSpec
from vkmoe.gguf_file import GgufFile
from vkmoe.models.arch.common import (
    attention_specs,
    dense_specs,
    expert_spec,
    experts_everywhere,
    model_spec,
)
from vkmoe.models.metadata import Metadata


def read_qwen2moe(file: GgufFile) -> ModelSpec:
    """Read the spec of a qwen2moe file: biases of q, k and v, and a shared expert that its own
    logit weighs. Routing weights are not renormalised.
    """
    metadata = Metadata(file)
    experts = expert_spec(metadata, renormalise=False)
    # Early files have the shared expert's width as that of a layer without experts.
    dense_width = metadata.size("feed_forward_length", experts.width)
    shared_width = metadata.size("expert_shared_feed_forward_length", dense_width)
    experts = replace(experts, shared_width=shared_width, shared_gate=True)
    mixers = [replace(mixer, qkv_bias=True) for mixer in attention_specs(metadata)]
    return model_spec(metadata, mixers, experts_everywhere(metadata, experts))


def read_qwen3(file: GgufFile) -> ModelSpec:
    """Read the spec of a qwen3 file: q and k are normed in each head."""
    metadata = Metadata(file)
    mixers = attention_specs(metadata, qk_norm="per_head")
    return model_spec(metadata, mixers, dense_specs(metadata))


def read_qwen3moe(file: GgufFile) -> ModelSpec:
    """Read the spec of a qwen3moe file: the same, with routed experts in every layer."""
    metadata = Metadata(file)
    experts = expert_spec(metadata, renormalise=True)
    mixers = attention_specs(metadata, qk_norm="per_head")
    return model_spec(metadata, mixers, experts_everywhere(metadata, experts))
