"""Reads Hunyuan-A13B: q and k normed in each head behind their rotation, a shared expert, and
routed ones whose weights are made to add up to 1.

The base of its angles is stretched by a fixed factor; files have the product.
"""

from __future__ import annotations

from dataclasses import replace

from vkmoe.facts import ModelSpec
from vkmoe.gguf_file import GgufFile
from vkmoe.kernels.router.operations import MAX_EXPERTS
from vkmoe.models.arch import common
from vkmoe.models.metadata import Metadata


def read_spec(file: GgufFile) -> ModelSpec:
    """Read the spec of a hunyuan-moe file."""
    metadata = Metadata(file)
    experts = common.expert_spec(metadata, renormalise=True)
    metadata.count("expert_shared_count", MAX_EXPERTS)  # of which the width below is one, or all
    (width,) = set(metadata.per_layer("feed_forward_length", experts.width))
    shared = metadata.size("expert_shared_feed_forward_length", width)
    blocks = (replace(experts, shared_width=shared),) * metadata.n_layers
    mixers = common.attention_specs(metadata, qk_norm="per_head_turned")
    return common.model_spec(metadata, mixers, blocks)
