"""Shapes of real models that `bench.kernels` runs kernels with: those of the synthetic models.

Owns what a kernel must know besides sizes. `TINY` is for a quick run that measures nothing of
worth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from tools.synthetic.shapes import PRESETS, ModelShape
from vkmoe.facts import Activation, LatentSpec, RopeSpec
from vkmoe.ops.router import RouterShape

__all__ = ["MODELS", "TINY", "ModelShapes"]


@dataclass(frozen=True)
class ModelShapes:
    """What decides how large a model's kernels are; sizes in elements."""

    name: str
    width: int
    qkv: tuple[int, ...]  # rows of the matrices that read the same normed input
    o_columns: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm: Literal["none", "per_head", "full_width"]
    router: RouterShape
    inner: int  # of an expert
    n_vocab: int
    rope_style: Literal["neox", "normal"] = "neox"
    shared_inner: int = 0  # of a shared expert; 0: none
    contexts: tuple[int, ...] = (512, 4096)
    biased: bool = False  # all matrices but the head's
    activation: Activation = "silu"
    window: int = 0  # of every other layer; 0: all positions are seen
    sinks: bool = False
    latent: LatentSpec | None = None


class _Kind(NamedTuple):
    """What an architecture does that its sizes do not tell."""

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


def _shapes(name: str, model: ModelShape) -> ModelShapes:
    kind, n_heads, head_dim = _KINDS[model.architecture], model.n_heads, model.head_size
    kv_width, value_dim, latent = model.n_kv_heads * head_dim, head_dim, None
    qkv: tuple[int, ...] = (n_heads * head_dim, kv_width, kv_width)
    if model.latent is not None:
        rank, rope_dim = model.latent.kv_rank, model.latent.rope_size
        value_dim = model.latent.value_size
        latent = LatentSpec(n_heads, rank, head_dim, value_dim, RopeSpec(rope_dim))
        qkv = (n_heads * latent.query_dim, latent.row)
    return ModelShapes(
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


MODELS = {
    name: _shapes(name, model) for name, model in PRESETS.items() if not name.startswith("tiny")
}
TINY = ModelShapes(
    *("tiny", 512, (256, 128, 128), 256, 4, 2, 64, "per_head"),
    *(RouterShape(8, 2), 256, 1000, "neox", 512, (64,)),
    latent=LatentSpec(4, kv_rank=256, nope_dim=256, value_dim=64, rope=RopeSpec(32)),
)
