"""Reads GLM-4.5 and 4.6, and Solar Open: heads that turn in part, leading dense layers, shared
experts, and routed ones chosen by sigmoid and a bias.

GLM-4.5: arXiv:2508.06471. The larger models norm q and k in each head, and all but Solar Open have
biases of q, k and v: their tensors say so. Layers that guess tokens ahead stand behind the others.
"""

from __future__ import annotations

from dataclasses import replace

from vkmoe.facts import ModelSpec
from vkmoe.gguf_file import GgufFile
from vkmoe.models.arch import common
from vkmoe.models.metadata import Metadata


def read_spec(file: GgufFile) -> ModelSpec:
    """Read the spec of a glm4moe file."""
    metadata = Metadata(file)
    # Text has the same position in each section, so that they do not matter.
    metadata.ignore("rope.dimension_sections")
    is_normed = common.some_layer_has(file, "attn_q_norm.weight")
    qkv_bias = common.some_layer_has(file, "attn_q.bias")
    mixers = [
        replace(mixer, qkv_bias=qkv_bias)
        for mixer in common.attention_specs(metadata, qk_norm="per_head" if is_normed else "none")
    ]
    n_ahead = metadata.count("nextn_predict_layers", metadata.n_layers - 1)
    experts = common.grouped_experts(metadata, renormalise=True, selection_bias=True)
    blocks = common.experts_behind(metadata, experts, common.leading_dense(metadata, n_ahead))
    return common.model_spec(metadata, mixers, blocks, n_ahead)
