"""Models whose tensors have types of old files, and models with a tensor for each expert."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.engine.tiny import Change, Tensor, retyped, rewrite
from vkmoe.llm import demo_model_path
from vkmoe.quants import TYPES, decode

Tensors = dict[str, Tensor]

# Types of a tiny model's tensors by what their names end with: blocks of 32 weights.
UNEVEN = {
    "token_embd.weight": "Q5_0",
    "attn_q.weight": "Q5_1",
    "attn_output.weight": "Q4_1",
    "ffn_gate_exps.weight": "Q5_0",
    "ffn_up_exps.weight": "Q5_1",
    "ffn_down_exps.weight": "Q4_1",
}
# Types with blocks of 256, for the demo model: of gate, up and down in one layer after the other.
NOISY = (
    ("IQ2_XXS", "IQ2_XS", "IQ3_S"),
    ("IQ2_S", "IQ1_S", "IQ1_M"),
    ("IQ3_XXS", "TQ1_0", "TQ2_0"),
)


def of_types(types: Mapping[str, str]) -> Change:
    """Quantise tensors, by what their names end with."""

    def change(metadata: dict[str, Any], tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            kind = next((kind for end, kind in types.items() if name.endswith(end)), None)
            if kind is not None:
                tensors[name] = retyped(tensor, kind)

    return change


def one_by_one(metadata: dict[str, Any], tensors: Tensors) -> None:
    """A tensor for each expert, as old files have them."""
    for name in [name for name in tensors if name.endswith("_exps.weight")]:
        stack = tensors.pop(name)
        parts = stack.data.reshape(stack.shape[0], -1)
        for expert, part in enumerate(parts):
            single = name.replace("_exps.weight", f".{expert}.weight")
            tensors[single] = Tensor(stack.type, stack.shape[1:], part)


def noisy_demo(target: Path) -> Path:
    """Three layers of the demo model, with four experts of random blocks: any bits, but scales
    that are numbers.
    """
    rng = np.random.default_rng(4)

    def noise(kind: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        block = TYPES[kind]
        n_weights = int(np.prod(shape))
        blocks = rng.integers(
            0, 256, (n_weights // block.block_weights, block.block_bytes), np.uint8
        )
        values = decode(kind, blocks, n_weights).reshape(len(blocks), -1)
        blocks[~np.isfinite(values).all(axis=1)] = 0
        return blocks.reshape(-1)

    def change(metadata: dict[str, Any], tensors: Tensors) -> None:
        metadata["qwen3moe.block_count"] = len(NOISY)
        metadata["qwen3moe.expert_count"] = 4
        for name in list(tensors):
            layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
            if layer >= len(NOISY):
                del tensors[name]
            elif "ffn_gate_inp" in name:
                n_columns = tensors[name].shape[1]
                tensors[name] = Tensor("F32", (4, n_columns), tensors[name].data[: 16 * n_columns])
            elif name.endswith("_exps.weight"):
                matrix = name.split("ffn_")[1].split("_")[0]
                kind = NOISY[layer][("gate", "up", "down").index(matrix)]
                shape = (4, *tensors[name].shape[1:])
                tensors[name] = Tensor(kind, shape, noise(kind, shape))

    return rewrite(demo_model_path(), target, change)
