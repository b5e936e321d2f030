"""Tiny models of `deepseek2`: latent attention, dense leading layers, shared experts, groups.

DeepSeek-V2 (arXiv:2405.04434) chooses by softmax, V3 (arXiv:2412.19437) by sigmoid and a bias.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from tools.tiny_models.drawing import Draw, Tensors, Weights
from tools.tiny_models.model import TinyModel
from tools.tiny_models.routing import Groups
from tools.tiny_models.vocabulary import vocabulary


@dataclass(frozen=True)
class DeepSeek2(TinyModel):
    """`head_dim` is the part of a head's key without rotation; all heads share the latent row."""

    tied: bool = False
    v3: bool = False
    q_rank: int = 0
    kv_rank: int = 32
    rope_dim: int = 16
    value_dim: int = 32
    dense_layers: int = 1
    dense_ff: int = 64
    shared: int = 1
    """Shared experts, each `ff` wide."""
    n_groups: int = 1
    n_groups_used: int = 1
    scale: float = 1.0
    unsplit: bool = False
    """The file has attn_kv_b and no more keys than a converter wrote in 2024."""

    architecture = "deepseek2"

    @property
    def hf_kind(self) -> str:
        return "DeepseekV3" if self.v3 else "DeepseekV2"

    def block(self, draw: Draw, layer: int) -> Weights:
        block = self.attention(draw) | {"ffn_norm.weight": draw.norm(self.hidden)}
        if layer < self.dense_layers:
            return block | self.dense(draw, self.dense_ff)
        block |= self.routed(draw) | self.dense(draw, self.shared * self.ff, "_shexp")
        return block | ({"exp_probs_b.bias": draw.bias(self.experts, gain=0.3)} if self.v3 else {})

    def attention(self, draw: Draw) -> Weights:
        heads, q_width = self.heads, self.heads * (self.head_dim + self.rope_dim)
        q = {"attn_q.weight": draw.matrix(q_width, self.hidden)}
        if self.q_rank:
            q = {
                "attn_q_a.weight": draw.matrix(self.q_rank, self.hidden),
                "attn_q_a_norm.weight": draw.norm(self.q_rank),
                "attn_q_b.weight": draw.matrix(q_width, self.q_rank),
            }
        return q | {
            "attn_norm.weight": draw.norm(self.hidden),
            "attn_kv_a_mqa.weight": draw.matrix(self.kv_rank + self.rope_dim, self.hidden),
            "attn_kv_a_norm.weight": draw.norm(self.kv_rank),
            "attn_kv_b.weight": draw.matrix(heads * (self.head_dim + self.value_dim), self.kv_rank),
            "attn_output.weight": draw.matrix(self.hidden, heads * self.value_dim),
        }

    def file_tensors(self, weights: Weights) -> Tensors:
        """attn_kv_b [heads * (nope + value), rank] as k_b [heads, rank, nope], v_b [.., rank]."""
        if self.unsplit:
            return dict(weights)
        result: Tensors = {}
        for name, value in weights.items():
            if "attn_kv_b" in name:
                both = value.reshape(self.heads, -1, self.kv_rank)
                result[name.replace("kv_b", "k_b")] = both[:, : self.head_dim].swapaxes(1, 2)
                result[name.replace("kv_b", "v_b")] = both[:, self.head_dim :]
            else:
                result[name] = value
        return result

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        super().add_metadata(writer)
        writer.add_leading_dense_block_count(self.dense_layers)
        writer.add_vocab_size(len(vocabulary()))
        if self.q_rank:
            writer.add_q_lora_rank(self.q_rank)
        writer.add_kv_lora_rank(self.kv_rank)
        writer.add_rope_dimension_count(self.rope_dim)

    def add_counts(self, writer: gguf.GGUFWriter) -> None:
        writer.add_feed_forward_length(self.dense_ff)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.heads if self.unsplit else 1)

    def add_head_widths(self, writer: gguf.GGUFWriter) -> None:
        key_dim = self.head_dim + self.rope_dim
        if self.unsplit:
            writer.add_key_length(key_dim)
            writer.add_value_length(self.value_dim)
        else:
            writer.add_key_length(self.kv_rank + self.rope_dim)
            writer.add_value_length(self.kv_rank)
            writer.add_key_length_mla(key_dim)
            writer.add_value_length_mla(self.value_dim)

    def add_routing(self, writer: gguf.GGUFWriter) -> None:
        writer.add_expert_feed_forward_length(self.ff)
        writer.add_expert_shared_count(self.shared)
        writer.add_expert_weights_scale(self.scale)
        if self.unsplit:
            return
        kinds = gguf.ExpertGatingFuncType
        writer.add_expert_gating_func(kinds.SIGMOID if self.v3 else kinds.SOFTMAX)
        writer.add_expert_group_count(self.n_groups)
        writer.add_expert_group_used_count(self.n_groups_used)
        if self.v3:
            writer.add_expert_weights_norm(True)

    def add_scaling(self, writer: gguf.GGUFWriter) -> None:
        super().add_scaling(writer)
        if "mscale_all_dim" in self.rope:
            writer.add_rope_scaling_yarn_log_mul(0.1 * self.rope["mscale_all_dim"])

    def one_layer(self) -> TinyModel:
        return replace(self, layers=1, dense_layers=0, ahead=False)

    def hf_options(self) -> dict[str, Any]:
        options = super().hf_options() | {
            "num_key_value_heads": self.heads,
            "intermediate_size": self.dense_ff,
            "moe_intermediate_size": self.ff,
            "n_routed_experts": self.experts,
            "n_shared_experts": self.shared,
            "first_k_dense_replace": self.dense_layers,
            "q_lora_rank": self.q_rank or None,
            "kv_lora_rank": self.kv_rank,
            "qk_nope_head_dim": self.head_dim,
            "qk_rope_head_dim": self.rope_dim,
            "v_head_dim": self.value_dim,
            "n_group": self.n_groups,
            "topk_group": self.n_groups_used,
            "routed_scaling_factor": self.scale,
            "norm_topk_prob": self.v3,
        }
        del options["head_dim"]
        if not self.v3:
            options["topk_method"] = "group_limited_greedy" if self.n_groups > 1 else "greedy"
        return options

    def hf_names(self) -> dict[str, str]:
        parts = {f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj"
                 for part in ("gate", "up", "down")}  # fmt: skip
        return super().hf_names() | parts | {
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
        }  # fmt: skip

    def hf_block(self, block: Weights) -> Weights:
        state = super().hf_block(block)
        if "exp_probs_b.bias" in block:
            state["mlp.gate.e_score_correction_bias"] = block["exp_probs_b.bias"]
        return state

    @property
    def groups(self) -> Groups | None:
        if self.n_groups == 1:
            return None
        return Groups(self.n_groups, self.n_groups_used, n_best=2 if self.v3 else 1)

    def scores(self, weights: Weights, layer: int, logits: NDArray[Any]) -> NDArray[Any]:
        if not self.v3:
            return super().scores(weights, layer, logits)
        biased: NDArray[Any] = 1 / (1 + np.exp(-logits)) + weights[f"blk.{layer}.exp_probs_b.bias"]
        return biased


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
        "beta_fast": 32.0, "beta_slow": 1.0}  # fmt: skip
MODELS = (
    # As V2-Lite: q is not compressed, two shared experts.
    DeepSeek2("deepseek2_lite", 32, 2, 2, 2, 32, 32, experts=6, top_k=3, shared=2,
              rope=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}),
    DeepSeek2("deepseek2_unsplit", 32, 2, 2, 2, 64, 32, experts=4, top_k=1, unsplit=True,
              rope=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}),
    # As V2: experts of the best groups only.
    DeepSeek2("deepseek2_v2", 32, 1, 4, 4, 32, 32, experts=12, top_k=3, tied=True, q_rank=64,
              dense_layers=0, n_groups=4, n_groups_used=2, scale=4.0),
    DeepSeek2("deepseek2_v3", 32, 3, 2, 2, 32, 32, experts=8, top_k=3, v3=True, q_rank=32,
              kv_rank=64, value_dim=48, dense_layers=2, dense_ff=32, n_groups=4, n_groups_used=2,
              scale=2.5, rope=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}),
    # As Moonlight: V3's routing in one group.
    DeepSeek2("deepseek2_all_experts", 32, 1, 1, 1, 32, 32, experts=5, top_k=5, v3=True,
              dense_layers=0, kv_rank=96, value_dim=64, scale=2.446, ahead=True),
)  # fmt: skip
