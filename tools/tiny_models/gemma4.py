"""Tiny models of `gemma4`: windows in most layers, norms behind every block, a dense block beside
the experts; layers that see what earlier ones keep, and embeddings for each layer. And small models
of `gemma4-assistant` that guess tokens for them.

Layers that see all have wider heads, fewer of keys, and values made of the keys' projection; of
each head a part turns, whose pairs are spread over all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from tools.tiny_models.drawing import Draw, Tensors, Weights
from tools.tiny_models.model import TinyModel
from tools.tiny_models.vocabulary import vocabulary

NEVER = 1e30  # the factor of a pair that does not turn
PARTS = ("gate", "up", "down")
MODEL_NAMES = {
    "per_layer_token_embd": "embed_tokens_per_layer",
    "per_layer_model_proj": "per_layer_model_projection",
    "per_layer_proj_norm": "per_layer_projection_norm",
}


@dataclass(frozen=True)
class Gemma4(TinyModel):
    """`heads`, `kv_heads` and `head_dim` are of the layers with a window."""

    full: tuple[int, ...] = (3,)
    """The layers that see all; the last one must be one."""
    window: int = 6
    wide: int = 64
    """Dimensions of a head that sees all."""
    wide_kv: int = 1
    expert_ff: int = 32
    share: float = 0.25
    """Of the pairs of such a head, that turn."""
    keys_are_values: bool = True
    fused: bool = True
    """Gate and up of the experts are one tensor."""
    cap: float = 8.0
    scaled: bool = True
    wide_base: float = 1e6
    shared: int = 0
    """The last layers, that have no keys and values."""
    doubled: bool = False
    """The dense blocks of these are twice as wide."""
    input: int = 0
    """Width of what a token brings to each layer."""
    kept: bool = False
    """A file has keys and values of the layers that do not use any."""

    architecture, hf_kind = "gemma4", "Gemma4"

    @property
    def hf_config(self) -> str:
        return "Gemma4TextConfig"

    @property
    def rope_base(self) -> float:
        return self.wide_base

    @property
    def widths(self) -> list[int]:
        """Of the dense blocks of all layers."""
        first = self.layers - self.shared
        return [self.ff * (1 + (self.doubled and i >= first)) for i in range(self.layers)]

    def draw(self, seed: int) -> Weights:
        weights = super().draw(seed)
        if not self.input:
            return weights
        draw, n_vocab = Draw(seed + 2), len(weights["token_embd.weight"])
        whole = self.layers * self.input
        return weights | {
            "per_layer_token_embd.weight": draw.matrix(n_vocab, whole, gain=float(np.sqrt(whole))),
            "per_layer_model_proj.weight": draw.matrix(whole, self.hidden, gain=0.3),
            "per_layer_proj_norm.weight": draw.norm(self.input),
        }

    def block(self, draw: Draw, layer: int) -> Weights:
        block = self.attention_of(draw, layer in self.full) | {
            f"{name}.weight": draw.norm(self.hidden)
            for name in ("ffn_norm", "post_attention_norm", "post_ffw_norm")
        }
        block |= self.dense(draw, self.widths[layer])
        if layer >= self.layers - self.shared and not self.kept:
            for name in ("attn_k", "attn_v", "attn_k_norm"):
                block.pop(f"{name}.weight", None)
        if self.input:
            block["inp_gate.weight"] = draw.matrix(self.input, self.hidden)
            block["proj.weight"] = draw.matrix(self.hidden, self.input)
            block["post_norm.weight"] = draw.norm(self.hidden)
        if self.scaled:
            block["layer_output_scale.weight"] = 1 + draw.bias(1)
        if self.experts:
            stack = (self.experts, self.expert_ff, self.hidden)
            norms = ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")
            block |= {f"{name}.weight": draw.norm(self.hidden) for name in norms} | {
                "ffn_gate_inp.weight": draw.matrix(self.experts, self.hidden, gain=4.0),
                "ffn_gate_inp.scale": draw.norm(self.hidden),
                "ffn_gate_exps.weight": draw.matrix(*stack),
                "ffn_up_exps.weight": draw.matrix(*stack),
                "ffn_down_exps.weight": draw.matrix(self.experts, self.hidden, self.expert_ff),
                "ffn_down_exps.scale": 1 + draw.bias(self.experts),
            }
        return block

    def attention_of(self, draw: Draw, is_full: bool) -> Weights:
        dim, n_kv = (self.wide, self.wide_kv) if is_full else (self.head_dim, self.kv_heads)
        block = {
            "attn_norm.weight": draw.norm(self.hidden),
            "attn_q.weight": draw.matrix(self.heads * dim, self.hidden),
            "attn_k.weight": draw.matrix(n_kv * dim, self.hidden),
            "attn_output.weight": draw.matrix(self.hidden, self.heads * dim),
            "attn_q_norm.weight": draw.norm(dim),
            "attn_k_norm.weight": draw.norm(dim),
        }
        if not (is_full and self.keys_are_values):
            block["attn_v.weight"] = draw.matrix(n_kv * dim, self.hidden)
        return block

    # ----- as a file has them -----

    def file_tensors(self, weights: Weights) -> Tensors:
        found: Tensors = dict(weights)
        for layer in range(self.layers) if self.fused and self.experts else ():
            names = [f"blk.{layer}.ffn_{part}_exps.weight" for part in ("gate", "up")]
            both = [weights[name] for name in names]
            for name in names:
                del found[name]
            found[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate(both, axis=1)
        factors = np.full(self.wide // 2, NEVER, np.float32)
        factors[: int(self.share * self.wide / 2)] = 1.0
        return found | {"rope_freqs.weight": factors}

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        super().add_metadata(writer)
        prefix, kinds = self.architecture, [layer in self.full for layer in range(self.layers)]
        writer.add_sliding_window(self.window)
        writer.add_array(f"{prefix}.attention.sliding_window_pattern", [not kind for kind in kinds])
        counts = [self.wide_kv if kind else self.kv_heads for kind in kinds]
        writer.add_array(f"{prefix}.attention.head_count_kv", counts)
        writer.add_uint32(f"{prefix}.attention.key_length_swa", self.head_dim)
        writer.add_uint32(f"{prefix}.attention.value_length_swa", self.head_dim)
        writer.add_uint32(f"{prefix}.rope.dimension_count", self.wide)
        writer.add_uint32(f"{prefix}.rope.dimension_count_swa", self.head_dim)
        writer.add_float32(f"{prefix}.rope.freq_base_swa", self.rope_parameters["rope_theta"])
        writer.add_float32(f"{prefix}.final_logit_softcapping", self.cap)
        writer.add_uint32(f"{prefix}.attention.shared_kv_layers", self.shared)
        writer.add_uint32(f"{prefix}.embedding_length_per_layer_input", self.input)

    def add_counts(self, writer: gguf.GGUFWriter) -> None:
        writer.add_feed_forward_length(self.widths if self.doubled else self.ff)
        writer.add_head_count(self.heads)

    def add_head_widths(self, writer: gguf.GGUFWriter) -> None:
        writer.add_key_length(self.wide)
        writer.add_value_length(self.wide)

    def add_routing(self, writer: gguf.GGUFWriter) -> None:
        writer.add_expert_feed_forward_length(self.expert_ff)

    # ----- as transformers has them -----

    def hf_options(self) -> dict[str, Any]:
        kinds = ("sliding_attention", "full_attention")
        proportional = {"rope_type": "proportional", "partial_rotary_factor": self.share}
        options = super().hf_options() | {
            "layer_types": [kinds[layer in self.full] for layer in range(self.layers)],
            "sliding_window": self.window,
            "global_head_dim": self.wide,
            "num_global_key_value_heads": self.wide_kv,
            "attention_k_eq_v": self.keys_are_values,
            "final_logit_softcapping": self.cap,
            "hidden_size_per_layer_input": self.input,
            "vocab_size_per_layer_input": len(vocabulary()),
            "num_kv_shared_layers": self.shared,
            "use_double_wide_mlp": self.doubled,
            "rope_parameters": {
                kinds[0]: self.rope_parameters,
                kinds[1]: proportional | {"rope_theta": self.wide_base},
            },
        }
        options.pop("num_experts_per_tok", None)
        if self.experts:
            options |= {
                "enable_moe_block": True,
                "num_experts": self.experts,
                "top_k_experts": self.top_k,
                "moe_intermediate_size": self.expert_ff,
            }
        return options

    def hf_names(self) -> dict[str, str]:
        return super().hf_names() | {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "ffn_gate_inp": "router.proj",
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
        }

    def hf_state(self, weights: Weights) -> Weights:
        state = super().hf_state(weights)
        for name, theirs in MODEL_NAMES.items() if self.input else ():
            state[f"model.{theirs}.weight"] = weights[f"{name}.weight"]
        for layer in range(self.layers - self.shared, self.layers) if self.kept else ():
            for part in ("k_proj", "v_proj", "k_norm"):
                state.pop(f"model.layers.{layer}.self_attn.{part}.weight", None)
        return state

    def hf_block(self, block: Weights) -> Weights:
        state = super().hf_block(block)
        state["layer_scalar"] = block.get("layer_output_scale.weight", np.ones(1, np.float32))
        if self.experts:
            state["router.scale"] = state.pop("router.proj.scale")
            state["router.per_expert_scale"] = block["ffn_down_exps.scale"]
            for name in ("gate_up_proj", "down_proj"):
                state[f"experts.{name}"] = state.pop(f"mlp.experts.{name}")
        return state

    def scores(self, weights: Weights, layer: int, logits: NDArray[Any]) -> NDArray[Any]:
        """The router of transformers gives chances."""
        return logits


MODELS = (
    Gemma4("gemma4_odd", 32, 4, 6, 2, 32, 64, experts=6, top_k=2, n_tokens=30),
    Gemma4("gemma4_top1", 32, 3, 4, 4, 32, 32, full=(1, 2), experts=5, top_k=1, wide=32, wide_kv=4,
           share=0.5, keys_are_values=False, fused=False, scaled=False, window=3),
    Gemma4("gemma4_dense", 32, 4, 4, 2, 32, 64, full=(0, 3), wide=64, wide_kv=2, n_tokens=30,
           eps=1e-5),
    Gemma4("gemma4_dense_inputs", 32, 7, 4, 1, 32, 64, full=(1, 3, 6), wide=64, wide_kv=1,
           n_tokens=30, keys_are_values=False, shared=3, doubled=True, input=64, eps=1e-3),
    Gemma4("gemma4_shared", 32, 5, 6, 2, 32, 32, full=(1, 4), wide=64, wide_kv=2, window=4,
           cap=30.0, shared=2, kept=True, scaled=False, input=96, experts=5, top_k=2),
    Gemma4("gemma4_wide", 64, 3, 4, 2, 32, 64, full=(2,), experts=4, top_k=2, n_tokens=30),
)  # fmt: skip


@dataclass(frozen=True)
class Drafter(Gemma4):
    """Guesses tokens for the model `target`, of which its layers see keys and values."""

    target_hidden: int = 32

    architecture, hf_kind = "gemma4-assistant", "Gemma4Assistant"

    @property
    def target(self) -> str:
        return self.name.removesuffix("_assistant")

    @property
    def hf_config(self) -> str:
        return "Gemma4AssistantConfig"

    def draw(self, seed: int) -> Weights:
        draw = Draw(seed + 3)
        return super().draw(seed) | {
            "nextn.pre_projection.weight": draw.matrix(self.hidden, 2 * self.target_hidden),
            "nextn.post_projection.weight": draw.matrix(self.target_hidden, self.hidden),
        }

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        super().add_metadata(writer)
        writer.add_uint32(f"{self.architecture}.embedding_length_out", self.target_hidden)
        writer.add_nextn_predict_layers(self.layers)

    def hf_options(self) -> dict[str, Any]:
        text = super().hf_options() | {"model_type": "gemma4_text", "vocab_size_per_layer_input": 0}
        return {
            "text_config": text,
            "backbone_hidden_size": self.target_hidden,
            "attn_implementation": "eager",
        }

    def hf_state(self, weights: Weights) -> Weights:
        parts = ("pre_projection.weight", "post_projection.weight")
        return super().hf_state(weights) | {part: weights[f"nextn.{part}"] for part in parts}


DRAFTERS = (
    Drafter("gemma4_wide_assistant", 32, 2, 6, 2, 32, 96, full=(1,), shared=2, target_hidden=64),
    Drafter("gemma4_shared_assistant", 32, 3, 8, 2, 32, 96, full=(0, 2), shared=3, wide_kv=2,
            window=4, scaled=False),
)  # fmt: skip
