"""Tiny models of `gpt-oss`: biases, attention sinks, windows, clamped SwiGLU, late softmax.

The middle of yarn's range is not rounded to whole pairs ("truncate": false), as in the published
models; no key of the file says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np

from tools.tiny_models.drawing import Draw, Floats, Quantised, Tensors, Weights
from tools.tiny_models.model import TinyModel

PARTS = ("gate", "up", "down")


@dataclass(frozen=True)
class GptOss(TinyModel):
    """Every second layer, from the first on, sees `window` positions only."""

    tied: bool = False
    eps: float = 1e-5
    window: int = 8
    mxfp4: bool = False
    """Experts are stored in MXFP4, and what that leaves of them goes to transformers."""

    architecture, hf_kind = "gpt-oss", "GptOss"

    def block(self, draw: Draw, layer: int) -> Weights:
        block = super().block(draw, layer)
        block["post_attention_norm.weight"] = block.pop("ffn_norm.weight")
        block["attn_sinks.weight"] = draw.bias(self.heads, gain=1.5)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_inp"):
            block[f"{name}.bias"] = draw.bias(block[f"{name}.weight"].shape[0])
        for part in PARTS:
            block[f"ffn_{part}_exps.bias"] = draw.bias(*block[f"ffn_{part}_exps.weight"].shape[:2])
        return block

    def routed(self, draw: Draw) -> Weights:
        """Gate and up go beyond the limits of the activation now and then."""
        stack = (self.experts, self.ff, self.hidden)
        experts = {
            "ffn_gate_exps.weight": draw.matrix(*stack, gain=4.0),
            "ffn_up_exps.weight": draw.matrix(*stack, gain=4.0),
            "ffn_down_exps.weight": draw.matrix(self.experts, self.hidden, self.ff, gain=0.3),
        }
        if self.mxfp4:
            kind = gguf.GGMLQuantizationType.MXFP4
            for name, value in experts.items():
                decoded = gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind)
                experts[name] = np.asarray(decoded, np.float32).reshape(value.shape)
        return {"ffn_gate_inp.weight": draw.matrix(self.experts, self.hidden)} | experts

    def file_tensors(self, weights: Weights) -> Tensors:
        if not self.mxfp4:
            return dict(weights)
        kind = gguf.GGMLQuantizationType.MXFP4
        return {
            name: Quantised(gguf.quants.quantize(value, kind), kind)
            if name.endswith("_exps.weight")
            else value
            for name, value in weights.items()
        }

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        super().add_metadata(writer)
        writer.add_sliding_window(self.window)
        writer.add_expert_feed_forward_length(self.ff)

    def hf_options(self) -> dict[str, Any]:
        return super().hf_options() | {
            "num_local_experts": self.experts,
            "sliding_window": self.window,
        }

    def hf_names(self) -> dict[str, str]:
        return super().hf_names() | {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        }

    def hf_block(self, block: Weights) -> Weights:
        state = super().hf_block(block)
        state["self_attn.sinks"] = block["attn_sinks.weight"]
        weight = {part: block[f"ffn_{part}_exps.weight"].swapaxes(1, 2) for part in PARTS}
        bias = {part: block[f"ffn_{part}_exps.bias"] for part in PARTS}
        for suffix, value in (("", weight), ("_bias", bias)):
            state[f"mlp.experts.gate_up_proj{suffix}"] = alternating(value["gate"], value["up"])
            state[f"mlp.experts.down_proj{suffix}"] = np.ascontiguousarray(value["down"])
        return state


def alternating(even: Floats, odd: Floats) -> Floats:
    """The last axis of both, one element of each in turn."""
    return np.stack([even, odd], axis=-1).reshape(*even.shape[:-1], -1)


YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "truncate": False,
        "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 64}  # fmt: skip
MODELS = (
    GptOss("gptoss_plain", 32, 2, 2, 1, 64, 32, experts=4, top_k=2, context=256, rope=YARN),
    GptOss("gptoss_odd", 32, 3, 3, 1, 32, 32, experts=5, top_k=1, context=256, window=3,
           tied=True, rope=YARN | {"beta_fast": 3.0}),
    GptOss("gptoss_all_experts", 32, 2, 4, 2, 32, 32, experts=3, top_k=3, eps=1e-3),
    GptOss("gptoss_mxfp4", 32, 2, 2, 2, 32, 64, experts=6, top_k=4, context=256, rope=YARN,
           mxfp4=True),
)  # fmt: skip
