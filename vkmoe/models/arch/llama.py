"""Reads Llama, Mistral and Mixtral: grouped attention, normal RoPE, biases where there are any.

With experts (Mixtral) the routing weights are renormalised.
"""

from __future__ import annotations

from dataclasses import replace

from vkmoe.facts import FeedForward, ModelSpec
from vkmoe.gguf_file import GgufFile
from vkmoe.kernels.router.operations import MAX_EXPERTS
from vkmoe.models.arch import common
from vkmoe.models.metadata import Metadata


def read_spec(file: GgufFile) -> ModelSpec:
    """Read the spec of a llama file."""
    metadata = Metadata(file)
    blocks: tuple[FeedForward, ...]
    if metadata.count("expert_count", MAX_EXPERTS):
        width = metadata.size("feed_forward_length")
        experts = common.expert_spec(metadata, renormalise=True, width=width)
        blocks = common.experts_everywhere(metadata, experts)
    else:
        metadata.count("expert_used_count", 0)
        blocks = common.dense_specs(metadata, bias="blk.0.ffn_gate.bias" in file.tensors)
    qkv_bias = "blk.0.attn_q.bias" in file.tensors
    output_bias = "blk.0.attn_output.bias" in file.tensors
    mixers = [
        replace(mixer, qkv_bias=qkv_bias, output_bias=output_bias)
        for mixer in common.attention_specs(metadata, rope_style="normal")
    ]
    return common.model_spec(metadata, mixers, blocks)
