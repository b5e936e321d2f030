"""Write a GGUF model of real shape with random weights, for benchmarks and memory tests.

    python tools/make_synthetic_model.py olmoe-1b-7b --layers 4 --out olmoe-4.gguf
    python tools/make_synthetic_model.py qwen3-30b-a3b --types q8_0 --out big.gguf

Every preset is written as architecture qwen3moe, whatever model it takes its shape from.  Matrices
have mean 0 and variance 1 / columns, so that activations stay near 1; one tensor is in memory at a
time.  The vocabulary tokenizes any text.  The same arguments give the same bytes.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import string
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vkmoe.gguf_file.header import TensorInfo
from vkmoe.gguf_file.writing import MetadataValue, describe_tensor, write_gguf
from vkmoe.quants.random_blocks import random_weights

ARCHITECTURE = "qwen3moe"
NORMAL_TOKEN, CONTROL_TOKEN = 1, 3
END_OF_TEXT = "<|endoftext|>"
ROUTER_GAIN = 2.0  # router logits spread this far: clear favourites, different for every token


@dataclass(frozen=True)
class ModelShape:
    """The numbers that decide a model's size and speed."""

    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_size: int
    n_experts: int
    n_experts_used: int
    expert_size: int
    n_tokens: int
    context: int
    rope_base: float


PRESETS = {
    "tiny": ModelShape(2, 256, 4, 2, 64, 8, 2, 256, 1024, 512, 1e4),
    "olmoe-1b-7b": ModelShape(16, 2048, 16, 16, 128, 64, 8, 1024, 50304, 4096, 1e4),
    "qwen3-30b-a3b": ModelShape(48, 2048, 32, 4, 128, 128, 8, 768, 151936, 40960, 1e6),
    "mixtral-8x7b": ModelShape(32, 4096, 32, 8, 128, 8, 2, 14336, 32000, 32768, 1e6),
}

# The type of most matrices, and of those that deserve more bits; file_type is a label only.
MIXES = {
    "q4_k_m": ("Q4_K", "Q6_K", 15),
    "q5_k_m": ("Q5_K", "Q6_K", 17),
    "q6_k": ("Q6_K", "Q6_K", 18),
    "q8_0": ("Q8_0", "Q8_0", 7),
    "f16": ("F16", "F16", 1),
    "bf16": ("BF16", "BF16", 32),
    "f32": ("F32", "F32", 0),
}
MORE_BITS = ("ffn_down_exps", "attn_v", "output")


def byte_tokens() -> list[str]:
    """The 256 characters byte-level BPE writes bytes as, in the order of the bytes.

    Printable Latin-1 stands for itself; the other bytes take characters from 256 on.
    """
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = itertools.count(256)
    return [chr(byte) if byte in plain else chr(next(spare)) for byte in range(256)]


def merge_rules() -> Iterator[tuple[str, str]]:
    """Endless enough: letter pairs, then a space before a letter, triples, fours."""
    letters = string.ascii_lowercase
    space = byte_tokens()[ord(" ")]
    pairs = [a + b for a in letters for b in letters]
    yield from itertools.product(letters, letters)
    yield from ((space, letter) for letter in letters)
    yield from itertools.product(pairs, letters)
    yield from itertools.product(pairs, pairs)


def vocabulary(n_tokens: int) -> tuple[list[str], list[str]]:
    """`n_tokens` tokens and the merges that reach them: bytes, merged letters, end of text last."""
    merges = list(itertools.islice(merge_rules(), n_tokens - 257))
    tokens = [*byte_tokens(), *(left + right for left, right in merges), END_OF_TEXT]
    return tokens, [f"{left} {right}" for left, right in merges]


def tensor_list(shape: ModelShape, mix: str) -> list[TensorInfo]:
    """Every tensor of the model, in file order."""
    most, more_bits, _ = MIXES[mix]
    q_size, kv_size = shape.n_heads * shape.head_size, shape.n_kv_heads * shape.head_size
    expert_in = (shape.n_experts, shape.expert_size, shape.hidden)
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (shape.hidden,),
        "attn_q.weight": (q_size, shape.hidden),
        "attn_k.weight": (kv_size, shape.hidden),
        "attn_v.weight": (kv_size, shape.hidden),
        "attn_output.weight": (shape.hidden, q_size),
        "attn_q_norm.weight": (shape.head_size,),
        "attn_k_norm.weight": (shape.head_size,),
        "ffn_norm.weight": (shape.hidden,),
        "ffn_gate_inp.weight": (shape.n_experts, shape.hidden),
        "ffn_gate_exps.weight": expert_in,
        "ffn_up_exps.weight": expert_in,
        "ffn_down_exps.weight": (shape.n_experts, shape.hidden, shape.expert_size),
    }
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (shape.n_tokens, shape.hidden)}
    for index in range(shape.n_layers):
        shapes |= {f"blk.{index}.{name}": size for name, size in layer.items()}
    shapes |= {"output_norm.weight": (shape.hidden,)}
    shapes |= {"output.weight": (shape.n_tokens, shape.hidden)}

    def choose(name: str, size: tuple[int, ...]) -> str:
        if len(size) == 1 or "ffn_gate_inp" in name:
            return "F32"
        return more_bits if name.split(".")[-2] in MORE_BITS else most

    return [describe_tensor(name, choose(name, size), size) for name, size in shapes.items()]


def model_metadata(name: str, shape: ModelShape, mix: str) -> dict[str, MetadataValue]:
    """Hyperparameters and vocabulary."""
    tokens, merges = vocabulary(shape.n_tokens)
    end = shape.n_tokens - 1
    hyperparameters: dict[str, MetadataValue] = {
        "block_count": shape.n_layers,
        "context_length": shape.context,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.expert_size,
        "expert_feed_forward_length": shape.expert_size,
        "expert_count": shape.n_experts,
        "expert_used_count": shape.n_experts_used,
        "attention.head_count": shape.n_heads,
        "attention.head_count_kv": shape.n_kv_heads,
        "attention.key_length": shape.head_size,
        "attention.value_length": shape.head_size,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": shape.rope_base,
    }
    return {
        "general.architecture": ARCHITECTURE,
        "general.type": "model",
        "general.name": f"synthetic {name}",
        "general.file_type": MIXES[mix][2],
        "general.quantization_version": 2,
        **{f"{ARCHITECTURE}.{key}": value for key, value in hyperparameters.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL_TOKEN] * end + [CONTROL_TOKEN],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": end,
        "tokenizer.ggml.eos_token_id": end,
        "tokenizer.ggml.add_bos_token": False,
    }


def random_tensor(tensor: TensorInfo, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Norm gains near 1, a router with clear favourites, matrices of variance 1 / columns."""
    columns = tensor.shape[-1]
    if len(tensor.shape) == 1:
        gains = 1 + 0.1 * rng.standard_normal(columns, np.float32)
        return gains.astype(np.float32).view(np.uint8)
    gain = ROUTER_GAIN if "ffn_gate_inp" in tensor.name else 1.0
    n_rows = tensor.n_weights // columns
    return random_weights(tensor.type, n_rows, columns, rng, gain / columns**0.5)


def make(name: str, out: Path, n_layers: int | None, mix: str, seed: int) -> None:
    """Write preset `name` with `n_layers` layers (default: all) to `out`."""
    shape = PRESETS[name]
    if n_layers is not None:
        shape = replace(shape, n_layers=n_layers)
    tensors = tensor_list(shape, mix)
    n_bytes = sum(tensor.n_bytes for tensor in tensors)
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if n_bytes > free:
        raise SystemExit(f"{out}: needs {n_bytes / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB")
    rng = np.random.default_rng(seed)
    write_gguf(
        out, model_metadata(name, shape, mix), tensors, lambda tensor: random_tensor(tensor, rng)
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("preset", choices=sorted(PRESETS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, help="number of layers (default: the model's own)")
    parser.add_argument("--types", default="q4_k_m", choices=sorted(MIXES), help="default: q4_k_m")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.layers is not None and options.layers < 1:
        parser.error("--layers must be at least 1")
    make(options.preset, options.out, options.layers, options.types, options.seed)
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
