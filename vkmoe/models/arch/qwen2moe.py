"""Reads Qwen2-MoE: biases on q, k and v, and a shared expert that its own logit weighs.

Routing weights are not renormalised.
"""

from __future__ import annotations

from dataclasses import replace

from vkmoe.facts import ModelSpec
from vkmoe.gguf_file import GgufFile
from vkmoe.models.arch.common import expert_spec, grouped_spec
from vkmoe.models.metadata import Metadata

__all__ = ["read_spec"]


def read_spec(file: GgufFile) -> ModelSpec:
    """Read the spec of a qwen2moe file."""
    metadata = Metadata(file)
    experts = expert_spec(metadata, renormalise=False)
    spec = grouped_spec(metadata, experts)
    # Early files have the shared expert's width as that of a layer without experts.
    shared_width = metadata.size("expert_shared_feed_forward_length", spec.feed_forward_width)
    metadata.finish()
    experts = replace(experts, shared_width=shared_width, shared_gate=True)
    return replace(spec, experts=experts, qkv_bias=True)
