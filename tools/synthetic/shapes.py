"""The shapes of real models, from their published configurations, and of tiny ones like them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PRESETS", "LatentShape", "ModelShape"]


@dataclass(frozen=True)
class LatentShape:
    """Widths of latent attention (DeepSeek-V2, arXiv:2405.04434); a head's own are in the model."""

    kv_rank: int
    rope_size: int
    value_size: int


@dataclass(frozen=True)
class ModelShape:
    """The numbers that decide a model's size and speed."""

    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_size: int  # of latent attention without the rotary part
    n_experts: int
    n_experts_used: int
    expert_size: int
    n_tokens: int
    context: int
    rope_base: float
    architecture: str = "qwen3moe"
    shared_size: int = 0  # of all shared experts together
    dense_size: int = 0  # of layers without experts
    n_dense_layers: int = 0
    window: int = 0
    yarn: float = 1.0  # the factor by which the context was stretched
    latent: LatentShape | None = None


PRESETS = {
    "tiny": ModelShape(2, 256, 4, 2, 64, 8, 2, 256, 1024, 512, 1e4),
    "tiny-olmoe": ModelShape(2, 256, 4, 4, 64, 8, 2, 256, 1024, 512, 1e4, "olmoe"),
    "tiny-llama": ModelShape(2, 256, 4, 2, 64, 8, 2, 256, 1024, 512, 1e4, "llama"),
    "tiny-qwen2moe": ModelShape(
        *(2, 256, 4, 4, 64, 8, 2, 256, 1024, 512, 1e4, "qwen2moe"),
        *(512, 768),
    ),
    "tiny-gpt-oss": ModelShape(
        *(2, 256, 8, 2, 64, 8, 2, 256, 1024, 512, 150000.0, "gpt-oss"),
        window=32,
        yarn=4.0,
    ),
    "tiny-deepseek2": ModelShape(
        *(2, 256, 4, 4, 128, 8, 2, 256, 1024, 512, 1e4, "deepseek2"),
        *(512, 512, 1),
        yarn=4.0,
        latent=LatentShape(256, 64, 128),
    ),
    "olmoe-1b-7b": ModelShape(16, 2048, 16, 16, 128, 64, 8, 1024, 50304, 4096, 1e4, "olmoe"),
    "qwen3-30b-a3b": ModelShape(48, 2048, 32, 4, 128, 128, 8, 768, 151936, 40960, 1e6),
    "mixtral-8x7b": ModelShape(32, 4096, 32, 8, 128, 8, 2, 14336, 32000, 32768, 1e6, "llama"),
    "qwen1.5-moe-a2.7b": ModelShape(
        *(24, 2048, 16, 16, 128, 60, 4, 1408, 151936, 8192, 1e6, "qwen2moe"),
        *(5632, 5632),
    ),
    "gpt-oss-20b": ModelShape(
        *(24, 2880, 64, 8, 64, 32, 4, 2880, 201088, 131072, 150000.0, "gpt-oss"),
        window=128,
        yarn=32.0,
    ),
    "deepseek-v2-lite": ModelShape(
        *(27, 2048, 16, 16, 128, 64, 6, 1408, 102400, 163840, 1e4, "deepseek2"),
        *(2816, 10944, 1),
        yarn=40.0,
        latent=LatentShape(512, 64, 128),
    ),
}
