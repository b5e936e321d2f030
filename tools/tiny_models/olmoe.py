"""Tiny models of `olmoe`: q and k are normed over their full width, weights not renormalised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gguf

from tools.tiny_models.drawing import Draw, Weights
from tools.tiny_models.model import TinyModel


@dataclass(frozen=True)
class Olmoe(TinyModel):
    """Heads are hidden / heads wide: the model has no number for them."""

    tied: bool = False
    eps: float = 1e-5  # what the converter writes whatever the configuration says

    architecture, hf_kind = "olmoe", "Olmoe"

    def attention(self, draw: Draw) -> Weights:
        return super().attention(draw) | {
            "attn_q_norm.weight": draw.norm(self.heads * self.head_dim),
            "attn_k_norm.weight": draw.norm(self.kv_heads * self.head_dim),
        }

    def add_head_widths(self, writer: gguf.GGUFWriter) -> None:
        """Nothing: see the class."""

    def hf_options(self) -> dict[str, Any]:
        options = super().hf_options() | {"num_experts": self.experts, "norm_topk_prob": False}
        del options["head_dim"]
        return options


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
MODELS = (
    Olmoe("olmoe_plain", 64, 1, 2, 2, 32, 32, experts=4, top_k=2),
    Olmoe("olmoe_one_kv_head", 64, 1, 2, 1, 32, 32, experts=5, top_k=3, tied=True, rope=YARN),
    Olmoe("olmoe_all_experts", 32, 2, 1, 1, 32, 32, experts=3, top_k=3),
    Olmoe("olmoe_top1", 32, 1, 1, 1, 32, 32, experts=7, top_k=1, rope={"rope_theta": 5e5}),
)
