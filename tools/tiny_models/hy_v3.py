"""Tiny models of `hy_v3`: glm4moe's routing behind qwen3moe's attention.

Its files have no number of dense layers: these have no router.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gguf

from tools.tiny_models.drawing import Draw, Tensors, Weights
from tools.tiny_models.glm4moe import SigmoidRouted
from tools.tiny_models.model import TinyModel


@dataclass(frozen=True)
class HyV3(SigmoidRouted):
    """The bias that chooses experts is called `exp_probs_b` in its files, as no other is."""

    architecture, hf_kind = "hy_v3", "HYV3"

    def attention(self, draw: Draw) -> Weights:
        return super().attention(draw) | {
            "attn_q_norm.weight": draw.norm(self.head_dim),
            "attn_k_norm.weight": draw.norm(self.head_dim),
        }

    def file_tensors(self, weights: Weights) -> Tensors:
        return {name.replace("probs_b.bias", "probs_b"): x for name, x in weights.items()}

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        TinyModel.add_metadata(self, writer)

    def add_routing(self, writer: gguf.GGUFWriter) -> None:
        writer.add_expert_feed_forward_length(self.ff)
        writer.add_expert_shared_feed_forward_length(self.shared * self.ff)
        writer.add_expert_weights_scale(self.scale)
        writer.add_expert_weights_norm(True)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)

    def hf_options(self) -> dict[str, Any]:
        kinds = ("sparse", "dense")
        return TinyModel.hf_options(self) | {
            "intermediate_size": self.dense_ff,
            "moe_intermediate_size": self.ff,
            "num_experts": self.experts,
            "num_shared_experts": self.shared,
            "router_scaling_factor": self.scale,
            "mlp_layer_types": [kinds[layer < self.dense_layers] for layer in range(self.layers)],
        }

    def hf_block(self, block: Weights) -> Weights:
        state = super().hf_block(block)
        bias = state.pop("mlp.gate.e_score_correction_bias", None)
        return state if bias is None else state | {"mlp.e_score_correction_bias": bias}


MODELS = (
    HyV3("hyv3_odd", 32, 3, 3, 1, 64, 32, experts=7, top_k=3, scale=2.826, shared=2, eps=1e-5,
         ahead=True),
    HyV3("hyv3_top1", 32, 3, 4, 2, 32, 32, experts=4, top_k=1, dense_layers=2, tied=True,
         rope={"rope_theta": 1e6}),
)  # fmt: skip
