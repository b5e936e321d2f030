"""The models that make_synthetic_model.py writes: real ones, and a tiny one of each kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vkmoe.bench.shapes import SIZES, DeltaSizes, LatentSizes, ModelSizes, WholeSizes


@dataclass(frozen=True, kw_only=True)
class Preset(ModelSizes):
    """Holds what a file needs besides the sizes of its matrices."""

    n_layers: int
    context: int
    rope_base: float
    dense_size: int = 0  # of layers without experts
    n_dense_layers: int = 0
    yarn: float = 1.0  # the factor by which the context was stretched
    n_ahead_layers: int = 0  # behind the others, to guess tokens with
    tied: bool = False  # the output matrix is that of the embeddings

    def ends_period(self, layer: int, period: int) -> bool:
        """Say whether a layer is the last of so many, or of all where there are fewer."""
        period = min(period, self.n_layers)
        return layer % period == period - 1


def _known(name: str, n_layers: int, context: int, rope_base: float, **more: Any) -> Preset:
    return Preset(
        **vars(SIZES[name]), n_layers=n_layers, context=context, rope_base=rope_base, **more
    )


def _tiny(n_heads: int, n_kv_heads: int, head_size: int, architecture: str, **more: Any) -> Preset:
    """Two layers of eight experts, of which two are used."""
    sizes = (256, n_heads, n_kv_heads, head_size, 8, 2, 256, 1024, architecture)
    facts = {"n_layers": 2, "context": 512, "rope_base": 1e4}
    return Preset(*sizes, **(facts | more))


PRESETS = {
    "tiny": _tiny(4, 2, 64, "qwen3moe"),
    "tiny-olmoe": _tiny(4, 4, 64, "olmoe"),
    "tiny-llama": _tiny(4, 2, 64, "llama"),
    "tiny-qwen2moe": _tiny(4, 4, 64, "qwen2moe", shared_size=512, dense_size=768),
    "tiny-gpt-oss": _tiny(8, 2, 64, "gpt-oss", window=32, rope_base=150000.0, yarn=4.0),
    "tiny-deepseek2": _tiny(
        *(4, 4, 128, "deepseek2"),
        shared_size=512,
        dense_size=512,
        n_dense_layers=1,
        yarn=4.0,
        latent=LatentSizes(256, 64, 128),
    ),
    "tiny-qwen35moe": _tiny(
        *(4, 2, 64, "qwen35moe"),
        shared_size=256,
        delta=DeltaSizes(2, 4, 64, 4),
        n_ahead_layers=1,
    ),
    "tiny-gemma4": _tiny(
        *(4, 2, 64, "gemma4"),
        beside_size=512,
        window=32,
        whole=WholeSizes(1, 128),
        tied=True,
    ),
    "olmoe-1b-7b": _known("olmoe-1b-7b", 16, 4096, 1e4),
    "qwen3-30b-a3b": _known("qwen3-30b-a3b", 48, 40960, 1e6),
    "mixtral-8x7b": _known("mixtral-8x7b", 32, 32768, 1e6),
    "qwen1.5-moe-a2.7b": _known("qwen1.5-moe-a2.7b", 24, 8192, 1e6, dense_size=5632),
    "gpt-oss-20b": _known("gpt-oss-20b", 24, 131072, 150000.0, yarn=32.0),
    "gpt-oss-120b": _known("gpt-oss-120b", 36, 131072, 150000.0, yarn=32.0),
    "deepseek-v2-lite": _known(
        *("deepseek-v2-lite", 27, 163840, 1e4),
        dense_size=10944,
        n_dense_layers=1,
        yarn=40.0,
    ),
    "qwen3.6-35b-a3b": _known("qwen3.6-35b-a3b", 40, 262144, 1e7, n_ahead_layers=1),
    "gemma-4-26b-a4b": _known("gemma-4-26b-a4b", 30, 262144, 1e6, tied=True),
}
