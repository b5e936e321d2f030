"""Reads Mistral 4: latent attention, shared experts, and routed ones chosen by softmax, whose
weights are made to add up to 1.

Queries grow with their position, a step for each so many positions; within the first step they do
not, so that the context ends there.
"""

from __future__ import annotations

from vkmoe.errors import UnsupportedModelError
from vkmoe.facts import ModelSpec
from vkmoe.gguf_file import GgufFile
from vkmoe.models.arch import deepseek2
from vkmoe.models.arch.common import limited
from vkmoe.models.metadata import Metadata

GROWS, STEP = "attention.temperature_scale", "attention.temperature_length"


def read_spec(file: GgufFile) -> ModelSpec:
    """Read the spec of a mistral4 file."""
    metadata = Metadata(file)
    grows = metadata.not_negative(GROWS, 0.0)
    step = metadata.size(STEP) if grows else metadata.count(STEP, 1 << 24)
    spec = deepseek2.latent_spec(metadata, deepseek2.latent_attention(metadata))
    experts = spec.experts
    if experts is not None and experts.n_groups > 1 and experts.gating == "softmax":
        raise UnsupportedModelError(
            f"{file.path}: {metadata.prefix}expert_group_count is {experts.n_groups}",
            f"for {metadata.prefix[:-1]} vkmoe knows one group of all experts",
        )
    why = "beyond them its queries grow, which vkmoe does not do"
    return limited(spec, step, why) if grows else spec
