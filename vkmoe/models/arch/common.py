"""Reads what the files of all architectures have in common: sizes, heads, experts.

An architecture's module reads what differs, and changes the spec accordingly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from vkmoe.errors import ModelFileError, UnsupportedModelError
from vkmoe.facts import ExpertSpec, ModelSpec, RopeSpec
from vkmoe.gguf_file import GgufFile
from vkmoe.models.metadata import MAX_SIZE, WRONG_FILE, Metadata
from vkmoe.models.rope import read_rope
from vkmoe.ops.attention_shapes import MAX_HEAD_DIM, UNIT_DIMS
from vkmoe.ops.router import MAX_EXPERTS, MAX_USED

__all__ = [
    "MAX_HEADS",
    "SIGMOID",
    "SOFTMAX",
    "SOFTMAX_OF_CHOSEN",
    "base_spec",
    "expert_spec",
    "grouped_spec",
]

# Values of <arch>.expert_gating_func. A softmax of the chosen logits alone is one of all logits
# with the weights of the chosen ones renormalised.
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3
GATINGS: Mapping[int, Literal["softmax", "sigmoid"]] = {
    SOFTMAX: "softmax",
    SIGMOID: "sigmoid",
    SOFTMAX_OF_CHOSEN: "softmax",
}
MAX_HEADS = 4096


def grouped_spec(
    metadata: Metadata,
    experts: ExpertSpec | None,
    *,
    qk_norm: Literal["none", "per_head", "full_width"] = "none",
    rope_style: Literal["neox", "normal"] = "neox",
    truncate: bool = True,
) -> ModelSpec:
    """Read the spec of a model with grouped-query attention. Raises ModelFileError."""
    width = metadata.size("embedding_length")
    n_heads = metadata.size("attention.head_count", largest=MAX_HEADS)
    n_kv_heads = metadata.size("attention.head_count_kv", n_heads, largest=MAX_HEADS)
    head_dim = metadata.size("attention.key_length", max(1, width // n_heads), largest=MAX_HEAD_DIM)
    value_dim = metadata.size("attention.value_length", head_dim, largest=MAX_HEAD_DIM)
    if n_heads % n_kv_heads or value_dim != head_dim or head_dim % UNIT_DIMS:
        raise ModelFileError(
            f"{metadata.file.path}: {n_heads} heads of {head_dim}, {n_kv_heads} KV heads of "
            f"{value_dim}: heads must be a multiple of KV heads, widths equal and a multiple of "
            f"{UNIT_DIMS}",
            WRONG_FILE,
        )
    rope = read_rope(metadata, head_dim, rope_style, truncate=truncate)
    return base_spec(metadata, (n_heads, n_kv_heads, head_dim), rope, experts, qk_norm)


def base_spec(
    metadata: Metadata,
    heads: tuple[int, int, int],
    rope: RopeSpec,
    experts: ExpertSpec | None,
    qk_norm: Literal["none", "per_head", "full_width"] = "none",
) -> ModelSpec:
    """Read what specs of all models have. `heads`: their number, that of KV heads, their width."""
    file = metadata.file
    n_heads, n_kv_heads, head_dim = heads
    embeddings = file.tensors.get("token_embd.weight")
    return ModelSpec(
        architecture=file.require("general.architecture", str),
        name=metadata.name,
        n_layers=metadata.size("block_count", largest=4096),
        width=metadata.size("embedding_length"),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        n_vocab=embeddings.shape[0] if embeddings is not None else 0,
        context_length=metadata.size("context_length"),
        norm_eps=metadata.positive("attention.layer_norm_rms_epsilon"),
        rope=rope,
        qk_norm=qk_norm,
        feed_forward_width=metadata.size("feed_forward_length", experts.width if experts else None),
        experts=experts,
        tied_embeddings="output.weight" not in file.tensors,
    )


def expert_spec(
    metadata: Metadata,
    *,
    renormalise: bool,
    width: int | None = None,
    gatings: tuple[int, ...] = (SOFTMAX,),
) -> ExpertSpec:
    """Read the routed experts. `renormalise` is for files that do not state it.

    `width` is for files that do not name that of the experts; None: it is read from their tensors.
    `gatings` are the functions the architecture may use, the usual one first. Raises
    ModelFileError, UnsupportedModelError.
    """
    file = metadata.file
    n_experts = metadata.size("expert_count", largest=MAX_EXPERTS)
    n_used = metadata.size("expert_used_count", largest=MAX_USED)
    if n_used > n_experts:
        raise ModelFileError(f"{file.path}: {n_used} experts used of {n_experts}", WRONG_FILE)
    gating = metadata.count("expert_gating_func", MAX_SIZE) or gatings[0]
    if gating not in gatings:
        raise UnsupportedModelError(
            f"{file.path}: {metadata.prefix}expert_gating_func is {gating}",
            f"for {metadata.prefix[:-1]} vkmoe knows "
            + " and ".join(f"{GATINGS[item]} ({item})" for item in gatings),
        )
    renormalise = metadata.flag("expert_weights_norm", renormalise)
    return ExpertSpec(
        n_experts=n_experts,
        n_used=n_used,
        width=metadata.size("expert_feed_forward_length", width or _width_of_tensors(file)),
        renormalise=renormalise or gating == SOFTMAX_OF_CHOSEN,
        scale=metadata.positive("expert_weights_scale", 1.0),
        gating=GATINGS[gating],
    )


def _width_of_tensors(file: GgufFile) -> int | None:
    """Read the width that early files do not name from the experts' tensors."""
    tensor = file.tensors.get("blk.0.ffn_gate_exps.weight")
    return tensor.shape[-2] if tensor is not None and len(tensor.shape) == 3 else None
