"""Reads Gemma 4: windows in most layers, whose heads are narrower and turn otherwise; norms behind
every block; a dense block beside the experts.

Layers of its smaller models that share keys and values, and embeddings for each layer, are refused.
"""

from __future__ import annotations

from dataclasses import replace

from vkmoe.errors import UnsupportedModelError
from vkmoe.facts import AttentionSpec, DenseSpec, FeedForward, ModelSpec
from vkmoe.gguf_file import GgufFile
from vkmoe.models.arch import common
from vkmoe.models.metadata import MAX_SIZE, Metadata
from vkmoe.models.rope import read_window_rope

WINDOW_PERIOD = 6  # one of so many layers sees all, where a file is silent


def read_spec(file: GgufFile) -> ModelSpec:
    """Read the spec of a gemma4 file."""
    metadata = Metadata(file)
    for key in ("attention.shared_kv_layers", "embedding_length_per_layer_input"):
        if metadata.count(key, MAX_SIZE):
            raise UnsupportedModelError(
                f"{file.path}: {metadata.prefix}{key} is not 0",
                "vkmoe runs Gemma 4 31B and 26B-A4B, not yet E2B and E4B",
            )
    widths = metadata.per_layer("feed_forward_length")
    blocks: tuple[FeedForward, ...] = tuple(DenseSpec(n, activation="geglu") for n in widths)
    if metadata.has("expert_count"):
        experts = common.expert_spec(metadata, renormalise=True)
        experts = replace(experts, activation="geglu", output_scales=True)
        blocks = tuple(replace(experts, beside_width=n) for n in widths)
    mixers = _attention(metadata)
    logit_cap = metadata.not_negative("final_logit_softcapping", 0.0)
    spec = common.model_spec(metadata, mixers, blocks)
    layers = tuple(
        replace(layer, post_norms=True, scaled=f"blk.{i}.layer_output_scale.weight" in file.tensors)
        for i, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=layers, embedding_scale=spec.width**0.5, logit_cap=logit_cap)


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
