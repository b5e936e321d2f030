"""Tiny models of `dots1`: glm4moe's routing, and q and k normed in each head, which turns whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gguf

from tools.tiny_models.drawing import Draw, Weights
from tools.tiny_models.glm4moe import SigmoidRouted


@dataclass(frozen=True)
class Dots1(SigmoidRouted):
    """All heads have keys and values of their own in the published model."""

    unbiased: bool = False
    """The file has no bias to choose experts by, and says nothing of groups."""

    architecture, hf_kind = "dots1", "Dots1"

    def block(self, draw: Draw, layer: int) -> Weights:
        block = super().block(draw, layer)
        if self.unbiased:
            block.pop("exp_probs_b.bias", None)
        return block

    def attention(self, draw: Draw) -> Weights:
        return super().attention(draw) | {
            "attn_q_norm.weight": draw.norm(self.head_dim),
            "attn_k_norm.weight": draw.norm(self.head_dim),
        }

    def add_routing(self, writer: gguf.GGUFWriter) -> None:
        if not self.unbiased:
            super().add_routing(writer)
            return
        writer.add_expert_feed_forward_length(self.ff)
        writer.add_expert_shared_count(self.shared)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)

    def hf_options(self) -> dict[str, Any]:
        return super().hf_options() | {"norm_topk_prob": not self.unbiased}

    def hf_block(self, block: Weights) -> Weights:
        state = super().hf_block(block)
        if "mlp.gate.weight" in state and self.unbiased:
            bias = 0 * block["ffn_gate_inp.weight"][:, 0]
            state["mlp.gate.e_score_correction_bias"] = bias
        return state


MODELS = (
    Dots1("dots1_odd", 32, 3, 2, 2, 64, 32, experts=7, top_k=3, shared=2, scale=2.5,
          rope={"rope_theta": 1e6}, dense_layers=2),
    Dots1("dots1_groups", 32, 2, 3, 1, 32, 32, experts=8, top_k=2, n_groups=4, n_groups_used=2,
          dense_layers=0, eps=1e-3),
    Dots1("dots1_unbiased", 32, 2, 1, 1, 32, 32, experts=5, top_k=1, unbiased=True),
)  # fmt: skip
