"""Tiny models of `qwen35`, `qwen35moe` and `qwen3next`: a gated delta rule in most layers, gated
attention in the others.

Gains of norms lie one below what a file has, but for that of the delta rule's output. A key head
has neighbouring heads of values; converters of the first two put these into turns of key heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from tools.tiny_models.drawing import Draw, Tensors, Weights
from tools.tiny_models.model import TinyModel


@dataclass(frozen=True)
class Qwen35(TinyModel):
    """Dense without experts, else with a shared one beside them."""

    full: tuple[int, ...] = (3,)
    """The layers with attention."""
    key_heads: int = 2
    value_heads: int = 4
    state: int = 32
    """Dimensions of a head of keys or of values."""
    taps: int = 4
    rotary: float = 0.25
    """The share of a head that turns."""
    shared: int = 32
    """Width of the shared expert."""
    next: bool = False
    """It is a qwen3next, whose projections transformers has in two matrices."""
    listed: bool = False
    """The file lists the layers that are recurrent, as newer ones do, beside the usual interval."""
    fused: bool = False
    """The file has gate and up of the experts in one tensor."""

    @property
    def architecture(self) -> str:
        return "qwen3next" if self.next else "qwen35moe" if self.experts else "qwen35"

    @property
    def hf_kind(self) -> str:
        return "Qwen3Next" if self.next else "Qwen3_5Moe" if self.experts else "Qwen3_5"

    @property
    def hf_config(self) -> str:
        return super().hf_config if self.next else f"{self.hf_kind}TextConfig"

    @property
    def rope_parameters(self) -> dict[str, Any]:
        return super().rope_parameters | {"partial_rotary_factor": self.rotary}

    @property
    def ratio(self) -> int:
        """How many heads of values a key head has."""
        return self.value_heads // self.key_heads

    def ahead_block(self, draw: Draw) -> Weights:
        """Of `own_head` such models have the norm alone."""
        others = ("embed_tokens.weight", "shared_head_head.weight")
        block = super().ahead_block(draw)
        return {name: value for name, value in block.items() if not name.endswith(others)}

    def block(self, draw: Draw, layer: int) -> Weights:
        block = super().block(draw, layer)
        if layer not in (*self.full, self.layers):
            block = {key: value for key, value in block.items() if not key.startswith("attn")}
            block |= self.delta_rule(draw)
        norm = {"post_attention_norm.weight": block.pop("ffn_norm.weight")}
        return block | norm

    def attention(self, draw: Draw) -> Weights:
        q_width = self.heads * self.head_dim
        return super().attention(draw) | {
            "attn_q.weight": draw.matrix(2 * q_width, self.hidden),
            "attn_q_norm.weight": draw.norm(self.head_dim),
            "attn_k_norm.weight": draw.norm(self.head_dim),
        }

    def delta_rule(self, draw: Draw) -> Weights:
        keys, values = self.key_heads * self.state, self.value_heads * self.state
        heads, hidden = self.value_heads, self.hidden
        return {
            "attn_norm.weight": draw.norm(hidden),
            "attn_qkv.weight": draw.matrix(2 * keys + values, hidden),
            "attn_gate.weight": draw.matrix(values, hidden),
            "ssm_beta.weight": draw.matrix(heads, hidden),
            "ssm_alpha.weight": draw.matrix(heads, hidden),
            "ssm_conv1d.weight": draw.matrix(2 * keys + values, self.taps),
            "ssm_a": -np.exp(draw.bias(heads)),
            "ssm_dt.bias": draw.bias(heads),
            "ssm_norm.weight": draw.norm(self.state),
            "ssm_out.weight": draw.matrix(hidden, values),
        }

    def routed(self, draw: Draw) -> Weights:
        gate = {"ffn_gate_inp_shexp.weight": draw.matrix(1, self.hidden)}
        return super().routed(draw) | self.dense(draw, self.shared, "_shexp") | gate

    # ----- as a file has them -----

    def file_tensors(self, weights: Weights) -> Tensors:
        found: Tensors = {}
        for name, value in weights.items():
            prefix, _, rest = name.rpartition("blk.")[2].partition(".")
            turned = self.in_turns(rest, value)
            if self.next and rest in ("ssm_beta.weight", "ssm_alpha.weight"):
                if rest == "ssm_beta.weight":
                    found[f"blk.{prefix}.ssm_ba.weight"] = self.beta_and_alpha(weights, prefix)
                continue
            if self.fused and rest == "ffn_up_exps.weight":
                continue
            if self.fused and rest == "ffn_gate_exps.weight":
                up = weights[f"blk.{prefix}.ffn_up_exps.weight"]
                fused = np.concatenate([value, up], axis=1)
                found[f"blk.{prefix}.ffn_gate_up_exps.weight"] = fused
                continue
            found[name] = turned
        return found

    def beta_and_alpha(self, weights: Weights, layer: str) -> NDArray[Any]:
        """b of a key head's heads, then a of these, as one matrix."""
        parts = [
            weights[f"blk.{layer}.ssm_{name}.weight"].reshape(self.key_heads, self.ratio, -1)
            for name in ("beta", "alpha")
        ]
        both: NDArray[Any] = np.concatenate(parts, axis=1).reshape(2 * self.value_heads, -1)
        return both

    def in_turns(self, name: str, value: Any) -> Any:
        """Heads of values in turns of key heads, where a file has them so."""
        if self.next:
            return value
        heads = np.arange(self.value_heads).reshape(self.key_heads, self.ratio).T.ravel()
        if name in ("ssm_beta.weight", "ssm_alpha.weight", "ssm_a", "ssm_dt.bias"):
            return value[heads]
        rows = (heads[:, None] * self.state + np.arange(self.state)).ravel()
        if name == "attn_gate.weight":
            return value[rows]
        if name == "ssm_out.weight":
            return value[:, rows]
        if name in ("attn_qkv.weight", "ssm_conv1d.weight"):
            n_keys = 2 * self.key_heads * self.state
            return np.concatenate([value[:n_keys], value[n_keys:][rows]])
        return value

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        super().add_metadata(writer)
        writer.add_rope_dimension_count(int(self.rotary * self.head_dim))
        writer.add_ssm_conv_kernel(self.taps)
        writer.add_ssm_state_size(self.state)
        writer.add_ssm_group_count(self.key_heads)
        writer.add_ssm_time_step_rank(self.value_heads)
        writer.add_ssm_inner_size(self.value_heads * self.state)
        prefix = self.architecture
        if self.listed:
            recurrent = [layer not in self.full for layer in range(self.layers)]
            recurrent += [False] * self.ahead
            writer.add_array(f"{prefix}.attention.recurrent_layers", recurrent)
        interval = 4 if self.listed else self.full[0] + 1
        writer.add_uint32(f"{prefix}.full_attention_interval", interval)
        if not self.next:
            writer.add_array(f"{prefix}.rope.dimension_sections", [2, 1, 1, 0])

    def add_routing(self, writer: gguf.GGUFWriter) -> None:
        writer.add_expert_feed_forward_length(self.ff)
        writer.add_expert_shared_feed_forward_length(self.shared)

    # ----- as transformers has them -----

    def one_layer(self) -> TinyModel:
        return replace(self, layers=1, full=(0,), ahead=False)

    def hf_options(self) -> dict[str, Any]:
        kinds = ("linear_attention", "full_attention")
        options = super().hf_options() | {
            "layer_types": [kinds[layer in self.full] for layer in range(self.layers)],
            "linear_num_key_heads": self.key_heads,
            "linear_num_value_heads": self.value_heads,
            "linear_key_head_dim": self.state,
            "linear_value_head_dim": self.state,
            "linear_conv_kernel_dim": self.taps,
        }
        if not self.next:
            options["rope_parameters"] = self.rope_parameters | {"mrope_section": [2, 1, 1]}
        if self.experts:
            options |= {
                "num_experts": self.experts,
                "moe_intermediate_size": self.ff,
                "shared_expert_intermediate_size": self.shared,
                "norm_topk_prob": True,
                "mlp_only_layers": [],
                "decoder_sparse_step": 1,
            }
        return options

    def hf_state(self, weights: Weights) -> Weights:
        state = super().hf_state(weights)
        gains = [key for key in state if key.endswith("norm.weight") and "linear_attn" not in key]
        return state | {key: state[key] - 1 for key in gains}

    def hf_block(self, block: Weights) -> Weights:
        state = super().hf_block(block)
        if "ssm_a" not in block:
            return state
        state["linear_attn.A_log"] = np.log(-block["ssm_a"])
        state["linear_attn.dt_bias"] = block["ssm_dt.bias"]
        state["linear_attn.conv1d.weight"] = block["ssm_conv1d.weight"][:, None]
        if not self.next:
            return state
        for key in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"):
            del state[f"linear_attn.{key}.weight"]
        keys = self.key_heads
        q, k, v = np.split(block["attn_qkv.weight"], [keys * self.state, 2 * keys * self.state])
        of_heads = [x.reshape(keys, -1, self.hidden) for x in (q, k, v, block["attn_gate.weight"])]
        both = np.concatenate(of_heads, axis=1).reshape(-1, self.hidden)
        parts = {f"blk.0.{key}": value for key, value in block.items()}
        state["linear_attn.in_proj_qkvz.weight"] = both
        state["linear_attn.in_proj_ba.weight"] = self.beta_and_alpha(parts, "0")
        return state

    def hf_names(self) -> dict[str, str]:
        parts = {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj"
                 for part in ("gate", "up", "down")}  # fmt: skip
        return (
            super().hf_names()
            | parts
            | {
                "post_attention_norm": "post_attention_layernorm",
                "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
                "attn_qkv": "linear_attn.in_proj_qkv",
                "attn_gate": "linear_attn.in_proj_z",
                "ssm_beta": "linear_attn.in_proj_b",
                "ssm_alpha": "linear_attn.in_proj_a",
                "ssm_norm": "linear_attn.norm",
                "ssm_out": "linear_attn.out_proj",
            }
        )


MODELS = (
    Qwen35("qwen35moe_odd", 32, 4, 3, 1, 64, 32, experts=7, top_k=3, full=(2,), key_heads=2,
           value_heads=6, shared=64, listed=True, fused=True, ahead=True, n_tokens=20),
    Qwen35("qwen35moe_top1", 32, 4, 4, 2, 32, 32, experts=4, top_k=1, key_heads=4, tied=False),
    Qwen35("qwen35_dense", 32, 4, 4, 2, 32, 64, key_heads=1, value_heads=3, taps=3, n_tokens=60,
           rope={"rope_theta": 1e6}, rotary=0.5, ahead=True, own_head=True),
    Qwen35("qwen35_full_first", 32, 3, 2, 1, 32, 32, full=(0,), listed=True, state=64, eps=1e-3),
    Qwen35("qwen3next_odd", 32, 4, 2, 1, 64, 32, experts=5, top_k=2, key_heads=2, value_heads=6,
           next=True, ahead=True, own_head=True),
    Qwen35("qwen3next_all_experts", 32, 2, 3, 1, 32, 32, experts=3, top_k=3, full=(1,),
           key_heads=3, value_heads=3, tied=False, next=True),
)  # fmt: skip
