"""Tiny models of `bailingmoe2`: glm4moe's layers without biases, whose files have q, k and v in one
matrix and another name for a norm.

Transformers has no such models, but computes the same of GLM-4.5 without biases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np

from tools.tiny_models.drawing import Tensors, Weights
from tools.tiny_models.glm4moe import Glm4Moe


@dataclass(frozen=True)
class BailingMoe2(Glm4Moe):
    """Ling 2.0 and Ring 2.0."""

    biases: bool = False

    architecture, hf_kind = "bailingmoe2", "Glm4Moe"

    def file_tensors(self, weights: Weights) -> Tensors:
        found: Tensors = {}
        for name, value in weights.items():
            prefix, _, rest = name.rpartition("attn_")
            if rest == "q.weight":
                parts = [weights[f"{prefix}attn_{part}.weight"] for part in "qkv"]
                found[f"{prefix}attn_qkv.weight"] = np.concatenate(parts)
            elif rest not in ("k.weight", "v.weight"):
                found[name.replace("post_attention_norm", "ffn_norm")] = value
        return found

    def add_routing(self, writer: gguf.GGUFWriter) -> None:
        super().add_routing(writer)
        writer.add_expert_shared_feed_forward_length(self.ff)

    def hf_options(self) -> dict[str, Any]:
        return super().hf_options() | {
            "intermediate_size": self.dense_ff,
            "first_k_dense_replace": self.dense_layers,
            "use_qk_norm": True,
            "num_mtp_layers": 0,
        }


MODELS = (
    BailingMoe2("bailingmoe2_odd", 96, 3, 3, 1, 32, 32, experts=12, top_k=3, n_groups=4,
                n_groups_used=2, scale=2.5, shared=2),
    BailingMoe2("bailingmoe2_top1", 64, 2, 2, 2, 32, 32, experts=5, top_k=1, dense_layers=0,
                rope={"rope_theta": 6e5}),
)  # fmt: skip
