"""Reads OLMoE: q/k norm over the full width of all heads, routing weights not renormalised."""

from __future__ import annotations

from vkmoe.facts import ModelSpec
from vkmoe.gguf_file import GgufFile
from vkmoe.models.arch.common import attention_specs, expert_spec, experts_everywhere, model_spec
from vkmoe.models.metadata import Metadata


def read_spec(file: GgufFile) -> ModelSpec:
    """Read the spec of an olmoe file."""
    metadata = Metadata(file)
    width = metadata.size("feed_forward_length")
    experts = expert_spec(metadata, renormalise=False, width=width)
    mixers = attention_specs(metadata, qk_norm="full_width")
    return model_spec(metadata, mixers, experts_everywhere(metadata, experts))
