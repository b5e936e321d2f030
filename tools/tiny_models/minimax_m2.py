"""Tiny models of `minimax-m2`: q and k normed over their full width, heads that turn in part, and
experts chosen by sigmoid and a bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from tools.tiny_models.drawing import Draw, Weights
from tools.tiny_models.model import TinyModel


@dataclass(frozen=True)
class MiniMaxM2(TinyModel):
    """Every layer has experts, and none a shared one."""

    tied: bool = False
    rotary: float = 0.5
    """The share of a head that turns."""

    architecture, hf_kind = "minimax-m2", "MiniMaxM2"

    @property
    def rope_parameters(self) -> dict[str, Any]:
        return super().rope_parameters | {"partial_rotary_factor": self.rotary}

    def attention(self, draw: Draw) -> Weights:
        return super().attention(draw) | {
            "attn_q_norm.weight": draw.norm(self.heads * self.head_dim),
            "attn_k_norm.weight": draw.norm(self.kv_heads * self.head_dim),
        }

    def routed(self, draw: Draw) -> Weights:
        return super().routed(draw) | {"exp_probs_b.bias": draw.bias(self.experts, gain=0.3)}

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        super().add_metadata(writer)
        writer.add_rope_dimension_count(int(self.rotary * self.head_dim))

    def add_routing(self, writer: gguf.GGUFWriter) -> None:
        writer.add_expert_feed_forward_length(self.ff)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)

    def hf_options(self) -> dict[str, Any]:
        return super().hf_options() | {"num_local_experts": self.experts}

    def hf_block(self, block: Weights) -> Weights:
        bias = {"mlp.e_score_correction_bias": block["exp_probs_b.bias"]}
        return super().hf_block(block) | bias

    def scores(self, weights: Weights, layer: int, logits: NDArray[Any]) -> NDArray[Any]:
        biased: NDArray[Any] = 1 / (1 + np.exp(-logits)) + weights[f"blk.{layer}.exp_probs_b.bias"]
        return biased


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
MODELS = (
    MiniMaxM2("minimaxm2_odd", 32, 2, 3, 1, 64, 32, experts=7, top_k=3, rope={"rope_theta": 5e6}),
    MiniMaxM2("minimaxm2_top1", 64, 2, 4, 2, 32, 32, experts=4, top_k=1, eps=1e-3, rotary=0.25),
    MiniMaxM2("minimaxm2_yarn", 32, 1, 2, 2, 32, 64, experts=5, top_k=5, tied=True, rope=YARN),
)
