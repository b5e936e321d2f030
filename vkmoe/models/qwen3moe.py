"""Qwen3-MoE: Qwen3 with routed experts in every layer (softmax over all, top-k, renormalised)."""

from __future__ import annotations

from vkmoe.errors import ModelFileError, UnsupportedModelError
from vkmoe.facts import ExpertSpec, ModelSpec
from vkmoe.gguf_file import GgufFile
from vkmoe.models.metadata import Metadata
from vkmoe.models.qwen3 import common_spec

__all__ = ["read_spec"]

SOFTMAX_GATING = 1  # the value of <arch>.expert_gating_func


def read_spec(file: GgufFile) -> ModelSpec:
    """The spec of a qwen3moe file."""
    metadata = Metadata(file)
    n_experts = metadata.size("expert_count", largest=1024)
    n_used = metadata.size("expert_used_count", largest=32)
    if n_used > n_experts:
        raise ModelFileError(
            f"{file.path}: {n_used} experts used of {n_experts}",
            "the file was converted wrongly or is damaged",
        )
    gating = metadata.size("expert_gating_func", SOFTMAX_GATING)
    if gating != SOFTMAX_GATING:
        raise UnsupportedModelError(
            f"{file.path}: {metadata.prefix}expert_gating_func is {gating}",
            f"for {metadata.prefix[:-1]} vkmoe knows softmax ({SOFTMAX_GATING})",
        )
    width = metadata.size("expert_feed_forward_length", _width_of_tensors(file))
    experts = ExpertSpec(
        n_experts=n_experts,
        n_used=n_used,
        width=width,
        renormalise=metadata.flag("expert_weights_norm", True),
        scale=metadata.positive("expert_weights_scale", 1.0),
    )
    spec = common_spec(metadata, experts)
    metadata.finish()
    return spec


def _width_of_tensors(file: GgufFile) -> int | None:
    """Early files do not name the experts' width; their tensors show it."""
    tensor = file.tensors.get("blk.0.ffn_gate_exps.weight")
    return tensor.shape[-2] if tensor is not None and len(tensor.shape) == 3 else None
