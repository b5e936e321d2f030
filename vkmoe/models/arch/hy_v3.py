"""Reads Hunyuan 3: q and k normed in each head, leading dense layers, a shared expert, and routed
ones chosen by sigmoid and a bias.

A file does not say how many layers are dense: these have no router. Layers that guess tokens ahead
stand behind the others.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile

from vkmoe.facts import ModelSpec
from vkmoe.gguf_file import GgufFile
from vkmoe.models.arch import common
from vkmoe.models.metadata import Metadata


def read_spec(file: GgufFile) -> ModelSpec:
    """Read the spec of a hy_v3 file."""
    metadata = Metadata(file)
    metadata.ignore("leading_dense_block_count")  # no file is known to have it
    n_ahead = metadata.count("nextn_predict_layers", metadata.n_layers - 1)
    layers = range(metadata.n_layers - n_ahead - 1)
    routers = (f"blk.{layer}.ffn_gate_inp.weight" for layer in layers)
    n_dense = sum(1 for _ in takewhile(lambda name: name not in file.tensors, routers))
    experts = common.grouped_experts(metadata, renormalise=True, selection_bias=True)
    shared = metadata.size("expert_shared_feed_forward_length", experts.width)
    experts = replace(experts, shared_width=shared)
    blocks = common.experts_behind(metadata, experts, n_dense)
    mixers = common.attention_specs(metadata, qk_norm="per_head")
    return common.model_spec(metadata, mixers, blocks, n_ahead)
