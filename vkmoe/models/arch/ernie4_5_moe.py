"""Reads ERNIE 4.5 with experts: interleaved rotary pairs, leading dense layers, shared experts, and
routed ones chosen by softmax and a bias, whose weights are made to add up to 1.
"""

from __future__ import annotations

from dataclasses import replace

from vkmoe.errors import UnsupportedModelError
from vkmoe.facts import ExpertSpec, ModelSpec
from vkmoe.gguf_file import GgufFile
from vkmoe.kernels.router.operations import MAX_EXPERTS
from vkmoe.models.arch import common
from vkmoe.models.metadata import Metadata

STEP = "interleave_moe_layer_step"


def read_spec(file: GgufFile) -> ModelSpec:
    """Read the spec of an ernie4_5-moe file."""
    metadata = Metadata(file)
    if (step := metadata.size(STEP, 1)) != 1:
        raise UnsupportedModelError(
            f"{file.path}: {metadata.prefix}{STEP} is {step}",
            "vkmoe runs files with experts in every layer behind the dense ones: 1",
        )
    mixers = common.attention_specs(metadata, rope_style="normal")
    n_dense = common.leading_dense(metadata)
    experts = _experts(metadata, common.some_layer_has(file, "exp_probs_b.bias"))
    blocks = common.experts_behind(metadata, experts, n_dense)
    return common.model_spec(metadata, mixers, blocks)


def _experts(metadata: Metadata, selection_bias: bool) -> ExpertSpec:
    """Read the experts. The width of the shared block is that of all shared experts together."""
    experts = common.expert_spec(metadata, renormalise=True)
    n_shared = metadata.count("expert_shared_count", MAX_EXPERTS)
    shared_width = n_shared * experts.width
    if metadata.has("expert_shared_feed_forward_length"):
        shared_width = metadata.size("expert_shared_feed_forward_length")
    return replace(experts, shared_width=shared_width, selection_bias=selection_bias)
