"""Shapes of real models that `bench.kernels` runs kernels with, from the models' own metadata.

Owns the numbers only. `tiny` is for a quick run that measures nothing of worth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vkmoe.facts import LatentSpec
from vkmoe.ops.experts import Activation
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


MODELS = {
    shapes.name: shapes
    for shapes in (
        ModelShapes(
            *("olmoe-1b-7b", 2048, (2048, 2048, 2048), 2048, 16, 16, 128, "full_width"),
            *(RouterShape(64, 8, renormalise=False), 1024, 50304),
        ),
        ModelShapes(
            *("qwen3-30b-a3b", 2048, (4096, 512, 512), 4096, 32, 4, 128, "per_head"),
            *(RouterShape(128, 8), 768, 151936),
        ),
        ModelShapes(
            *("mixtral-8x7b", 4096, (4096, 1024, 1024), 4096, 32, 8, 128, "none"),
            *(RouterShape(8, 2), 14336, 32000, "normal"),
        ),
        ModelShapes(
            *("gpt-oss-20b", 2880, (4096, 512, 512), 4096, 64, 8, 64, "none"),
            *(RouterShape(32, 4), 2880, 201088),
            biased=True,
            activation="swiglu_oai",
            window=128,
            sinks=True,
        ),
        # The compressed keys and values stand in the place of k and v.
        ModelShapes(
            *("deepseek-v2-lite", 2048, (3072, 576), 2048, 16, 16, 128, "none"),
            *(RouterShape(64, 6, renormalise=False), 1408, 102400, "normal", 2816),
            latent=LatentSpec(kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
        ),
        ModelShapes(
            *("qwen1.5-moe", 2048, (2048, 2048, 2048), 2048, 16, 16, 128, "none"),
            *(RouterShape(60, 4, renormalise=False, shared_gate=True), 1408, 151936, "neox", 5632),
        ),
    )
}
TINY = ModelShapes(
    *("tiny", 512, (256, 128, 128), 256, 4, 2, 64, "per_head"),
    *(RouterShape(8, 2), 256, 1000, "neox", 512, (64,)),
    latent=LatentSpec(kv_rank=256, nope_dim=256, rope_dim=32, value_dim=64),
)
