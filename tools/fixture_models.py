"""The tiny random models of the fixtures: shapes, vocabulary, weights and their GGUF files.

Owns: which models there are (MODELS), how their weights are drawn and how the file is written.
Does not own what they must compute: that is make_fixtures.py, with transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

_MERGES = """
Ġ t|Ġ a|i n|h e|r e|o n|Ġt he|e r|Ġ s|a t|Ġ o|e n|Ġ c|i t|i s|a n|o r|e s|Ġ b|e d|Ġ f|in g|Ġ p|o u
Ġa n|a l|a r|Ġt o|Ġ m|Ġo f|Ġ in|Ġ d|Ġ h|Ġan d|i c|l e|a s|Ġ re|s e|l f|se lf|Ċ Ġ
"""
MERGES = tuple(pair for line in _MERGES.split("\n") for pair in line.split("|") if pair)


@dataclass(frozen=True)
class TinyModel:
    """One fixture: what is written into the file and given to transformers."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ff: int
    """Width of one expert, or of the feed-forward block of a dense model."""
    experts: int = 0
    top_k: int = 0
    tied: bool = True
    norm_top_k: bool = True
    rope_theta: float = 10000.0
    rope_scaling: str = ""
    rope_factor: float = 1.0
    context: int = 128
    eps: float = 1e-6

    @property
    def architecture(self) -> str:
        return "qwen3moe" if self.experts else "qwen3"


# Row lengths (hidden, heads * head_dim, ff) are multiples of 32; row counts need not be.
MODELS = (
    TinyModel("moe_plain", 64, 2, 4, 2, 32, 32, experts=8, top_k=2),
    TinyModel("moe_odd", 32, 2, 3, 1, 64, 32, experts=6, top_k=3, tied=False, rope_theta=1e6,
              eps=1e-3),
    TinyModel("dense_tied", 32, 2, 8, 2, 32, 64),
    TinyModel("moe_yarn_top1", 32, 2, 2, 1, 32, 32, experts=4, top_k=1, rope_scaling="yarn",
              rope_factor=4.0),
    TinyModel("moe_all_experts", 32, 2, 2, 1, 32, 32, experts=5, top_k=5),
    TinyModel("moe_unnormalised", 32, 1, 2, 2, 32, 32, experts=4, top_k=2, norm_top_k=False),
    TinyModel("dense_linear", 32, 1, 2, 1, 32, 32, rope_scaling="linear", rope_factor=4.0),
)  # fmt: skip


def byte_tokens() -> list[str]:
    """The 256 printable stand-ins of byte-level BPE, by byte value (GPT-2's published rule)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def vocabulary() -> list[str]:
    """`<|endoftext|>`, the bytes, one token per merge and one control token at the end."""
    merged = [merge.replace(" ", "") for merge in MERGES]
    return ["<|endoftext|>", *byte_tokens(), *merged, "<|end|>"]


def draw_weights(model: TinyModel, seed: int) -> dict[str, NDArray[np.float32]]:
    """Random tensors under their GGUF names; scales keep activations near one, logits wide."""
    rng = np.random.default_rng(seed)

    def matrix(*shape: int, gain: float = 1.4) -> NDArray[np.float32]:
        scale = np.float32(gain / np.sqrt(shape[-1]))
        return rng.standard_normal(shape, dtype=np.float32) * scale

    def norm(width: int) -> NDArray[np.float32]:
        return rng.random(width, dtype=np.float32) * np.float32(1.2) + np.float32(0.4)

    hidden, n_vocab = model.hidden, len(vocabulary())
    q_width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    weights = {
        "token_embd.weight": matrix(n_vocab, hidden, gain=0.8 * float(np.sqrt(hidden))),
        "output_norm.weight": norm(hidden),
    }
    if not model.tied:
        weights["output.weight"] = matrix(n_vocab, hidden, gain=4.0)
    for layer in range(model.layers):
        block = {
            "attn_norm": norm(hidden),
            "attn_q": matrix(q_width, hidden),
            "attn_k": matrix(kv_width, hidden),
            "attn_v": matrix(kv_width, hidden),
            "attn_output": matrix(hidden, q_width),
            "attn_q_norm": norm(model.head_dim),
            "attn_k_norm": norm(model.head_dim),
            "ffn_norm": norm(hidden),
        }
        if model.experts:
            block["ffn_gate_inp"] = matrix(model.experts, hidden)
            block["ffn_gate_exps"] = matrix(model.experts, model.ff, hidden)
            block["ffn_up_exps"] = matrix(model.experts, model.ff, hidden)
            block["ffn_down_exps"] = matrix(model.experts, hidden, model.ff, gain=2.0)
        else:
            block["ffn_gate"] = matrix(model.ff, hidden)
            block["ffn_up"] = matrix(model.ff, hidden)
            block["ffn_down"] = matrix(hidden, model.ff, gain=2.0)
        weights |= {f"blk.{layer}.{key}.weight": value for key, value in block.items()}
    return weights


def write_gguf(path: Path, model: TinyModel, weights: dict[str, NDArray[np.float32]]) -> None:
    """Write the model with the metadata a converter would give it, and its small vocabulary."""
    writer = gguf.GGUFWriter(path, model.architecture)
    writer.add_name(model.name)
    writer.add_block_count(model.layers)
    writer.add_context_length(model.context)
    writer.add_embedding_length(model.hidden)
    writer.add_feed_forward_length(model.ff)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_layer_norm_rms_eps(model.eps)
    writer.add_rope_freq_base(model.rope_theta)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    if model.experts:
        writer.add_expert_count(model.experts)
        writer.add_expert_used_count(model.top_k)
        writer.add_expert_feed_forward_length(model.ff)
        writer.add_expert_weights_norm(model.norm_top_k)
    if model.rope_scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(model.rope_scaling))
        writer.add_rope_scaling_factor(model.rope_factor)
    if model.rope_scaling == "yarn":
        writer.add_rope_scaling_orig_ctx_len(int(model.context / model.rope_factor))
    add_vocabulary(writer)
    for name, value in weights.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(writer: gguf.GGUFWriter) -> None:
    """Add the `tokenizer.ggml.*` keys of the small byte-level BPE."""
    tokens = vocabulary()
    control = {tokens[0], tokens[-1]}
    types = [gguf.TokenType.CONTROL if t in control else gguf.TokenType.NORMAL for t in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(True)
