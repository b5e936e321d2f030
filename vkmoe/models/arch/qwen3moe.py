"""Reads Qwen3-MoE: Qwen3 with routed experts in every layer (softmax, top-k, renormalised)."""

from __future__ import annotations

from vkmoe.facts import ModelSpec
from vkmoe.gguf_file import GgufFile
from vkmoe.models.arch.common import attention_specs, expert_spec, experts_everywhere, model_spec
from vkmoe.models.metadata import Metadata


def read_spec(file: GgufFile) -> ModelSpec:
    """Read the spec of a qwen3moe file."""
    metadata = Metadata(file)
    experts = expert_spec(metadata, renormalise=True)
    mixers = attention_specs(metadata, qk_norm="per_head")
    return model_spec(metadata, mixers, experts_everywhere(metadata, experts))
