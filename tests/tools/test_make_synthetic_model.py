"""Synthetic models: real shapes, sane weights, a vocabulary that tokenizes, repeatable bytes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import tools.make_synthetic_model as tool
from tools.gguf_writer import describe_tensor
from tools.synthetic.vocabulary import byte_tokens, vocabulary
from vkmoe.gguf_file import open_gguf
from vkmoe.models import ARCHITECTURES, open_model, read_spec
from vkmoe.models.tensors import read_tensors
from vkmoe.quants import decode

TINY = sorted(name for name in tool.PRESETS if name.startswith("tiny"))


@pytest.mark.parametrize("mix", sorted(tool.MIXES))
def test_tensors_of_a_small_model(tmp_path: Path, mix: str) -> None:
    tool.make("tiny", tmp_path / "tiny.gguf", None, mix, 0)
    types = tool.MIXES[mix]
    with open_gguf(tmp_path / "tiny.gguf") as file:
        tensors = file.tensors
        assert len(tensors) == 3 + 12 * 2
        assert tensors["blk.1.ffn_down_exps.weight"].type == (types.experts or types.more_bits)
        assert tensors["blk.1.attn_v.weight"].type == types.more_bits
        few_bits = types.most if types.in_some else types.more_bits
        assert tensors["blk.0.attn_v.weight"].type == few_bits
        assert tensors["blk.1.attn_output.weight"].type == types.most
        assert tensors["output.weight"].type == types.output
        for name, tensor in tensors.items():
            weights = decode(tensor.type, file.data(name), tensor.n_weights)
            if len(tensor.shape) == 1:
                assert tensor.type == "F32" and abs(weights.mean() - 1) < 0.1
                continue
            gain = tool.ROUTER_GAIN if "gate_inp" in name else 1
            assert weights.std() * tensor.shape[-1] ** 0.5 == pytest.approx(gain, rel=0.06)
        up = tensors["blk.0.ffn_up_exps.weight"]
        assert up.type == (types.experts or types.most)
        experts = decode(up.type, file.data(up.name), 8 * 256 * 256)
        assert not np.array_equal(experts[:65536], experts[65536 : 2 * 65536])


# Without experts, or with another order of heads alone; and those that no preset describes yet.
WITHOUT = {"qwen3", "qwen35", "qwen3next"}
LACKING = {
    *("bailingmoe2", "deepseek32", "dots1", "ernie4_5-moe", "glm-dsa", "glm4moe", "hunyuan-moe"),
    *("hy_v3", "minimax-m2", "mistral4"),
}


def test_there_is_a_tiny_model_of_every_architecture_with_experts() -> None:
    found = {tool.PRESETS[name].architecture for name in TINY}
    assert found == set(ARCHITECTURES) - WITHOUT - LACKING


@pytest.mark.parametrize("name", TINY)
def test_the_engine_needs_every_tensor_and_key(tmp_path: Path, name: str) -> None:
    tool.make(name, tmp_path / "tiny.gguf", None, "q4_k_m", 0)
    shape = tool.PRESETS[name]
    with open_gguf(tmp_path / "tiny.gguf") as file:
        spec = read_spec(file)
        assert spec.architecture == shape.architecture and spec.experts is not None
        assert spec.experts.n_used == shape.n_experts_used
        assert spec.experts.shared_width == shape.shared_size
        assert len(read_tensors(file, spec).layers) == 2


def test_gemma_4_has_the_tensors_of_its_real_files() -> None:
    """25.2e9 weights, as published; one layer in six sees everything, with heads of its own."""
    shape = tool.PRESETS["gemma-4-26b-a4b"]
    tensors = {tensor.name: tensor for tensor in tool.tensor_list(shape, "q4_k_m")}
    assert sum(tensor.n_weights for tensor in tensors.values()) == pytest.approx(25.2e9, rel=0.002)
    assert tensors["blk.4.attn_v.weight"].shape == (8 * 256, 2816)
    assert tensors["blk.5.attn_k.weight"].shape == (2 * 512, 2816)
    assert {name for name in tensors if "attn_v." in name} == {
        f"blk.{layer}.attn_v.weight" for layer in range(30) if layer % 6 != 5
    }
    assert tensors["blk.29.ffn_gate_up_exps.weight"].shape == (128, 2 * 704, 2816)
    assert tensors["token_embd.weight"].type == "Q6_K" and "output.weight" not in tensors


def test_rows_that_are_no_multiple_of_a_block_take_smaller_blocks() -> None:
    tensors = tool.tensor_list(tool.PRESETS["deepseek-v2-lite"], "q4_k_m")
    types = {tensor.name: tensor.type for tensor in tensors}
    assert types["blk.1.ffn_gate_exps.weight"] == "Q4_K"
    assert types["blk.1.ffn_down_exps.weight"] == "Q8_0"  # rows of 1408


def test_mxfp4_is_for_experts() -> None:
    tensors = tool.tensor_list(tool.PRESETS["gpt-oss-20b"], "mxfp4")
    types = {tensor.name.split(".", 2)[-1]: tensor.type for tensor in tensors}
    found = {name for name, kind in types.items() if kind == "MXFP4"}
    assert found == {f"ffn_{part}_exps.weight" for part in ("gate", "up", "down")}
    assert types["attn_q.weight"] == "Q8_0" and types["ffn_gate_exps.bias"] == "F32"


@pytest.mark.parametrize(("name", "n_weights", "experts"), [
    ("olmoe-1b-7b", 6.92e9, (64, 1024, 2048)),
    ("qwen3-30b-a3b", 30.5e9, (128, 768, 2048)),
    ("mixtral-8x7b", 46.7e9, (8, 14336, 4096)),
    ("qwen1.5-moe-a2.7b", 14.3e9, (60, 1408, 2048)),
    ("gpt-oss-20b", 20.9e9, (32, 2880, 2880)),
    ("gpt-oss-120b", 116.8e9, (128, 2880, 2880)),
    ("deepseek-v2-lite", 15.7e9, (64, 1408, 2048)),
])  # fmt: skip
def test_shapes_of_the_real_models(name: str, n_weights: float, experts: tuple[int, ...]) -> None:
    shape = tool.PRESETS[name]
    tensors = {tensor.name: tensor for tensor in tool.tensor_list(shape, "q4_k_m")}
    assert sum(tensor.n_weights for tensor in tensors.values()) == pytest.approx(
        n_weights, rel=0.01
    )
    assert tensors["blk.1.ffn_gate_exps.weight"].shape == experts
    assert tensors["blk.1.ffn_down_exps.weight"].shape == (experts[0], experts[2], experts[1])
    assert f"blk.{shape.n_layers - 1}.attn_q.weight" in tensors


@pytest.mark.parametrize(("name", "mix", "n_bytes"), [
    ("qwen3-30b-a3b", "q4_k_m", 18.6e9),
    ("gpt-oss-20b", "mxfp4", 12.1e9),
    pytest.param("gpt-oss-120b", "mxfp4", 63.4e9, marks=pytest.mark.full),
])  # fmt: skip
def test_a_sparse_file_has_the_size_of_the_real_one_and_takes_no_disk(
    tmp_path: Path, name: str, mix: str, n_bytes: float
) -> None:
    """Sizes are those under which such files are published, rounded to a tenth of a GB."""
    path = tmp_path / "sparse.gguf"
    tool.make(name, path, None, mix, sparse=True)
    found = path.stat()
    assert found.st_size == pytest.approx(n_bytes, abs=0.06e9)
    assert found.st_blocks * 512 < 16 << 20
    with open_model(path) as model:
        assert model.spec.n_layers == tool.PRESETS[name].n_layers


def test_a_sparse_file_is_laid_out_as_a_whole_one(tmp_path: Path) -> None:
    for name, sparse in (("whole", False), ("sparse", True)):
        tool.make("tiny", tmp_path / name, None, "q4_k_m", sparse=sparse)
    with open_gguf(tmp_path / "whole") as whole, open_gguf(tmp_path / "sparse") as sparse_file:
        assert sparse_file.tensors == whole.tensors
        assert not sparse_file.data("output.weight").any()
    assert (tmp_path / "sparse").stat().st_size == (tmp_path / "whole").stat().st_size


def test_layers_and_types_are_options(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "model.gguf"
    root = Path(tool.__file__).parent.parent
    command = [sys.executable, "-m", "tools.make_synthetic_model", "tiny", "--layers", "3"]
    subprocess.run([*command, "--types", "q8_0", "--out", str(out)], check=True, cwd=root)
    with open_gguf(out) as file:
        assert file.require("qwen3moe.block_count", int) == 3
        assert file.tensors["blk.2.attn_k.weight"].type == "Q8_0"
        assert "blk.3.attn_k.weight" not in file.tensors


def test_the_seed_decides_the_bytes(tmp_path: Path) -> None:
    for name, seed in [("a", 1), ("b", 1), ("c", 2)]:
        tool.make("tiny", tmp_path / name, 1, "q4_k_m", seed)
    raw = {name: (tmp_path / name).read_bytes() for name in "abc"}
    assert raw["a"] == raw["b"] != raw["c"]


def test_no_room_on_the_disk(tmp_path: Path) -> None:
    huge = replace(tool.PRESETS["mixtral-8x7b"], n_layers=1_000_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tool.PRESETS, "huge", huge)
        patch.setattr(tool, "tensor_list", lambda *_: tool_list())
        with pytest.raises(SystemExit, match="the disk has"):
            tool.make("huge", tmp_path / "huge.gguf", None, "q4_k_m", 0)
    assert list(tmp_path.iterdir()) == []


def tool_list() -> list[object]:
    """One tensor no disk holds."""
    return [describe_tensor("a", "F32", (1 << 40, 1 << 20))]


@pytest.mark.parametrize("n_tokens", [1024, 32000])
def test_the_vocabulary_tokenizes_any_text(n_tokens: int) -> None:
    tokens, merges = vocabulary(n_tokens)
    assert len(tokens) == len(set(tokens)) == n_tokens
    assert tokens[:256] == byte_tokens()
    assert sorted(tokens[:256]) == sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (rule.partition(" ") for rule in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = "The quick brown fox: naïve 日本語 \t\n\x00 {x}"
    found = tokenizer.encode(text).ids
    assert tokenizer.decode(found) == text
    assert len(found) < len(text.encode())


def test_byte_tokens_stand_in_the_order_of_bytes() -> None:
    tokens = byte_tokens()
    assert tokens[ord("A")] == "A" and tokens[ord(" ")] == "Ġ" and tokens[ord("\n")] == "Ċ"
    assert len(set(tokens)) == 256
