"""Turn the demo model (Hugging Face layout, Qwen3MoeForCausalLM) into the GGUF shipped as default.

    python -m tools.make_demo_model                        # -> vkmoe/data/demo.gguf, mixed types
    python -m tools.make_demo_model --type F32 --out demo-f32.gguf

Owns the choice of types.  The same input gives the same bytes.  The model was trained once, on the
standard library of CPython 3.11, by a program that the history of this repository has
(tools/train_demo_model.py).
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tools.gguf_writer import MetadataValue, describe_tensor, write_gguf
from tools.hf_names import LAYER_NAMES
from tools.quantise import quantise
from vkmoe.gguf_file.header import TensorInfo
from vkmoe.quants import decode

Floats = npt.NDArray[np.float32]
TypeChoice = Callable[[str, int], str]

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURE = "qwen3moe"
NORMAL_TOKEN, CONTROL_TOKEN = 1, 3
# The numbers other programs know mixtures by: all F32, and "mostly Q4_K, medium".
FILE_TYPE_F32, FILE_TYPE_Q4_K_M = 0, 15

DENSE = ("ffn_gate", "ffn_up", "ffn_down")  # that no layer of this model has
EXPERT_NAMES = {f"ffn_{part}_exps": f"{part}_proj" for part in ("gate", "up", "down")}

# The model knows no turns, only code: a conversation is one text that both write in turn.
CHAT_TEMPLATE = """{{ bos_token }}{% for message in messages %}{{ message.content }}
{% endfor %}"""


def read_safetensors(path: Path) -> dict[str, Floats]:
    """All tensors of a bf16 or f32 safetensors file as float32."""
    raw = path.read_bytes()
    (head_bytes,) = struct.unpack_from("<Q", raw)
    head = json.loads(raw[8 : 8 + head_bytes])
    head.pop("__metadata__", None)
    tensors = {}
    for name, entry in head.items():
        start, end = entry["data_offsets"]
        piece = raw[8 + head_bytes + start : 8 + head_bytes + end]
        if entry["dtype"] == "BF16":
            values = decode("BF16", np.frombuffer(piece, np.uint8), len(piece) // 2)
        elif entry["dtype"] == "F32":
            values = np.frombuffer(piece, "<f4")
        else:
            raise SystemExit(f"{path}: tensor {name} is {entry['dtype']}, expected BF16 or F32")
        tensors[name] = values.reshape(entry["shape"])
    return tensors


def gguf_tensors(source: dict[str, Floats], n_layers: int, n_experts: int) -> dict[str, Floats]:
    """The tensors under their GGUF names, experts of a layer stacked: [experts, rows, columns]."""
    tensors = {
        "token_embd.weight": source["model.embed_tokens.weight"],
        "output_norm.weight": source["model.norm.weight"],
    }
    for layer in range(n_layers):
        ours, theirs = f"blk.{layer}", f"model.layers.{layer}"
        for name, source_name in LAYER_NAMES.items():
            if name not in DENSE:
                tensors[f"{ours}.{name}.weight"] = source[f"{theirs}.{source_name}.weight"]
        for name, source_name in EXPERT_NAMES.items():
            tensors[f"{ours}.{name}.weight"] = np.stack(
                [
                    source[f"{theirs}.mlp.experts.{expert}.{source_name}.weight"]
                    for expert in range(n_experts)
                ]
            )
    return tensors


def mixed_type(name: str, n_dimensions: int) -> str:
    """The shipped mixture: most bits where every token passes, and in what feeds the residual.

    Norms and the router stay F32.  The down projections alternate between Q6_K and Q5_K by layer.
    """
    parts = name.split(".")
    role = parts[2] if parts[0] == "blk" else parts[0]
    if n_dimensions == 1 or role == "ffn_gate_inp":
        return "F32"
    if role == "ffn_down_exps":
        return "Q6_K" if int(parts[1]) % 2 == 0 else "Q5_K"
    return {
        "token_embd": "Q8_0",
        "attn_v": "Q6_K",
        "attn_output": "Q6_K",
        "attn_q": "Q5_K",
        "attn_k": "Q5_K",
        "ffn_gate_exps": "Q4_K",
        "ffn_up_exps": "Q4_K",
    }[role]


def uniform_type(type_name: str) -> TypeChoice:
    """All matrices of one type; norms and the router stay F32."""

    def choose(name: str, n_dimensions: int) -> str:
        return "F32" if n_dimensions == 1 or "ffn_gate_inp" in name else type_name

    return choose


def model_metadata(config: dict[str, Any]) -> dict[str, MetadataValue]:
    """Hyperparameters under the keys of the architecture."""
    values: dict[str, MetadataValue] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_count": config["num_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_theta"]),
    }
    return {f"{ARCHITECTURE}.{key}": value for key, value in values.items()}


def tokenizer_metadata(
    tokenizer: dict[str, Any], config: dict[str, Any]
) -> dict[str, MetadataValue]:
    """The vocabulary of a byte-level BPE tokenizer.json with the GPT-2 splitting rule."""
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    if [vocabulary[token] for token in tokens] != list(range(config["vocab_size"])):
        raise SystemExit("tokenizer.json: the vocabulary does not fill vocab_size without gaps")
    special = {added["id"] for added in tokenizer["added_tokens"] if added["special"]}
    merges = [
        pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]
    ]
    kinds = [CONTROL_TOKEN if index in special else NORMAL_TOKEN for index in range(len(tokens))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def make(source: Path, out: Path, type_name: str) -> None:
    """Convert the model in directory `source` to the GGUF file `out`."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    weights = gguf_tensors(
        read_safetensors(source / "model.safetensors"),
        config["num_hidden_layers"],
        config["num_experts"],
    )
    choose = mixed_type if type_name == "mixed" else uniform_type(type_name)
    tensors = [
        describe_tensor(name, choose(name, values.ndim), values.shape)
        for name, values in weights.items()
    ]
    metadata: dict[str, MetadataValue] = {
        "general.architecture": ARCHITECTURE,
        "general.type": "model",
        "general.name": "vkmoe demo: Python code",
        "general.license": "psf-2.0",
        "general.file_type": FILE_TYPE_F32 if type_name == "F32" else FILE_TYPE_Q4_K_M,
        "general.quantization_version": 2,
        **model_metadata(config),
        **tokenizer_metadata(tokenizer, config),
    }

    def data(tensor: TensorInfo) -> npt.NDArray[np.uint8]:
        return quantise(tensor.type, weights[tensor.name])

    out.parent.mkdir(parents=True, exist_ok=True)
    write_gguf(out, metadata, tensors, data)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", nargs="?", type=Path, default=ROOT.parent / "shared" / "demo")
    parser.add_argument("--out", type=Path, default=ROOT / "vkmoe" / "data" / "demo.gguf")
    parser.add_argument(
        "--type",
        default="mixed",
        choices=["mixed", "F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K", "Q4_K"],
        help="type of all matrices (default: the shipped mixture)",
    )
    options = parser.parse_args()
    make(options.source, options.out, options.type)
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
