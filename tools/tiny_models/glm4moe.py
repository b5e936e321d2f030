"""Tiny models of `glm4moe`: heads that turn in part, leading dense layers, a shared block, and
experts chosen by sigmoid and a bias.

GLM-4.5 (arXiv:2508.06471) has biases of q, k and v, and its larger form norms of q and k in each
head. Solar Open has neither, and turns whole heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from tools.tiny_models.drawing import Draw, Weights
from tools.tiny_models.model import TinyModel
from tools.tiny_models.routing import Groups
from tools.tiny_models.vocabulary import vocabulary

PARTS = ("gate", "up", "down")


@dataclass(frozen=True)
class SigmoidRouted(TinyModel):
    """What families share whose experts are chosen by sigmoid and a bias, behind dense layers."""

    tied: bool = False
    dense_layers: int = 1
    dense_ff: int = 64
    shared: int = 1
    """Shared experts, each `ff` wide."""
    n_groups: int = 1
    n_groups_used: int = 1
    scale: float = 1.0

    def block(self, draw: Draw, layer: int) -> Weights:
        block = self.attention(draw) | {"ffn_norm.weight": draw.norm(self.hidden)}
        if layer < self.dense_layers:
            return block | self.dense(draw, self.dense_ff)
        block |= self.routed(draw) | self.dense(draw, self.shared * self.ff, "_shexp")
        return block | {"exp_probs_b.bias": draw.bias(self.experts, gain=0.3)}

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        super().add_metadata(writer)
        writer.add_leading_dense_block_count(self.dense_layers)
        writer.add_vocab_size(len(vocabulary()))

    def add_counts(self, writer: gguf.GGUFWriter) -> None:
        writer.add_feed_forward_length(self.dense_ff)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)

    def add_routing(self, writer: gguf.GGUFWriter) -> None:
        writer.add_expert_feed_forward_length(self.ff)
        writer.add_expert_shared_count(self.shared)
        writer.add_expert_weights_scale(self.scale)
        writer.add_expert_weights_norm(True)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_group_count(self.n_groups)
        writer.add_expert_group_used_count(self.n_groups_used)

    def hf_options(self) -> dict[str, Any]:
        return super().hf_options() | {
            "intermediate_size": self.dense_ff,
            "moe_intermediate_size": self.ff,
            "n_routed_experts": self.experts,
            "n_shared_experts": self.shared,
            "first_k_dense_replace": self.dense_layers,
            "n_group": self.n_groups,
            "topk_group": self.n_groups_used,
            "routed_scaling_factor": self.scale,
            "norm_topk_prob": True,
        }

    def hf_names(self) -> dict[str, str]:
        parts = {f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in PARTS}
        return super().hf_names() | parts

    def hf_block(self, block: Weights) -> Weights:
        state = super().hf_block(block)
        if "exp_probs_b.bias" in block:
            state["mlp.gate.e_score_correction_bias"] = block["exp_probs_b.bias"]
        return state

    def one_layer(self) -> TinyModel:
        return replace(self, layers=1, dense_layers=0, ahead=False)

    @property
    def groups(self) -> Groups | None:
        if self.n_groups == 1:
            return None
        return Groups(self.n_groups, self.n_groups_used, n_best=2)

    def scores(self, weights: Weights, layer: int, logits: NDArray[Any]) -> NDArray[Any]:
        bias = weights.get(f"blk.{layer}.exp_probs_b.bias", np.float32(0))
        biased: NDArray[Any] = 1 / (1 + np.exp(-logits)) + bias
        return biased


@dataclass(frozen=True)
class Glm4Moe(SigmoidRouted):
    """GLM-4.5 and 4.6; without biases it is Solar Open."""

    biases: bool = True
    """Of q, k and v."""
    norms: bool = True
    """Of q and k in each head."""
    rotary: float = 0.5
    """The share of a head that turns."""

    architecture = "glm4moe"

    @property
    def hf_kind(self) -> str:
        return "Glm4Moe" if self.biases else "SolarOpen"

    @property
    def rope_parameters(self) -> dict[str, Any]:
        return super().rope_parameters | {"partial_rotary_factor": self.rotary}

    def block(self, draw: Draw, layer: int) -> Weights:
        block = super().block(draw, layer)
        norm = {"post_attention_norm.weight": block.pop("ffn_norm.weight")}
        return block | norm

    def attention(self, draw: Draw) -> Weights:
        block = super().attention(draw)
        for name in ("attn_q", "attn_k", "attn_v") if self.biases else ():
            block[f"{name}.bias"] = draw.bias(block[f"{name}.weight"].shape[0])
        for name in ("attn_q_norm", "attn_k_norm") if self.norms else ():
            block[f"{name}.weight"] = draw.norm(self.head_dim)
        return block

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        super().add_metadata(writer)
        writer.add_rope_dimension_count(int(self.rotary * self.head_dim))

    def hf_options(self) -> dict[str, Any]:
        options = super().hf_options()
        if not self.biases:
            for key in ("intermediate_size", "first_k_dense_replace"):
                del options[key]
            return options | {"attention_bias": False}
        return options | {"attention_bias": True, "use_qk_norm": self.norms, "num_mtp_layers": 0}

    def hf_names(self) -> dict[str, str]:
        return super().hf_names() | {"post_attention_norm": "post_attention_layernorm"}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
MODELS = (
    Glm4Moe("glm4moe_odd", 32, 3, 3, 1, 64, 32, experts=7, top_k=3, scale=2.5, eps=1e-5,
            rope={"rope_theta": 1e6}, ahead=True),
    # As GLM-4.5-Air: without norms.
    Glm4Moe("glm4moe_groups", 32, 3, 4, 2, 32, 32, experts=12, top_k=2, norms=False, shared=2,
            dense_layers=2, n_groups=4, n_groups_used=2, ahead=True, own_head=True),
    # As Solar Open.
    Glm4Moe("glm4moe_bare", 32, 2, 2, 1, 32, 32, experts=5, top_k=1, biases=False, norms=False,
            rotary=1.0, dense_layers=0, rope=YARN, tied=True),
)  # fmt: skip
