"""Tiny models of `deepseek32` and `glm-dsa`: DeepSeek-V3 with an indexer, which chooses positions.

No text is longer than the number it chooses. Its weights are in the files all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gguf

from tools.tiny_models.deepseek2 import DeepSeek2
from tools.tiny_models.drawing import Draw, Weights

INDEXER = {
    "indexer.attn_q_b": "wq_b",
    "indexer.attn_k": "wk",
    "indexer.k_norm": "k_norm",
    "indexer.proj": "weights_proj",
}


@dataclass(frozen=True)
class DeepSeek32(DeepSeek2):
    """DeepSeek-V3.2: every layer has an indexer."""

    v3: bool = True
    q_rank: int = 32
    n_chosen: int = 128
    index_heads: int = 2
    index_dim: int = 64

    architecture, hf_kind = "deepseek32", "DeepseekV32"

    def block(self, draw: Draw, layer: int) -> Weights:
        return super().block(draw, layer) | {
            "indexer.attn_q_b.weight": draw.matrix(self.index_heads * self.index_dim, self.q_rank),
            "indexer.attn_k.weight": draw.matrix(self.index_dim, self.hidden),
            "indexer.k_norm.weight": draw.norm(self.index_dim),
            "indexer.k_norm.bias": draw.bias(self.index_dim),
            "indexer.proj.weight": draw.matrix(self.index_heads, self.hidden),
        }

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        super().add_metadata(writer)
        writer.add_indexer_head_count(self.index_heads)
        writer.add_indexer_key_length(self.index_dim)
        writer.add_indexer_top_k(self.n_chosen)

    def hf_options(self) -> dict[str, Any]:
        return super().hf_options() | {
            "index_topk": self.n_chosen,
            "index_head_dim": self.index_dim,
            "index_n_heads": self.index_heads,
        }

    def hf_names(self) -> dict[str, str]:
        names = {key: f"self_attn.indexer.{name}" for key, name in INDEXER.items()}
        return super().hf_names() | names


@dataclass(frozen=True)
class GlmDsa(DeepSeek32):
    """GLM-5: some layers use what the layer before chose."""

    without: tuple[int, ...] = ()
    """Layers that have no indexer."""

    architecture, hf_kind = "glm-dsa", "GlmMoeDsa"

    def block(self, draw: Draw, layer: int) -> Weights:
        block = super().block(draw, layer)
        if layer not in self.without:
            return block
        return {name: value for name, value in block.items() if "indexer" not in name}

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        super().add_metadata(writer)
        types = [layer not in self.without for layer in range(self.layers)]
        writer.add_array("glm-dsa.attention.indexer.types", types)

    def hf_options(self) -> dict[str, Any]:
        kinds = ("full", "shared")
        types = [kinds[layer in self.without] for layer in range(self.layers)]
        return super().hf_options() | {"indexer_types": types}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
        "beta_fast": 32.0, "beta_slow": 1.0}  # fmt: skip
MODELS = (
    DeepSeek32("deepseek32_odd", 32, 2, 2, 2, 32, 32, experts=12, top_k=3, n_groups=4,
               n_groups_used=2, scale=2.5,
               rope=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}),
    DeepSeek32("deepseek32_top1", 32, 2, 3, 3, 32, 32, experts=5, top_k=1, tied=True,
               value_dim=64, n_chosen=40, n_tokens=40),
    GlmDsa("glmdsa_odd", 32, 3, 3, 3, 64, 32, experts=7, top_k=2, scale=2.5, without=(2,),
           rope={"rope_theta": 1e6}, ahead=True),
    GlmDsa("glmdsa_all_experts", 32, 2, 2, 2, 32, 32, experts=5, top_k=5, without=(1,),
           dense_layers=0, kv_rank=64, tied=True, n_chosen=40, n_tokens=40),
)  # fmt: skip
