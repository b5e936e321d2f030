"""Reads gpt-oss: biases everywhere, attention sinks, a sliding window in every other layer, and
experts with a clamped SwiGLU whose weights are a softmax of the chosen logits.
"""

from __future__ import annotations

from dataclasses import replace

from vkmoe.facts import ModelSpec
from vkmoe.gguf_file import GgufFile
from vkmoe.models.arch import common
from vkmoe.models.metadata import Metadata


def read_spec(file: GgufFile) -> ModelSpec:
    """Read the spec of a gpt-oss file."""
    metadata = Metadata(file)
    experts = common.expert_spec(
        metadata,
        renormalise=True,
        width=metadata.size("feed_forward_length"),
        gatings=(common.SOFTMAX_OF_CHOSEN, common.SOFTMAX),
    )
    experts = replace(experts, router_bias=True, biases=True, activation="swiglu_oai")
    window = metadata.size("attention.sliding_window")
    has_window = metadata.pattern("attention.sliding_window_pattern", period=2)
    mixers = [
        replace(mixer, window=window * windowed, qkv_bias=True, output_bias=True, sinks=True)
        for mixer, windowed in zip(
            common.attention_specs(metadata, truncate=False), has_window, strict=True
        )
    ]
    return common.model_spec(metadata, mixers, common.experts_everywhere(metadata, experts))
