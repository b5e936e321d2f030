"""Reads Hunyuan-A13B: q and k normed in each head with gains behind the rotation, and a shared
expert beside routed ones, which are chosen by softmax.

Converters have put the scaling of rotary angles (NTK, "alpha") into their base.
"""

from __future__ import annotations

from dataclasses import replace

from vkmoe.errors import UnsupportedModelError
from vkmoe.facts import ModelSpec
from vkmoe.gguf_file import GgufFile
from vkmoe.models.arch import common
from vkmoe.models.metadata import Metadata


def read_spec(file: GgufFile) -> ModelSpec:
    """Read the spec of a hunyuan-moe file."""
    metadata = Metadata(file)
    mixers = common.attention_specs(metadata, qk_norm="per_head_turned")
    if (scaling := mixers[0].rope.scaling) not in ("none", "linear"):
        raise UnsupportedModelError(
            f"{file.path}: {metadata.prefix}rope.scaling.type is {scaling}",
            "q and k are normed behind the rotation, which vkmoe knows without scaling or linear",
        )
    metadata.ignore("expert_shared_count")  # they are one block, whose width is that of all
    experts = common.expert_spec(metadata, renormalise=True)
    width = metadata.size("feed_forward_length", experts.width)
    shared_width = metadata.size("expert_shared_feed_forward_length", width)
    blocks = common.experts_everywhere(metadata, replace(experts, shared_width=shared_width))
    return common.model_spec(metadata, mixers, blocks)
