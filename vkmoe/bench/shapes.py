"""This module holds the shapes of real models, from their published configurations.

It owns what decides how large the kernels of a model are, for known models, for a user's own file,
and for a tiny model of no file that has a bit of everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from vkmoe.choices import Layout
from vkmoe.errors import UsageError
from vkmoe.facts import Activation, AttentionSpec, LatentSpec, RopeSpec
from vkmoe.kernels.router.operations import RouterShape
from vkmoe.kernels.shapes import KernelShapes
from vkmoe.models import ModelFile
from vkmoe.models.tensors import FeedForwardTensors, ModelTensors
from vkmoe.models.trunk_tensors import FileMatrix
from vkmoe.models.workspace import router_shape
from vkmoe.quants import loaded_type
from vkmoe.weights.mapped import kept_type

__all__ = ["MODELS", "SIZES", "LatentSizes", "ModelSizes", "shapes_of"]


@dataclass(frozen=True)
class LatentSizes:
    """Holds widths of latent attention (DeepSeek-V2, arXiv:2405.04434), beside a head's own."""

    kv_rank: int
    rope_size: int
    value_size: int


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
    window: int = 0
    latent: LatentSizes | None = None


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
}


class _Kind(NamedTuple):
    """Holds what an architecture does that its sizes do not tell."""

    norm: Literal["none", "per_head", "full_width"] = "none"
    renormalise: bool = True
    shared_gate: bool = False
    rope_style: Literal["neox", "normal"] = "neox"
    biased: bool = False
    activation: Activation = "silu"
    sinks: bool = False


_KINDS = {
    "olmoe": _Kind("full_width", renormalise=False),
    "qwen3moe": _Kind("per_head"),
    "llama": _Kind(rope_style="normal"),
    "qwen2moe": _Kind(renormalise=False, shared_gate=True),
    "gpt-oss": _Kind(biased=True, activation="swiglu_oai", sinks=True),
    "deepseek2": _Kind(renormalise=False, rope_style="normal"),
}


def _shapes(name: str, model: ModelSizes) -> KernelShapes:
    kind, n_heads, head_dim = _KINDS[model.architecture], model.n_heads, model.head_size
    kv_width, value_dim, latent = model.n_kv_heads * head_dim, head_dim, None
    qkv: tuple[int, ...] = (n_heads * head_dim, kv_width, kv_width)
    if model.latent is not None:
        rank, rope_dim = model.latent.kv_rank, model.latent.rope_size
        value_dim = model.latent.value_size
        latent = LatentSpec(n_heads, rank, head_dim, value_dim, RopeSpec(rope_dim))
        qkv = (n_heads * latent.query_dim, latent.row)
    return KernelShapes(
        name,
        width=model.hidden,
        qkv=qkv,
        o_columns=n_heads * value_dim,
        n_heads=n_heads,
        n_kv_heads=model.n_kv_heads,
        head_dim=head_dim,
        norm=kind.norm,
        router=RouterShape(
            model.n_experts,
            model.n_experts_used,
            renormalise=kind.renormalise,
            shared_gate=kind.shared_gate,
        ),
        inner=model.expert_size,
        n_vocab=model.n_tokens,
        rope_style=kind.rope_style,
        shared_inner=model.shared_size,
        biased=kind.biased,
        activation=kind.activation,
        window=model.window,
        sinks=kind.sinks,
        latent=latent,
    )


# What works call the parts of a layer; neighbours of one type share a dispatch.
_ROLES = {
    **dict.fromkeys(("q", "k", "v", "kv", "q_down"), "q/k/v"),
    **{"output": "o", "k_up": "heads of k", "v_up": "heads of v"},
    **dict.fromkeys(("router", "shared_gate"), "router"),
}


def shapes_of(model: ModelFile, layout: Layout = "planes") -> KernelShapes:
    """Take shapes, and types as they are loaded in a layout, from a model file.

    Raises UsageError for one without experts.
    """
    spec = model.spec
    experts, mixer = spec.experts, spec.mixers[0]
    if experts is None:
        raise UsageError(f"{spec.name} has no experts", "give a mixture-of-experts model")
    if isinstance(mixer, LatentSpec):
        latent, head_dim, norm, sinks = mixer, mixer.nope_dim, _Kind().norm, False
        qkv: tuple[int, ...] = (mixer.q_rank or mixer.n_heads * mixer.query_dim, mixer.row)
    else:
        latent, head_dim, norm, sinks = None, mixer.head_dim, mixer.qk_norm, mixer.sinks
        qkv = (mixer.q_width, mixer.kv_width, mixer.kv_width)
    windows = [each.window for each in spec.mixers if isinstance(each, AttentionSpec)]
    return KernelShapes(
        spec.name,
        width=spec.width,
        qkv=qkv,
        o_columns=mixer.attended_width,
        n_heads=mixer.n_heads,
        n_kv_heads=mixer.n_kv_heads,
        head_dim=head_dim,
        norm=norm,
        router=router_shape(spec),
        inner=experts.width,
        n_vocab=spec.n_vocab,
        rope_style=mixer.rope.style,
        shared_inner=experts.shared_width,
        biased=experts.biases,
        activation=experts.activation,
        window=max(windows, default=0),
        sinks=sinks,
        latent=latent,
        types=frozenset(_types(model.tensors, loaded_type if layout == "planes" else kept_type)),
    )


def _types(tensors: ModelTensors, loaded: Callable[[str], str]) -> Iterator[tuple[str, str]]:
    """List role and type, as loaded, of each matrix in a layer with experts, and outside layers."""
    yield "embed", loaded(tensors.embeddings.data_type)
    yield "head", loaded(tensors.output.data_type)
    for layer in tensors.layers:
        for name, part in (*layer.mixer.items(), *layer.feed_forward.items()):
            if isinstance(part, FileMatrix):
                yield _ROLES[name], loaded(part.data_type)
        experts = layer.block if layer.has_experts else None
        for name, block in {"": experts, "shared ": layer.feed_forward.get("shared")}.items():
            if isinstance(block, FeedForwardTensors):
                gate, up, down = (loaded(matrix.type) for matrix in block.matrices)
                yield from ((f"{name}gate/up", kind) for kind in (gate, up))
                yield f"{name}down", down


MODELS = {name: _shapes(name, sizes) for name, sizes in SIZES.items()}
