"""Tiny models of `hunyuan-moe`: q and k normed behind their rotation, and a shared expert as wide
as a routed one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gguf

from tools.tiny_models.drawing import Draw, Weights
from tools.tiny_models.model import TinyModel

PARTS = ("gate", "up", "down")
ORIGINAL_CONTEXT = 256 * 1024  # which converters write for the stretched base


@dataclass(frozen=True)
class HunyuanMoe(TinyModel):
    """With an `alpha` in `rope` the base of its angles is stretched, as in the published model."""

    architecture, hf_kind = "hunyuan-moe", "HunYuanMoEV1"

    @property
    def rope_base(self) -> float:
        alpha = self.rope.get("alpha", 1.0)
        return super().rope_base * float(alpha ** (self.head_dim / (self.head_dim - 2)))

    def block(self, draw: Draw, layer: int) -> Weights:
        return super().block(draw, layer) | self.dense(draw, self.ff, "_shexp")

    def attention(self, draw: Draw) -> Weights:
        return super().attention(draw) | {
            "attn_q_norm.weight": draw.norm(self.head_dim),
            "attn_k_norm.weight": draw.norm(self.head_dim),
        }

    def add_routing(self, writer: gguf.GGUFWriter) -> None:
        writer.add_expert_feed_forward_length(self.ff)
        writer.add_expert_shared_feed_forward_length(self.ff)
        writer.add_expert_shared_count(1)

    def add_scaling(self, writer: gguf.GGUFWriter) -> None:
        if "alpha" in self.rope:
            writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
            writer.add_rope_scaling_factor(1)
            writer.add_rope_scaling_orig_ctx_len(ORIGINAL_CONTEXT)

    def hf_options(self) -> dict[str, Any]:
        return super().hf_options() | {"num_experts": self.experts, "moe_topk": self.top_k}

    def hf_names(self) -> dict[str, str]:
        names = {"attn_q_norm": "query_layernorm", "attn_k_norm": "key_layernorm"}
        found = {name: f"self_attn.{theirs}" for name, theirs in names.items()}
        found |= {f"ffn_{part}_shexp": f"mlp.shared_mlp.{part}_proj" for part in PARTS}
        return super().hf_names() | found | {"ffn_gate_inp": "mlp.gate.wg"}


ALPHA = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0}
MODELS = (
    HunyuanMoe("hunyuanmoe_odd", 32, 3, 3, 1, 64, 32, experts=7, top_k=3, eps=1e-5, rope=ALPHA),
    HunyuanMoe("hunyuanmoe_top1", 32, 2, 4, 2, 32, 32, experts=4, top_k=1, tied=False),
)  # fmt: skip
