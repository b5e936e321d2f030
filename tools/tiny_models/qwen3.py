"""Tiny models of `qwen3` and `qwen3moe`: a norm per head on queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gguf

from tools.tiny_models.drawing import Draw, Weights
from tools.tiny_models.model import TinyModel


@dataclass(frozen=True)
class Qwen3(TinyModel):
    """Dense without experts, else Qwen3-MoE."""

    norm_top_k: bool = True

    @property
    def architecture(self) -> str:
        return "qwen3moe" if self.experts else "qwen3"

    @property
    def hf_kind(self) -> str:
        return "Qwen3Moe" if self.experts else "Qwen3"

    def attention(self, draw: Draw) -> Weights:
        return super().attention(draw) | {
            "attn_q_norm.weight": draw.norm(self.head_dim),
            "attn_k_norm.weight": draw.norm(self.head_dim),
        }

    def add_routing(self, writer: gguf.GGUFWriter) -> None:
        writer.add_expert_feed_forward_length(self.ff)
        if not self.norm_top_k:  # else files are silent
            writer.add_expert_weights_norm(False)

    def hf_options(self) -> dict[str, Any]:
        options = super().hf_options()
        if self.experts:
            options |= {
                "num_experts": self.experts,
                "moe_intermediate_size": self.ff,
                "norm_topk_prob": self.norm_top_k,
                "mlp_only_layers": [],
            }
        return options


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
# Row lengths (hidden, heads * head_dim, ff) are multiples of 32; row counts need not be.
MODELS = (
    Qwen3("moe_plain", 64, 2, 4, 2, 32, 32, experts=8, top_k=2),
    Qwen3("moe_odd", 32, 2, 3, 1, 64, 32, experts=6, top_k=3, tied=False,
          rope={"rope_theta": 1e6}, eps=1e-3),
    Qwen3("dense_tied", 32, 2, 8, 2, 32, 64),
    Qwen3("moe_yarn_top1", 32, 2, 2, 1, 32, 32, experts=4, top_k=1, rope=YARN),
    Qwen3("moe_all_experts", 32, 2, 2, 1, 32, 32, experts=5, top_k=5),
    Qwen3("moe_unnormalised", 32, 1, 2, 2, 32, 32, experts=4, top_k=2, norm_top_k=False),
    Qwen3("dense_linear", 32, 1, 2, 1, 32, 32, rope={"rope_type": "linear", "factor": 4.0}),
)  # fmt: skip
