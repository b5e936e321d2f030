"""Reads Ling 2.0 and Ring 2.0: q, k and v projected by one matrix, q and k normed in each head,
which turns in part, leading dense layers, shared experts, and routed ones chosen within groups.

Ling 2.0: arXiv:2510.22115. Layers that guess tokens ahead stand behind the others.
"""

from __future__ import annotations

from dataclasses import replace

from vkmoe.facts import ExpertSpec, ModelSpec
from vkmoe.gguf_file import GgufFile
from vkmoe.models.arch import common
from vkmoe.models.metadata import Metadata


def read_spec(file: GgufFile) -> ModelSpec:
    """Read the spec of a bailingmoe2 file."""
    metadata = Metadata(file)
    mixers = common.attention_specs(metadata, qk_norm="per_head")
    n_ahead = metadata.count("nextn_predict_layers", metadata.n_layers - 1)
    n_dense = common.leading_dense(metadata, n_ahead)
    experts = _experts(metadata, common.some_layer_has(file, "exp_probs_b.bias"))
    blocks = common.experts_behind(metadata, experts, n_dense)
    return common.model_spec(metadata, mixers, blocks, n_ahead, guesses=False)


def _experts(metadata: Metadata, selection_bias: bool) -> ExpertSpec:
    """Read the experts. A file may name the width of one shared expert, if it is its own."""
    experts = common.grouped_experts(metadata, renormalise=False, selection_bias=selection_bias)
    n_shared = experts.shared_width // experts.width
    shared = metadata.size("expert_shared_feed_forward_length", experts.width)
    return replace(experts, shared_width=n_shared * shared)
