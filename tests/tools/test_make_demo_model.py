"""The demo model's conversion, on a small model made here and on the file that is shipped."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import tools.make_demo_model as tool
from tools.quantise import quantise
from vkmoe.gguf_file import open_gguf
from vkmoe.quants import decode

Floats = npt.NDArray[np.float32]

SHIPPED = tool.ROOT / "vkmoe" / "data" / "demo.gguf"
N_LAYERS, N_EXPERTS, N_TOKENS = 2, 3, 260
CONFIG = {
    "num_hidden_layers": N_LAYERS, "num_experts": N_EXPERTS, "vocab_size": N_TOKENS,
    "max_position_embeddings": 64, "hidden_size": 256, "intermediate_size": 512,
    "moe_intermediate_size": 256, "num_experts_per_tok": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 5000.0,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def source_weights() -> dict[str, Floats]:
    """Random weights that bf16 holds exactly, under their Hugging Face names."""
    rng = np.random.default_rng(4)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (N_TOKENS, 256),
        "model.norm": (256,),
    }
    for layer in range(N_LAYERS):
        stem = f"model.layers.{layer}"
        shapes |= {f"{stem}.self_attn.{name}_proj": (256 if name in "qo" else 128, 256)
                   for name in "qkvo"}  # fmt: skip
        shapes |= {f"{stem}.self_attn.{name}_norm": (64,) for name in "qk"}
        shapes |= {f"{stem}.input_layernorm": (256,), f"{stem}.post_attention_layernorm": (256,)}
        shapes |= {f"{stem}.mlp.gate": (N_EXPERTS, 256)}
        for expert in range(N_EXPERTS):
            for name in ("gate_proj", "up_proj", "down_proj"):
                shapes[f"{stem}.mlp.experts.{expert}.{name}"] = (256, 256)
    weights = {}
    for name, shape in shapes.items():
        exact = rng.standard_normal(shape, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
        weights[f"{name}.weight"] = exact.view(np.float32)
    return weights


def write_safetensors(path: Path, weights: dict[str, Floats]) -> None:
    head: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, values in weights.items():
        raw = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
        ends = [len(data), len(data) + len(raw)]
        head[name] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": ends}
        data += raw
    encoded = json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    write_safetensors(folder / "model.safetensors", source_weights())
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    tokens = ["<start>", "<end>", *(f"t{index}" for index in range(N_TOKENS - 2))]
    tokenizer = {
        "added_tokens": [{"id": 0, "special": True}, {"id": 1, "special": True}],
        "model": {"vocab": {token: at for at, token in enumerate(tokens)},
                  "merges": [["t", "0"], "t 1"]},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder


def test_every_weight_arrives_in_f32(source: Path, tmp_path: Path) -> None:
    tool.make(source, tmp_path / "f32.gguf", "F32")
    weights = source_weights()
    n_seen = 0
    with open_gguf(tmp_path / "f32.gguf") as file:
        assert "output.weight" not in file.tensors
        for ours, theirs in [
            ("token_embd", "embed_tokens"), ("output_norm", "norm"),
            ("blk.1.attn_q", "layers.1.self_attn.q_proj"),
            ("blk.1.attn_k", "layers.1.self_attn.k_proj"),
            ("blk.0.attn_v", "layers.0.self_attn.v_proj"),
            ("blk.0.attn_output", "layers.0.self_attn.o_proj"),
            ("blk.1.attn_q_norm", "layers.1.self_attn.q_norm"),
            ("blk.1.attn_k_norm", "layers.1.self_attn.k_norm"),
            ("blk.0.attn_norm", "layers.0.input_layernorm"),
            ("blk.0.ffn_norm", "layers.0.post_attention_layernorm"),
            ("blk.1.ffn_gate_inp", "layers.1.mlp.gate"),
        ]:  # fmt: skip
            tensor = file.tensors[f"{ours}.weight"]
            expected = weights[f"model.{theirs}.weight"]
            assert tensor.type == "F32" and tensor.shape == expected.shape
            assert file.data(tensor.name).tobytes() == expected.tobytes()
            n_seen += 1
        for role in ("gate", "up", "down"):
            tensor = file.tensors[f"blk.1.ffn_{role}_exps.weight"]
            assert tensor.shape == (N_EXPERTS, 256, 256)
            found = decode("F32", file.data(tensor.name), tensor.n_weights).reshape(tensor.shape)
            for expert in range(N_EXPERTS):
                name = f"model.layers.1.mlp.experts.{expert}.{role}_proj.weight"
                np.testing.assert_array_equal(found[expert], weights[name])
        assert len(file.tensors) == 2 + 12 * N_LAYERS
    assert n_seen == 11


def test_metadata(source: Path, tmp_path: Path) -> None:
    tool.make(source, tmp_path / "f32.gguf", "F32")
    expected = {
        "general.architecture": "qwen3moe", "general.file_type": 0,
        "qwen3moe.block_count": 2, "qwen3moe.context_length": 64,
        "qwen3moe.embedding_length": 256, "qwen3moe.feed_forward_length": 512,
        "qwen3moe.expert_feed_forward_length": 256, "qwen3moe.expert_count": 3,
        "qwen3moe.expert_used_count": 2, "qwen3moe.attention.head_count": 4,
        "qwen3moe.attention.head_count_kv": 2, "qwen3moe.attention.key_length": 64,
        "qwen3moe.attention.value_length": 64, "qwen3moe.rope.freq_base": 5000.0,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.merges": ["t 0", "t 1"],
    }  # fmt: skip
    with open_gguf(tmp_path / "f32.gguf") as file:
        for key, value in expected.items():
            assert file.metadata[key] == value, key
        epsilon = file.require("qwen3moe.attention.layer_norm_rms_epsilon", float)
        assert epsilon == pytest.approx(1e-5)
        assert file.numbers("tokenizer.ggml.token_type").tolist() == [3, 3] + [1] * 258
        assert file.strings("tokenizer.ggml.tokens")[:3] == ["<start>", "<end>", "t0"]


def test_mixture_is_repeatable_and_holds_quantised_weights(source: Path, tmp_path: Path) -> None:
    for name in ("one.gguf", "two.gguf"):
        tool.make(source, tmp_path / name, "mixed")
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()
    weights = source_weights()
    with open_gguf(tmp_path / "one.gguf") as file:
        types = {name: tensor.type for name, tensor in file.tensors.items()}
        assert set(types.values()) == {"Q4_K", "Q5_K", "Q6_K", "Q8_0", "F32"}
        assert types["blk.0.ffn_down_exps.weight"] == "Q6_K"
        assert types["blk.1.ffn_down_exps.weight"] == "Q5_K"
        expected = quantise("Q4_K", weights["model.layers.1.mlp.experts.2.up_proj.weight"])
        found = file.data("blk.1.ffn_up_exps.weight").reshape(N_EXPERTS, -1)[2]
        np.testing.assert_array_equal(found, expected.reshape(-1))


def test_the_command(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder" / "model.gguf"
    command = [sys.executable, "-m", "tools.make_demo_model", str(source)]
    subprocess.run([*command, "--out", str(out), "--type", "Q8_0"], check=True, cwd=tool.ROOT)
    with open_gguf(out) as file:
        assert file.tensors["blk.0.attn_q.weight"].type == "Q8_0"


def test_a_vocabulary_with_gaps_is_refused(source: Path) -> None:
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    del tokenizer["model"]["vocab"]["t7"]
    with pytest.raises(SystemExit, match="without gaps"):
        tool.tokenizer_metadata(tokenizer, CONFIG)


def test_the_shipped_file() -> None:
    assert SHIPPED.stat().st_size <= 32e6
    with open_gguf(SHIPPED) as file:
        types = {tensor.type for tensor in file.tensors.values()}
        assert types == {"Q4_K", "Q5_K", "Q6_K", "Q8_0", "F32"}
        assert file.require("qwen3moe.expert_count", int) == 32
        assert len(file.strings("tokenizer.ggml.tokens")) == 4096
        assert len(file.tensors) == 2 + 12 * 6


@pytest.mark.shared
def test_the_shipped_file_is_what_the_tool_makes_of_the_source(shared: Path) -> None:
    source = tool.read_safetensors(shared / "demo" / "model.safetensors")
    weights = tool.gguf_tensors(source, 6, 32)
    with open_gguf(SHIPPED) as file:
        assert set(weights) == set(file.tensors)
        for name in ("token_embd.weight", "blk.2.attn_v.weight", "blk.3.attn_q.weight",
                     "blk.5.attn_norm.weight", "blk.0.ffn_gate_inp.weight"):  # fmt: skip
            tensor = file.tensors[name]
            expected = quantise(tensor.type, weights[name])
            np.testing.assert_array_equal(file.data(name), expected.reshape(-1))
