"""Reads Gemma 4: windows in most layers, whose heads are narrower and turn otherwise; norms behind
every block; a dense block beside the experts.

The last layers of its smaller models see keys and values of earlier ones, and a token brings an
embedding of its own to each layer.
"""

from __future__ import annotations

from dataclasses import replace

from vkmoe.facts import AttentionSpec, DenseSpec, FeedForward, LayerSpec, ModelSpec
from vkmoe.gguf_file import GgufFile
from vkmoe.models.arch import common
from vkmoe.models.layers.rope import read_window_rope
from vkmoe.models.metadata import MAX_SIZE, Metadata

WINDOW_PERIOD = 6  # one of so many layers sees all, where a file is silent


def read_spec(file: GgufFile) -> ModelSpec:
    """Read the spec of a gemma4 file."""
    metadata = Metadata(file)
    widths = metadata.per_layer("feed_forward_length")
    blocks: tuple[FeedForward, ...] = tuple(DenseSpec(n, activation="geglu") for n in widths)
    if metadata.has("expert_count"):
        experts = common.expert_spec(metadata, renormalise=True)
        experts = replace(experts, activation="geglu", output_scales=True)
        blocks = tuple(replace(experts, beside_width=n) for n in widths)
    mixers = _shared(metadata, _attention(metadata))
    logit_cap = metadata.not_negative("final_logit_softcapping", 0.0)
    input_width = metadata.count("embedding_length_per_layer_input", MAX_SIZE)
    spec = common.model_spec(metadata, mixers, blocks)
    spec = replace(spec, layers=_normed(file, spec), logit_cap=logit_cap)
    return replace(spec, embedding_scale=spec.width**0.5, input_width=input_width)


def read_drafter(file: GgufFile) -> ModelSpec:
    """Read the spec of a gemma4-assistant file, which guesses tokens for a gemma4 model.

    Its input is made of the model's embeddings; its layers have no keys and values of their own.
    """
    metadata = Metadata(file)
    widths = metadata.per_layer("feed_forward_length")
    mixers = [replace(mixer, own_kv=False) for mixer in _attention(metadata)]
    for key in ("attention.shared_kv_layers", "nextn_predict_layers"):
        if (n := metadata.size(key, metadata.n_layers)) != metadata.n_layers:
            metadata.refuse(key, n, "all layers are such ones")
    metadata.not_negative("final_logit_softcapping", 0.0)  # the likeliest token stays what it is
    metadata.count("embedding_length_per_layer_input", 0)
    scale = metadata.size("embedding_length_out") ** 0.5
    blocks = [DenseSpec(n, activation="geglu") for n in widths]
    spec = common.model_spec(metadata, mixers, blocks)
    return replace(spec, layers=_normed(file, spec), embedding_scale=scale)


def _normed(file: GgufFile, spec: ModelSpec) -> tuple[LayerSpec, ...]:
    """Return the layers with norms behind their blocks, and scales where the file has these."""
    return tuple(
        replace(layer, post_norms=True, scaled=f"blk.{i}.layer_output_scale.weight" in file.tensors)
        for i, layer in enumerate(spec.layers)
    )


def _attention(metadata: Metadata) -> list[AttentionSpec]:
    """Read the attention of each layer: what the keys of windows say, or the others."""
    window = metadata.size("attention.sliding_window")
    windowed = metadata.pattern("attention.sliding_window_pattern", WINDOW_PERIOD)
    whole = common.attention_specs(metadata, qk_norm="per_head")
    narrow = metadata.size("attention.key_length_swa", whole[0].head_dim)
    if (value := metadata.size("attention.value_length_swa", narrow)) != narrow:
        metadata.refuse("attention.value_length_swa", value, f"keys have {narrow}")
    rope = read_window_rope(metadata, narrow)
    normed = [replace(mixer, value_norm=True, scale=1.0) for mixer in whole]
    return [
        replace(mixer, window=window, head_dim=narrow, rope=rope) if has_window else mixer
        for mixer, has_window in zip(normed, windowed, strict=True)
    ]


def _shared(metadata: Metadata, mixers: list[AttentionSpec]) -> list[AttentionSpec]:
    """Let the last layers see what the last one before them of their kind has, window or not."""
    key = "attention.shared_kv_layers"
    n_shared = metadata.count(key, MAX_SIZE)
    first = len(mixers) - n_shared
    before = {bool(mixer.window): mixer for mixer in mixers[: max(0, first)]}
    for index in range(max(0, first), len(mixers)):
        if before.get(bool(mixers[index].window)) != mixers[index]:
            metadata.refuse(key, n_shared, f"layer {index} has none before it that is alike")
    return [*mixers[:first], *(replace(mixer, own_kv=False) for mixer in mixers[first:])]
