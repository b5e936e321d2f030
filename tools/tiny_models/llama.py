"""Tiny models of `llama`: interleaved rotary pairs, dense or with experts (Mixtral).

The rotary embedding of a `llama` file turns neighbours, transformers' turns halves of a head, so
the rows of q and k lie in another order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np

from tools.tiny_models.drawing import Draw, Floats, Tensors, Weights
from tools.tiny_models.model import TinyModel
from tools.tiny_models.vocabulary import vocabulary


@dataclass(frozen=True)
class Llama(TinyModel):
    """Llama, Mistral and Mixtral."""

    eps: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False
    one_by_one: bool = False
    """Each expert is a tensor of its own, as in files before April 2024."""

    architecture = "llama"

    @property
    def hf_kind(self) -> str:
        return "Mixtral" if self.experts else "Llama"

    def block(self, draw: Draw, layer: int) -> Weights:
        block = super().block(draw, layer)
        biased = []
        if self.attention_bias:
            biased += ["attn_q", "attn_k", "attn_v", "attn_output"]
        if self.mlp_bias:
            biased += ["ffn_gate", "ffn_up", "ffn_down"]
        for name in biased:
            block[f"{name}.bias"] = draw.bias(block[f"{name}.weight"].shape[0])
        return block

    def file_tensors(self, weights: Weights) -> Tensors:
        result: Tensors = dict(self.rope_tensors())
        for name, value in weights.items():
            stem = name.split(".")[-2]
            if stem in ("attn_q", "attn_k"):
                result[name] = pairs_side_by_side(value, self.head_dim)
            elif self.one_by_one and stem.endswith("_exps"):
                for index, expert in enumerate(value):
                    result[name.replace("_exps", f".{index}")] = expert
            else:
                result[name] = value
        return result

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        super().add_metadata(writer)
        writer.add_vocab_size(len(vocabulary()))
        writer.add_rope_dimension_count(self.head_dim)

    def add_head_widths(self, writer: gguf.GGUFWriter) -> None:
        if self.head_dim != self.hidden // self.heads:
            super().add_head_widths(writer)

    def add_scaling(self, writer: gguf.GGUFWriter) -> None:
        super().add_scaling(writer)
        rope = self.rope_parameters
        if rope["rope_type"] == "longrope":
            original = rope["original_max_position_embeddings"]
            stretch = 1 + math.log(self.context / original) / math.log(original)
            writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
            writer.add_rope_scaling_orig_ctx_len(original)
            writer.add_rope_scaling_attn_factors(math.sqrt(stretch))

    def rope_tensors(self) -> Weights:
        """The divisors of the frequencies [head_dim / 2], where the scaling has any."""
        rope = self.rope_parameters
        if rope["rope_type"] == "llama3":
            return {"rope_freqs.weight": llama3_factors(self.head_dim, rope)}
        if rope["rope_type"] == "longrope":
            return {
                f"rope_factors_{length}.weight": np.array(rope[f"{length}_factor"], np.float32)
                for length in ("long", "short")
            }
        return {}

    def hf_options(self) -> dict[str, Any]:
        options = super().hf_options()
        if self.experts:
            return options | {"num_local_experts": self.experts, "sliding_window": None}
        return options | {"attention_bias": self.attention_bias, "mlp_bias": self.mlp_bias}


def pairs_side_by_side(rows: Floats, head_dim: int) -> Floats:
    """Rows [heads * head_dim, ...] with row i + head_dim / 2 of a head moved behind its row i."""
    halves = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def llama3_factors(head_dim: int, rope: dict[str, Any]) -> Floats:
    """What the converter stores of Llama 3.1's rule: frequencies are divided by 1 to `factor`.

    Wavelengths above context / low_freq_factor by `factor`, below context / high_freq_factor by 1,
    between them the frequency itself is interpolated.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    wavelengths = 2 * np.pi * rope["rope_theta"] ** exponents.astype(np.float64)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    part = (rope["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    part = np.clip(part, 0, 1)
    divisors: Floats = (1 / ((1 - part) / rope["factor"] + part)).astype(np.float32)
    return divisors


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64,
          "low_freq_factor": 1.0, "high_freq_factor": 4.0}  # fmt: skip
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 32, "rope_theta": 500.0,
            "short_factor": [1 + 0.05 * i for i in range(16)],
            "long_factor": [1 + 0.4 * i for i in range(16)]}  # fmt: skip
MODELS = (
    Llama("llama_plain", 32, 2, 1, 1, 32, 64, tied=False),
    Llama("llama_rope_freqs", 32, 1, 4, 1, 32, 64, rope=LLAMA3),
    Llama("llama_biases", 32, 1, 4, 2, 32, 32, tied=False, attention_bias=True, eps=1e-3),
    Llama("llama_mlp_biases", 32, 1, 2, 1, 64, 32, mlp_bias=True, rope=YARN),
    Llama("llama_longrope_short", 32, 1, 2, 1, 32, 32, context=1024, ctx_size=256,
          rope=LONGROPE | {"original_max_position_embeddings": 256}),
    Llama("llama_longrope_long", 32, 1, 2, 1, 32, 32, rope=LONGROPE, n_tokens=40),
    Llama("mixtral_plain", 32, 1, 2, 1, 32, 32, tied=False, experts=8, top_k=2),
    Llama("mixtral_top1", 32, 1, 3, 1, 64, 32, experts=6, top_k=1, rope=YARN),
    Llama("mixtral_one_by_one", 32, 2, 2, 2, 32, 32, experts=3, top_k=3,
          rope={"rope_theta": 1e6}, one_by_one=True),
)  # fmt: skip
