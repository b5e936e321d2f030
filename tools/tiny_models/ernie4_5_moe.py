"""Tiny models of `ernie4_5-moe`: interleaved rotary pairs, leading dense layers, a shared block,
and experts chosen by softmax and a bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gguf
from numpy.typing import NDArray

from tools.tiny_models.drawing import Draw, Tensors, Weights
from tools.tiny_models.model import TinyModel

PARTS = ("gate", "up", "down")


@dataclass(frozen=True)
class Ernie45Moe(TinyModel):
    """Transformers turns neighbours too, so that no rows change places."""

    dense_layers: int = 1
    dense_ff: int = 64
    shared: int = 2
    """Shared experts, each `ff` wide."""

    architecture, hf_kind = "ernie4_5-moe", "Ernie4_5_Moe"

    def block(self, draw: Draw, layer: int) -> Weights:
        block = self.attention(draw) | {"ffn_norm.weight": draw.norm(self.hidden)}
        if layer < self.dense_layers:
            return block | self.dense(draw, self.dense_ff)
        block |= self.routed(draw) | {"exp_probs_b.bias": draw.bias(self.experts, gain=0.3)}
        return block | (self.dense(draw, self.shared * self.ff, "_shexp") if self.shared else {})

    def file_tensors(self, weights: Weights) -> Tensors:
        """The bias that chooses experts is a matrix of one row, in files and in transformers."""
        return {name: x[None] if "exp_probs_b" in name else x for name, x in weights.items()}

    def add_counts(self, writer: gguf.GGUFWriter) -> None:
        writer.add_feed_forward_length(self.dense_ff)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        super().add_metadata(writer)
        writer.add_leading_dense_block_count(self.dense_layers)
        writer.add_interleave_moe_layer_step(1)

    def add_routing(self, writer: gguf.GGUFWriter) -> None:
        writer.add_expert_feed_forward_length(self.ff)
        writer.add_expert_shared_count(self.shared)
        if self.shared:
            writer.add_expert_shared_feed_forward_length(self.shared * self.ff)

    def hf_options(self) -> dict[str, Any]:
        options = super().hf_options() | {
            "intermediate_size": self.dense_ff,
            "moe_intermediate_size": self.ff,
            "moe_num_experts": self.experts,
            "moe_k": self.top_k,
            "moe_num_shared_experts": self.shared,
            "moe_layer_start_index": self.dense_layers,
        }
        del options["num_experts_per_tok"]
        return options

    def hf_names(self) -> dict[str, str]:
        parts = {f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in PARTS}
        return super().hf_names() | parts

    def hf_block(self, block: Weights) -> Weights:
        state = super().hf_block(block)
        if "exp_probs_b.bias" in block:
            bias = block["exp_probs_b.bias"][None]
            state["mlp.gate.moe_statics.e_score_correction_bias"] = bias
        return state

    def scores(self, weights: Weights, layer: int, logits: NDArray[Any]) -> NDArray[Any]:
        bias = weights[f"blk.{layer}.exp_probs_b.bias"]
        biased: NDArray[Any] = super().scores(weights, layer, logits) + bias
        return biased


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
MODELS = (
    Ernie45Moe("ernie45moe_odd", 32, 3, 3, 1, 64, 32, experts=7, top_k=3, eps=1e-5,
               rope={"rope_theta": 5e5}),
    Ernie45Moe("ernie45moe_unshared", 32, 2, 2, 2, 32, 32, experts=4, top_k=1, shared=0,
               tied=False, rope=YARN),
    Ernie45Moe("ernie45moe_all_experts", 32, 2, 4, 2, 32, 32, experts=5, top_k=5, shared=1,
               dense_layers=0),
)  # fmt: skip
