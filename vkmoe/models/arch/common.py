"""Reads what the files of all architectures have in common: sizes, heads, experts.

An architecture's module reads what differs, and makes the layers of a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from vkmoe.errors import ModelFileError, UnsupportedModelError
from vkmoe.facts import (
    AttentionSpec,
    DenseSpec,
    ExpertSpec,
    FeedForward,
    LayerSpec,
    Mixer,
    ModelSpec,
    QkNorm,
)
from vkmoe.gguf_file import GgufFile
from vkmoe.kernels.attention.shapes import MAX_HEAD_DIM, UNIT_DIMS
from vkmoe.kernels.router.operations import MAX_EXPERTS, MAX_USED
from vkmoe.models.layers.rope import read_rope
from vkmoe.models.metadata import MAX_SIZE, WRONG_FILE, Metadata

# Values of <arch>.expert_gating_func. A softmax of the chosen logits alone is one of all logits
# with the weights of the chosen ones renormalised.
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3
GATINGS: Mapping[int, Literal["softmax", "sigmoid"]] = {
    SOFTMAX: "softmax",
    SIGMOID: "sigmoid",
    SOFTMAX_OF_CHOSEN: "softmax",
}
MAX_HEADS = 4096


def attention_specs(
    metadata: Metadata,
    *,
    qk_norm: QkNorm = "none",
    rope_style: Literal["neox", "normal"] = "neox",
    truncate: bool = True,
) -> tuple[AttentionSpec, ...]:
    """Read the grouped-query attention of each layer. Raises ModelFileError."""
    width = metadata.size("embedding_length")
    heads = metadata.per_layer("attention.head_count", largest=MAX_HEADS)
    kv_heads = heads
    if metadata.has("attention.head_count_kv"):
        kv_heads = metadata.per_layer("attention.head_count_kv", largest=MAX_HEADS)
    default = max(1, width // heads[0])
    head_dim = metadata.size("attention.key_length", default, largest=MAX_HEAD_DIM)
    value_dim = metadata.size("attention.value_length", head_dim, largest=MAX_HEAD_DIM)
    for n_heads, n_kv_heads in zip(heads, kv_heads, strict=True):
        if n_heads % n_kv_heads or value_dim != head_dim or head_dim % UNIT_DIMS:
            raise ModelFileError(
                f"{metadata.file.path}: {n_heads} heads of {head_dim}, {n_kv_heads} KV heads of "
                f"{value_dim}: heads must be a multiple of KV heads, widths equal and a multiple "
                f"of {UNIT_DIMS}",
                WRONG_FILE,
            )
    rope = read_rope(metadata, head_dim, rope_style, truncate=truncate)
    pairs = zip(heads, kv_heads, strict=True)
    return tuple(AttentionSpec(*pair, head_dim, rope, qk_norm) for pair in pairs)


def dense_specs(
    metadata: Metadata, width: int | None = None, *, bias: bool = False
) -> tuple[DenseSpec, ...]:
    """Read the block without experts of each layer. `width` is for files that do not name it."""
    widths = metadata.per_layer("feed_forward_length", width)
    return tuple(DenseSpec(inner, bias) for inner in widths)


def model_spec(
    metadata: Metadata,
    mixers: Sequence[Mixer],
    feed_forwards: Sequence[FeedForward],
    n_ahead_layers: int = 0,
    guesses: bool = True,
) -> ModelSpec:
    """Make the spec of a model of these layers. Call it last: it refuses keys that were not read.

    The last `n_ahead_layers` of them guess tokens ahead, of which the first one is enough, if
    vkmoe knows how it `guesses`.
    """
    file = metadata.file
    embeddings = file.tensors.get("token_embd.weight")
    layers = [LayerSpec(*pair) for pair in zip(mixers, feed_forwards, strict=True)]
    n_layers = len(layers) - n_ahead_layers
    spec = ModelSpec(
        architecture=file.require("general.architecture", str),
        name=metadata.name,
        width=metadata.size("embedding_length"),
        n_vocab=embeddings.shape[0] if embeddings is not None else 0,
        context_length=metadata.size("context_length"),
        norm_eps=metadata.positive("attention.layer_norm_rms_epsilon"),
        tied_embeddings="output.weight" not in file.tensors,
        layers=tuple(layers[:n_layers]),
        n_ahead_layers=n_ahead_layers,
        ahead=layers[n_layers] if guesses and n_ahead_layers else None,
    )
    metadata.finish()
    return spec


def limited(spec: ModelSpec, n_positions: int, why: str) -> ModelSpec:
    """Limit the context to positions within which attention is what vkmoe computes."""
    if spec.context_length <= n_positions:
        return spec
    return replace(spec, context_length=n_positions, context_limit=why)


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
    renormalise = metadata.value("expert_weights_norm", bool, renormalise)
    return ExpertSpec(
        n_experts=n_experts,
        n_used=n_used,
        width=metadata.size("expert_feed_forward_length", width or _width_of_tensors(file)),
        renormalise=renormalise or gating == SOFTMAX_OF_CHOSEN,
        scale=metadata.positive("expert_weights_scale", 1.0),
        gating=GATINGS[gating],
    )


def experts_everywhere(metadata: Metadata, experts: ExpertSpec) -> tuple[ExpertSpec, ...]:
    """Give these experts to every layer. The width of dense blocks, if a file has it, is unused."""
    metadata.per_layer("feed_forward_length", experts.width)
    return (experts,) * metadata.n_layers


def grouped_experts(
    metadata: Metadata,
    *,
    renormalise: bool,
    selection_bias: bool,
    gatings: tuple[int, ...] = (SIGMOID,),
) -> ExpertSpec:
    """Read experts that may be chosen within groups, and shared ones beside them.

    A file that says nothing of groups has one of all experts; the rest is as in `expert_spec`.
    """
    experts = expert_spec(metadata, renormalise=renormalise, gatings=gatings)
    n_shared = metadata.count("expert_shared_count", MAX_EXPERTS)
    n_groups = metadata.count("expert_group_count", experts.n_experts) or 1
    n_groups_used = metadata.count("expert_group_used_count", n_groups) or n_groups
    in_group = experts.n_experts // n_groups
    too_small = experts.gating == "sigmoid" and n_groups > 1 and in_group < 2
    if experts.n_experts % n_groups or n_groups_used * in_group < experts.n_used or too_small:
        raise ModelFileError(
            f"{metadata.file.path}: {experts.n_used} experts used in {n_groups_used} of "
            f"{n_groups} groups of {experts.n_experts}",
            WRONG_FILE,
        )
    return replace(
        experts,
        shared_width=n_shared * experts.width,
        selection_bias=selection_bias,
        n_groups=n_groups,
        n_groups_used=n_groups_used,
    )


def some_layer_has(file: GgufFile, name: str) -> bool:
    """Say whether a layer has a tensor; in some files there is but the one that guesses ahead."""
    return any(key.split(".", 2)[2:] == [name] for key in file.tensors)


def leading_dense(metadata: Metadata, n_ahead_layers: int = 0) -> int:
    """Read how many layers at the beginning have no experts; the last one has, in any case."""
    return metadata.count("leading_dense_block_count", metadata.n_layers - n_ahead_layers - 1)


def experts_behind(
    metadata: Metadata, experts: ExpertSpec, n_dense: int
) -> tuple[FeedForward, ...]:
    """Give these experts to every layer behind the first `n_dense`, which have dense blocks."""
    blocks = dense_specs(metadata, experts.width)
    return (*blocks[:n_dense], *(experts,) * (metadata.n_layers - n_dense))


def _width_of_tensors(file: GgufFile) -> int | None:
    """Read the width that early files do not name from the experts' tensors."""
    tensor = file.tensors.get("blk.0.ffn_gate_exps.weight")
    return tensor.shape[-2] if tensor is not None and len(tensor.shape) == 3 else None
