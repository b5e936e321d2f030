"""Reads MiniMax-M2: q and k normed over their full width, heads that turn in part, and experts in
every layer, chosen by sigmoid and a bias, whose weights are made to add up to 1.
"""

from __future__ import annotations

from dataclasses import replace

from vkmoe.facts import ModelSpec
from vkmoe.gguf_file import GgufFile
from vkmoe.models.arch import common
from vkmoe.models.metadata import Metadata


def read_spec(file: GgufFile) -> ModelSpec:
    """Read the spec of a minimax-m2 file."""
    metadata = Metadata(file)
    experts = common.expert_spec(metadata, renormalise=True, gatings=(common.SIGMOID,))
    experts = replace(experts, selection_bias=True)
    mixers = common.attention_specs(metadata, qk_norm="full_width")
    return common.model_spec(metadata, mixers, common.experts_everywhere(metadata, experts))
