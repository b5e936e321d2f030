"""This module holds the shapes of real models, from their published configurations.

It owns what decides how large the kernels of a model are, for known models, for a user's own file,
and for a tiny model of no file that has a bit of everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from vkmoe.errors import UsageError
from vkmoe.facts import AttentionSpec, DeltaNetSpec, ExpertSpec, LatentSpec, Mixer, RopeSpec
from vkmoe.kernels.shapes import KernelShapes
from vkmoe.models import ModelFile
from vkmoe.models.tensors import FeedForwardTensors, ModelTensors
from vkmoe.models.trunk_tensors import FileMatrix


@dataclass(frozen=True)
class LatentSizes:
    """Holds widths of latent attention (DeepSeek-V2, arXiv:2405.04434), beside a head's own."""

    kv_rank: int
    rope_size: int
    value_size: int


@dataclass(frozen=True)
class DeltaSizes:
    """Holds heads of a gated delta rule, which most layers have, and its convolution."""

    n_key_heads: int
    n_heads: int
    head_size: int
    n_taps: int


@dataclass(frozen=True)
class WholeSizes:
    """Holds KV heads of the layers that see everything, where they differ from windowed ones."""

    n_kv_heads: int
    head_size: int  # of queries too


@dataclass(frozen=True)
class ModelSizes:
    """Holds the published numbers that decide how large a model's matrices are."""

    hidden: int
    n_heads: int
    n_kv_heads: int
    head_size: int  # of latent attention without the rotary part
    n_experts: int
    n_experts_used: int
    expert_size: int
    n_tokens: int  # of the vocabulary
    architecture: str = "qwen3moe"
    shared_size: int = 0  # of all shared experts together
    beside_size: int = 0  # of a dense block beside the experts
    window: int = 0
    latent: LatentSizes | None = None
    delta: DeltaSizes | None = None
    whole: WholeSizes | None = None


SIZES = {
    "olmoe-1b-7b": ModelSizes(2048, 16, 16, 128, 64, 8, 1024, 50304, "olmoe"),
    "qwen3-30b-a3b": ModelSizes(2048, 32, 4, 128, 128, 8, 768, 151936),
    "mixtral-8x7b": ModelSizes(4096, 32, 8, 128, 8, 2, 14336, 32000, "llama"),
    "qwen1.5-moe-a2.7b": ModelSizes(2048, 16, 16, 128, 60, 4, 1408, 151936, "qwen2moe", 5632),
    "gpt-oss-20b": ModelSizes(2880, 64, 8, 64, 32, 4, 2880, 201088, "gpt-oss", window=128),
    "gpt-oss-120b": ModelSizes(2880, 64, 8, 64, 128, 4, 2880, 201088, "gpt-oss", window=128),
    "deepseek-v2-lite": ModelSizes(
        *(2048, 16, 16, 128, 64, 6, 1408, 102400, "deepseek2", 2816),
        latent=LatentSizes(512, 64, 128),
    ),
    "qwen3.6-35b-a3b": ModelSizes(
        *(2048, 16, 2, 256, 256, 8, 512, 248320, "qwen35moe", 512),
        delta=DeltaSizes(16, 32, 128, 4),
    ),
    "gemma-4-26b-a4b": ModelSizes(
        *(2816, 16, 8, 256, 128, 8, 704, 262144, "gemma4"),
        beside_size=2112,
        window=1024,
        whole=WholeSizes(2, 512),
    ),
}
ROTARY_SHARE = {"qwen35moe": 4}  # of heads: one in so many dimensions turns


# What architectures do that sizes do not tell: in attention, and in experts.
_KINDS: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "olmoe": ({"qk_norm": "full_width"}, {"renormalise": False}),
    "qwen3moe": ({"qk_norm": "per_head"}, {}),
    "llama": ({}, {}),
    "qwen2moe": ({}, {"renormalise": False, "shared_gate": True}),
    "gpt-oss": ({"sinks": True}, {"biases": True, "activation": "swiglu_oai"}),
    "deepseek2": ({}, {"renormalise": False}),
    "qwen35moe": ({"qk_norm": "per_head", "gated": True}, {"shared_gate": True}),
    "gemma4": (
        {"qk_norm": "per_head", "value_norm": True, "scale": 1.0},
        {"activation": "geglu", "output_scales": True},
    ),
}


def _shapes(name: str, model: ModelSizes) -> KernelShapes:
    heads, of_attention, of_experts = model.n_heads, *_KINDS[model.architecture]
    style: Literal["neox", "normal"] = "neox"
    if model.architecture in ("llama", "deepseek2"):
        style = "normal"
    mixers: tuple[Mixer, ...]
    if model.latent is not None:
        rope = RopeSpec(model.latent.rope_size, style=style)
        rank, value_dim = model.latent.kv_rank, model.latent.value_size
        mixers = (LatentSpec(heads, rank, model.head_size, value_dim, rope),)
    else:
        share = ROTARY_SHARE.get(model.architecture, 1)
        rope = RopeSpec(model.head_size // share, style=style)
        full = AttentionSpec(heads, model.n_kv_heads, model.head_size, rope, **of_attention)
        mixers = tuple(replace(full, window=window) for window in sorted({0, model.window}))
        if (whole := model.whole) is not None:
            n_kv, size = whole.n_kv_heads, whole.head_size
            wide = replace(full, n_kv_heads=n_kv, head_dim=size, rope=RopeSpec(size, style=style))
            mixers = replace(full, window=model.window), wide
    if (delta := model.delta) is not None:
        heads_of = delta.n_key_heads, delta.n_heads, delta.head_size
        mixers = (*mixers, DeltaNetSpec(*heads_of, delta.n_taps, tiled=True))
    experts = ExpertSpec(
        model.n_experts,
        model.n_experts_used,
        model.expert_size,
        shared_width=model.shared_size,
        beside_width=model.beside_size,
        **of_experts,
    )
    return KernelShapes(name, model.hidden, model.n_tokens, mixers, experts)


# What works call the parts of a layer; neighbours of one type share a dispatch.
_ROLES = {
    **dict.fromkeys(("q", "k", "v", "kv", "q_down", "qkv", "gate", "beta", "alpha"), "q/k/v"),
    **{"output": "o", "k_up": "heads of k", "v_up": "heads of v"},
    **dict.fromkeys(("router", "shared_gate"), "router"),
}


def shapes_of(model: ModelFile) -> KernelShapes:
    """Take shapes and types from a model file.

    Raises UsageError for one without experts.
    """
    spec = model.spec
    if spec.experts is None:
        raise UsageError(f"{spec.name} has no experts", "give a mixture-of-experts model")
    types = _types(model.tensors)
    return KernelShapes(
        spec.name, spec.width, spec.n_vocab, spec.mixers, spec.experts, types=frozenset(types)
    )


def _types(tensors: ModelTensors) -> Iterator[tuple[str, str]]:
    """List role and type of each matrix in a layer with experts, and outside layers."""
    yield "embed", tensors.embeddings.type
    yield "head", tensors.output.type
    for layer in tensors.layers:
        for name, part in (*layer.mixer.items(), *layer.feed_forward.items()):
            if isinstance(part, FileMatrix):
                yield _ROLES[name], part.type
        experts = layer.block if layer.has_experts else None
        for name, block in {"": experts, "shared ": layer.feed_forward.get("shared")}.items():
            if isinstance(block, FeedForwardTensors):
                gate, up, down = (matrix.type for matrix in block.matrices)
                yield from ((f"{name}gate/up", kind) for kind in (gate, up))
                yield f"{name}down", down


MODELS = {name: _shapes(name, sizes) for name, sizes in SIZES.items()}
