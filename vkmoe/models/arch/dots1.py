"""Reads dots.llm1: q and k normed in each head, leading dense layers, shared experts, and routed
ones chosen by sigmoid and, where a file has one, a bias.

dots.llm1: arXiv:2506.05767.
"""

from __future__ import annotations

from vkmoe.facts import ModelSpec
from vkmoe.gguf_file import GgufFile
from vkmoe.models.arch import common
from vkmoe.models.metadata import Metadata


def read_spec(file: GgufFile) -> ModelSpec:
    """Read the spec of a dots1 file."""
    metadata = Metadata(file)
    n_dense = common.leading_dense(metadata)
    selection_bias = common.some_layer_has(file, "exp_probs_b.bias")
    experts = common.grouped_experts(metadata, renormalise=False, selection_bias=selection_bias)
    mixers = common.attention_specs(metadata, qk_norm="per_head")
    blocks = common.experts_behind(metadata, experts, n_dense)
    return common.model_spec(metadata, mixers, blocks)
