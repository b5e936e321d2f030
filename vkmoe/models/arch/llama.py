"""Reads Llama, Mistral and Mixtral: grouped attention, normal RoPE, biases where there are any.

With experts (Mixtral) the routing weights are renormalised.
"""

from __future__ import annotations

from dataclasses import replace

from vkmoe.facts import ModelSpec
from vkmoe.gguf_file import GgufFile
from vkmoe.models.arch.common import expert_spec, grouped_spec
from vkmoe.models.metadata import Metadata
from vkmoe.ops.router import MAX_EXPERTS

__all__ = ["read_spec"]


def read_spec(file: GgufFile) -> ModelSpec:
    """Read the spec of a llama file."""
    metadata = Metadata(file)
    experts = None
    if metadata.count("expert_count", MAX_EXPERTS):
        width = metadata.size("feed_forward_length")
        experts = expert_spec(metadata, renormalise=True, width=width)
    else:
        metadata.count("expert_used_count", 0)
    spec = grouped_spec(metadata, experts, rope_style="normal")
    metadata.finish()
    return replace(
        spec,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        feed_forward_bias="blk.0.ffn_gate.bias" in file.tensors,
    )
