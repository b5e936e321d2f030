"""Tiny models of `mistral4`: latent attention of DeepSeek-V2, and queries that grow with their
position, a step for each so many positions.

No text is longer than the first step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gguf

from tools.tiny_models.deepseek2 import DeepSeek2


@dataclass(frozen=True)
class Mistral4(DeepSeek2):
    """Weights of experts add up to 1."""

    q_rank: int = 32
    grows: float = 0.1
    step: int = 128

    architecture, hf_kind = "mistral4", "Mistral4"

    @property
    def rope_parameters(self) -> dict[str, Any]:
        rope = {"original_max_position_embeddings": self.step, "llama_4_scaling_beta": self.grows}
        return super().rope_parameters | rope

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        super().add_metadata(writer)
        writer.add_attn_temperature_scale(self.grows)
        writer.add_attn_temperature_length(self.step)

    def add_routing(self, writer: gguf.GGUFWriter) -> None:
        super().add_routing(writer)
        writer.add_expert_weights_norm(True)

    def hf_options(self) -> dict[str, Any]:
        options = super().hf_options() | {"norm_topk_prob": True}
        del options["topk_method"]
        return options


YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
MODELS = (
    Mistral4("mistral4_odd", 32, 2, 3, 3, 32, 32, experts=7, top_k=3, rope=YARN, shared=2,
             kv_rank=64),
    Mistral4("mistral4_top1", 32, 2, 2, 2, 64, 32, experts=4, top_k=1, dense_layers=0, tied=True,
             step=32, n_tokens=32, value_dim=64, rope=YARN | {"factor": 2.0}),
)  # fmt: skip
