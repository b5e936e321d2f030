"""Reads gpt-oss: biases everywhere, attention sinks, a sliding window in every other layer, and
experts with a clamped SwiGLU whose weights are a softmax of the chosen logits.
"""

from __future__ import annotations

from dataclasses import replace

from vkmoe.facts import ModelSpec
from vkmoe.gguf_file import GgufFile
from vkmoe.models.arch.common import SOFTMAX, SOFTMAX_OF_CHOSEN, expert_spec, grouped_spec
from vkmoe.models.metadata import Metadata

__all__ = ["read_spec"]


def read_spec(file: GgufFile) -> ModelSpec:
    """Read the spec of a gpt-oss file."""
    metadata = Metadata(file)
    experts = expert_spec(
        metadata,
        renormalise=True,
        width=metadata.size("feed_forward_length"),
        gatings=(SOFTMAX_OF_CHOSEN, SOFTMAX),
    )
    spec = grouped_spec(metadata, experts, truncate=False)
    window = metadata.size("attention.sliding_window")
    metadata.finish()
    return replace(
        spec,
        experts=replace(experts, router_bias=True, biases=True),
        activation="swiglu_oai",
        qkv_bias=True,
        output_bias=True,
        sinks=True,
        windows=tuple(0 if layer % 2 else window for layer in range(spec.n_layers)),
    )
