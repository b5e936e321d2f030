"""The demo model as a torch network: Qwen3-MoE, written for training on a processor.

Owns the architecture and the export to the Hugging Face layout that make_demo_model.py reads.
Does not train (train_demo_model.py).  Needs torch, which vkmoe itself does not.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]
import torch.nn.functional as F  # type: ignore[import-not-found]
from torch import Tensor, nn


@dataclass(frozen=True)
class DemoShape:
    """The sizes of the shipped model."""

    n_tokens: int = 4096
    hidden: int = 256
    n_layers: int = 6
    n_heads: int = 4
    n_kv_heads: int = 2
    head_size: int = 64
    n_experts: int = 32
    n_experts_used: int = 4
    expert_size: int = 256
    rope_base: float = 10000.0
    norm_epsilon: float = 1e-6
    # An expert computes at most this multiple of its fair share of a batch; the rest is dropped.
    expert_capacity: float = 1.6


class RmsNorm(nn.Module):  # type: ignore[misc]
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.epsilon)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding of [..., tokens, head_size]; the two halves are the pairs."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cosine - b * sine, b * cosine + a * sine), -1)


class Attention(nn.Module):  # type: ignore[misc]
    """Causal attention with grouped heads and a norm on every query and key."""

    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        q_size, kv_size = shape.n_heads * shape.head_size, shape.n_kv_heads * shape.head_size
        self.q_proj = nn.Linear(shape.hidden, q_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, shape.hidden, bias=False)
        self.q_norm = RmsNorm(shape.head_size, shape.norm_epsilon)
        self.k_norm = RmsNorm(shape.head_size, shape.norm_epsilon)
        self.shape = shape

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, n_tokens, _ = x.shape
        heads = (batch, n_tokens, -1, self.shape.head_size)
        query = rotate(self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2), cosine, sine)
        key = rotate(self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2), cosine, sine)
        value = self.v_proj(x).view(heads).transpose(1, 2)
        group = self.shape.n_heads // self.shape.n_kv_heads
        mixed = F.scaled_dot_product_attention(
            query,
            key.repeat_interleave(group, 1),
            value.repeat_interleave(group, 1),
            is_causal=True,
        )
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, n_tokens, -1))


class Experts(nn.Module):  # type: ignore[misc]
    """Router, top-k with renormalised weights, and gated experts as three stacked matrices.

    Every forward pass leaves `balance` (1 when all experts are used alike) and `dropped` behind.
    """

    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        n, hidden, size = shape.n_experts, shape.hidden, shape.expert_size
        depth = math.sqrt(2 * shape.n_layers)
        self.gate = nn.Linear(hidden, n, bias=False)
        self.w1 = nn.Parameter(torch.randn(n, size, hidden) * 0.02)  # gate
        self.w3 = nn.Parameter(torch.randn(n, size, hidden) * 0.02)  # up
        self.w2 = nn.Parameter(torch.randn(n, hidden, size) * 0.02 / depth)  # down
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        batch, n_tokens, hidden = x.shape
        x = x.reshape(-1, hidden)
        chances = F.softmax(self.gate(x).float(), -1)
        weights, chosen = chances.topk(self.shape.n_experts_used, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        uses = chosen.reshape(-1)  # [tokens * used]
        use, place, capacity, counts = self._places(uses)
        token = use // self.shape.n_experts_used
        y = self._compute(x, token, place, capacity)
        y = y * weights.reshape(-1)[use][:, None]
        self.balance = (
            self.shape.n_experts * ((counts.float() / uses.numel()) * chances.mean(0)).sum()
        )
        self.dropped = 1 - len(use) / uses.numel()
        return torch.zeros_like(x).index_add(0, token, y).view(batch, n_tokens, hidden)

    def _places(self, uses: Tensor) -> tuple[Tensor, Tensor, int, Tensor]:
        """Which uses are computed, and where: expert * capacity + position in its queue."""
        order = uses.argsort(stable=True)
        counts = torch.bincount(uses, minlength=self.shape.n_experts)
        capacity = int(self.shape.expert_capacity * uses.numel() / self.shape.n_experts)
        first = (counts.cumsum(0) - counts)[uses[order]]
        position = torch.arange(uses.numel(), device=uses.device) - first
        kept = position < capacity
        use = order[kept]
        return use, uses[use] * capacity + position[kept], capacity, counts

    def _compute(self, x: Tensor, token: Tensor, place: Tensor, capacity: int) -> Tensor:
        """Each expert on its queue of tokens, padded to `capacity`: a batched matmul per matrix."""
        n, hidden = self.shape.n_experts, x.shape[1]
        queues = x.new_zeros(n * capacity, hidden).index_copy(0, place, x[token])
        queues = queues.view(n, capacity, hidden)
        gate = F.silu(torch.bmm(queues, self.w1.to(x.dtype).transpose(1, 2)))
        inner = gate * torch.bmm(queues, self.w3.to(x.dtype).transpose(1, 2))
        y = torch.bmm(inner, self.w2.to(x.dtype).transpose(1, 2))
        return y.view(n * capacity, hidden)[place]


class Block(nn.Module):  # type: ignore[misc]
    """One layer: attention and experts, each on the normed residual stream."""

    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(shape.hidden, shape.norm_epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RmsNorm(shape.hidden, shape.norm_epsilon)
        self.mlp = Experts(shape)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cosine, sine)
        return x + self.mlp(self.post_attention_layernorm(x))


class DemoNetwork(nn.Module):  # type: ignore[misc]
    """Token ids [batch, tokens] to logits [batch, tokens, n_tokens]; the embedding is tied."""

    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.n_tokens, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.n_layers))
        self.norm = RmsNorm(shape.hidden, shape.norm_epsilon)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        half = torch.arange(0, self.shape.head_size, 2, device=tokens.device).float()
        frequency = 1.0 / (self.shape.rope_base ** (half / self.shape.head_size))
        positions = torch.arange(tokens.shape[1], device=tokens.device).float()
        angle = torch.outer(positions, frequency)
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, angle.cos(), angle.sin())
        return F.linear(self.norm(x), self.embed_tokens.weight)

    def total_balance(self) -> Tensor:
        """The balancing loss of the last forward pass, summed over layers."""
        return sum(layer.mlp.balance for layer in self.layers)


def hugging_face_tensors(network: DemoNetwork) -> dict[str, Tensor]:
    """The weights under the names of Qwen3MoeForCausalLM, experts apart."""
    renamed = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    tensors: dict[str, Tensor] = {}
    for name, value in network.state_dict().items():
        stem, _, last = name.rpartition(".")
        if last in renamed:
            for expert, matrix in enumerate(value):
                tensors[f"model.{stem}.experts.{expert}.{renamed[last]}.weight"] = matrix
        else:
            tensors[f"model.{name}"] = value
    return dict(sorted(tensors.items()))


def export(network: DemoNetwork, tokenizer: Path, context: int, folder: Path) -> None:
    """Write model.safetensors (bf16), config.json and tokenizer.json to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    pieces, at = [], 0
    for name, value in hugging_face_tensors(network).items():
        raw = value.detach().cpu().to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
        end = at + raw.nbytes
        head[name] = {"dtype": "BF16", "shape": list(value.shape), "data_offsets": [at, end]}
        pieces.append(raw.tobytes())
        at = end
    encoded = json.dumps(head).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(folder / "model.safetensors", "wb") as stream:
        stream.write(struct.pack("<Q", len(encoded)) + encoded)
        stream.writelines(pieces)
    config = json.dumps(hugging_face_config(network.shape, context), indent=1)
    (folder / "config.json").write_text(config + "\n", encoding="utf-8")
    shutil.copyfile(tokenizer, folder / "tokenizer.json")


def hugging_face_config(shape: DemoShape, context: int) -> dict[str, Any]:
    """config.json of the model."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.expert_size,
        "moe_intermediate_size": shape.expert_size,
        "num_experts": shape.n_experts,
        "num_experts_per_tok": shape.n_experts_used,
        "norm_topk_prob": True,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_size,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_theta": shape.rope_base,
        "vocab_size": shape.n_tokens,
        "max_position_embeddings": context,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }
