"""Tiny models of `qwen2moe`: biases on q, k and v, and a shared expert with a gate of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gguf

from tools.tiny_models.drawing import Draw, Tensors, Weights
from tools.tiny_models.model import TinyModel


@dataclass(frozen=True)
class Qwen2Moe(TinyModel):
    """Routing weights are not renormalised, as in the published models."""

    tied: bool = False
    shared: int = 64
    """Width of the shared expert."""
    flat_gate: bool = True
    """The gate is a vector, as older converters write it, not a matrix of one row."""

    architecture, hf_kind = "qwen2moe", "Qwen2Moe"

    def attention(self, draw: Draw) -> Weights:
        block = super().attention(draw)
        for name in ("attn_q", "attn_k", "attn_v"):
            block[f"{name}.bias"] = draw.bias(block[f"{name}.weight"].shape[0])
        return block

    def routed(self, draw: Draw) -> Weights:
        gate = {"ffn_gate_inp_shexp.weight": draw.matrix(1, self.hidden)}
        return super().routed(draw) | self.dense(draw, self.shared, "_shexp") | gate

    def file_tensors(self, weights: Weights) -> Tensors:
        flat = {
            name: value.reshape(-1)
            for name, value in weights.items()
            if self.flat_gate and "ffn_gate_inp_shexp" in name
        }
        return {**weights, **flat}

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        super().add_metadata(writer)
        writer.add_expert_feed_forward_length(self.ff)
        writer.add_expert_shared_feed_forward_length(self.shared)

    def add_head_widths(self, writer: gguf.GGUFWriter) -> None:
        if self.head_dim != self.hidden // self.heads:
            super().add_head_widths(writer)

    def hf_options(self) -> dict[str, Any]:
        return super().hf_options() | {
            "num_experts": self.experts,
            "moe_intermediate_size": self.ff,
            "shared_expert_intermediate_size": self.shared,
            "norm_topk_prob": False,
            "mlp_only_layers": [],
        }

    def hf_names(self) -> dict[str, str]:
        parts = {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj"
                 for part in ("gate", "up", "down")}  # fmt: skip
        return super().hf_names() | parts | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
MODELS = (
    Qwen2Moe("qwen2moe_plain", 32, 2, 1, 1, 32, 32, experts=4, top_k=2),
    Qwen2Moe("qwen2moe_top1", 32, 1, 3, 1, 64, 32, experts=6, top_k=1, shared=96, tied=True,
             rope=YARN, flat_gate=False),
    Qwen2Moe("qwen2moe_all_experts", 32, 1, 4, 2, 32, 32, experts=3, top_k=3, shared=32,
             rope={"rope_theta": 1e6}, eps=1e-3),
)  # fmt: skip
