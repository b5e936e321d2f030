"""Reads Qwen3-Next, Qwen3.5 and their like: a gated delta rule in most layers, and in the others
attention whose outputs are gated.

In qwen3next a key head goes with neighbouring heads of values; converters of the others put these
into another order. Layers that guess tokens ahead stand behind the others, and have attention.
"""

from __future__ import annotations

from dataclasses import replace

from vkmoe.errors import ModelFileError
from vkmoe.facts import AttentionSpec, DeltaNetSpec, ExpertSpec, FeedForward, ModelSpec
from vkmoe.gguf_file import GgufFile
from vkmoe.models.arch import common
from vkmoe.models.metadata import WRONG_FILE, Metadata

MAX_TAPS, MAX_STATE = 7, 256  # of a convolution; dimensions of a head's state
FULL_INTERVAL = 4  # every so many layers one has attention, where a file is silent


def read_spec(file: GgufFile) -> ModelSpec:
    """Read the spec of a qwen3next, qwen35 or qwen35moe file."""
    metadata = Metadata(file)
    # Text has the same position in each section, so that they do not matter.
    metadata.ignore("rope.dimension_sections")
    attention = common.attention_specs(metadata, qk_norm="per_head")
    delta = _delta_net(metadata, tiled=metadata.prefix != "qwen3next.")
    n_ahead = metadata.count("nextn_predict_layers", largest=metadata.n_layers - 1)
    first_ahead = metadata.n_layers - n_ahead
    mixers: list[AttentionSpec | DeltaNetSpec] = [
        delta if is_recurrent and index < first_ahead else replace(full, gated=True)
        for index, (full, is_recurrent) in enumerate(
            zip(attention, _recurrent(metadata), strict=True)
        )
    ]
    blocks: tuple[FeedForward, ...]
    if metadata.has("expert_count"):
        blocks = common.experts_everywhere(metadata, _experts(metadata))
    else:
        blocks = common.dense_specs(metadata)
    return common.model_spec(metadata, mixers, blocks, n_ahead)


def _recurrent(metadata: Metadata) -> tuple[bool, ...]:
    """Say which layers have a delta rule: newer files list them, older ones have a period."""
    if metadata.has("attention.recurrent_layers"):
        metadata.ignore("full_attention_interval")
        return metadata.pattern("attention.recurrent_layers", FULL_INTERVAL)
    return metadata.pattern("full_attention_interval", FULL_INTERVAL)


def _delta_net(metadata: Metadata, tiled: bool) -> DeltaNetSpec:
    dim = metadata.size("ssm.state_size", largest=MAX_STATE)
    n_heads = metadata.size("ssm.time_step_rank", largest=common.MAX_HEADS)
    n_keys = metadata.size("ssm.group_count", largest=common.MAX_HEADS)
    n_taps = metadata.size("ssm.conv_kernel", largest=MAX_TAPS)
    inner = metadata.size("ssm.inner_size", n_heads * dim)
    if n_heads % n_keys or inner != n_heads * dim or dim % 8:
        raise ModelFileError(
            f"{metadata.file.path}: {n_heads} heads of {dim} with {n_keys} key heads and "
            f"{metadata.prefix}ssm.inner_size {inner}: heads must be a multiple of key heads, "
            "heads times their size the inner size, and that size a multiple of 8",
            WRONG_FILE,
        )
    return DeltaNetSpec(n_keys, n_heads, dim, n_taps, tiled)


def _experts(metadata: Metadata) -> ExpertSpec:
    experts = common.expert_spec(metadata, renormalise=True)
    shared = metadata.size("expert_shared_feed_forward_length", experts.width)
    return replace(experts, shared_width=shared, shared_gate=True)
