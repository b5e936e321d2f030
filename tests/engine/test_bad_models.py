"""Damaged, hostile and strange models: one clear line each, and no memory for what is not there."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.tiny import (
    NAMES,
    Tensor,
    architecture,
    model_path,
    retyped,
    rewrite,
    with_metadata,
)
from tests.gguf_file.test_mutations import mutated
from tests.gpu.invented import DISCRETE_12
from tests.samples import sampled
from vkmoe.config import EngineConfig
from vkmoe.errors import ModelFileError, UnsupportedModelError, VkmoeError
from vkmoe.generate.text.tokenizer import Tokenizer
from vkmoe.gguf_file import open_gguf
from vkmoe.llm import LLM
from vkmoe.models import open_model
from vkmoe.models.layers.rope import rope_table
from vkmoe.placement.decide import decide

pytestmark = pytest.mark.usefixtures("one_device")

Tensors = dict[str, Tensor]
TINY = "moe_plain"
ARCH = "qwen3moe"


def refusal(path: Path, *words: str) -> VkmoeError:
    """The error that loading `path` ends with: one line that names the file and `words`."""
    with pytest.raises(VkmoeError) as caught:
        LLM(path, ctx_size=16)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message
    for word in words:
        assert word in message
    assert caught.value.hint
    return caught.value


METADATA: list[tuple[str, Any, str]] = [
    ("attention.head_count", 0, "between 1 and"),
    ("attention.head_count", 3, "3 heads"),
    ("attention.head_count", 64, "expected [2048, 64]"),
    ("attention.head_count_kv", 0, "between 1 and"),
    ("attention.head_count_kv", 3, "3 KV heads"),
    ("attention.key_length", 33, "multiple of 8"),
    ("attention.key_length", 520, "between 1 and 512"),
    ("attention.value_length", 64, "widths equal"),
    ("attention.layer_norm_rms_epsilon", 0.0, "must be positive"),
    ("attention.layer_norm_rms_epsilon", float("nan"), "nan"),
    ("attention.layer_norm_rms_epsilon", float("inf"), "inf"),
    ("attention.layer_norm_rms_epsilon", 1e300, "at most"),
    ("attention.layer_norm_rms_epsilon", None, "has no metadata key"),
    ("block_count", 0, "between 1 and"),
    ("block_count", 1 << 40, str(1 << 40)),
    ("block_count", 3, "blk.2.attn_norm.weight is missing"),
    ("block_count", 1, "blk.1."),
    ("block_count", -1, "-1"),
    ("block_count", "two", "whole number"),
    ("block_count", 2.5, "whole number"),
    ("context_length", 0, "between 1 and"),
    ("embedding_length", 1 << 31, str(1 << 31)),
    ("embedding_length", 96, "expected [300, 96]"),
    ("expert_count", 0, "between 1 and"),
    ("expert_count", 5000, "between 1 and 1024"),
    ("expert_count", 7, "expected [7, 32, 64]"),
    ("expert_used_count", 0, "between 1 and"),
    ("expert_used_count", 9, "9 experts used of 8"),
    ("expert_used_count", 33, "between 1 and 32"),
    ("expert_feed_forward_length", 64, "expected [8, 64, 64]"),
    ("expert_gating_func", 2, "expert_gating_func is 2"),
    ("expert_weights_norm", 1, "a bool"),
    ("expert_weights_scale", 1e300, "at most"),
    ("rope.dimension_count", 31, "must be even"),
    ("rope.dimension_count", 64, "between 1 and 32"),
    ("rope.freq_base", 0.0, "must be positive"),
    ("rope.scaling.type", "spiral\nstair", "spiral"),
    ("rope.scaling.type", "yarn", "yarn needs it"),
    ("something.new", 1, "something.new"),
    ("some\nthing", 1, "unknown metadata"),
]


@pytest.mark.parametrize(("key", "value", "words"), METADATA)
def test_wrong_metadata_is_named(key: str, value: Any, words: str, tmp_path: Path) -> None:
    change = with_metadata({f"{ARCH}.{key}": value})
    refusal(rewrite(model_path(TINY), tmp_path / "bad.gguf", change), words)


def test_yarn_needs_a_base(tmp_path: Path) -> None:
    change = with_metadata({f"{ARCH}.rope.freq_base": 1.0})
    refusal(rewrite(model_path("moe_yarn_top1"), tmp_path / "bad.gguf", change), "rope.freq_base")


def test_an_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    change = with_metadata({"general.architecture": "mamba9"})
    error = refusal(rewrite(model_path(TINY), tmp_path / "bad.gguf", change), "mamba9")
    assert isinstance(error, UnsupportedModelError)
    assert "qwen3" in error.hint and "qwen3moe" in error.hint


# ----- tensors -----


def drop(name: str) -> Callable[[dict[str, Any], Tensors], None]:
    def change(metadata: dict[str, Any], tensors: Tensors) -> None:
        del tensors[name]

    return change


@pytest.mark.parametrize(
    "name",
    ["token_embd", "output_norm", "blk.0.attn_q", "blk.1.attn_k_norm", "blk.0.ffn_gate_inp",
     "blk.1.ffn_down_exps"],
)  # fmt: skip
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    path = rewrite(model_path(TINY), tmp_path / "bad.gguf", drop(f"{name}.weight"))
    assert isinstance(refusal(path, f"{name}.weight"), ModelFileError)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("blk.0.attn_q.weight", (64, 128)),
        ("blk.0.attn_q.weight", (128 * 64,)),
        ("blk.1.ffn_up_exps.weight", (8 * 32, 64)),
        ("blk.0.attn_norm.weight", (2, 32)),
        ("output_norm.weight", (32,)),
    ],
)
def test_a_wrong_shape_is_named(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    def change(metadata: dict[str, Any], tensors: Tensors) -> None:
        data = tensors[name].data[: 4 * int(np.prod(shape))]
        tensors[name] = Tensor("F32", shape, data)

    refusal(rewrite(model_path(TINY), tmp_path / "bad.gguf", change), name, str(list(shape)))


def test_unknown_tensors_are_named(tmp_path: Path) -> None:
    def change(metadata: dict[str, Any], tensors: Tensors) -> None:
        for name in ("blk.0.attn_q.bias", "mtp\n.weight", "x1", "x2", "x3"):
            tensors[name] = tensors["output_norm.weight"]

    path = rewrite(model_path(TINY), tmp_path / "bad.gguf", change)
    assert isinstance(refusal(path, "blk.0.attn_q.bias", "2 more"), UnsupportedModelError)


def test_a_quantised_gain_is_refused(tmp_path: Path) -> None:
    name = "blk.0.ffn_norm.weight"

    def change(metadata: dict[str, Any], tensors: Tensors) -> None:
        tensors[name] = retyped(tensors[name], "Q8_0")

    refusal(rewrite(model_path(TINY), tmp_path / "bad.gguf", change), name, "Q8_0")


def test_rows_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    def change(metadata: dict[str, Any], tensors: Tensors) -> None:
        metadata[f"{ARCH}.expert_feed_forward_length"] = 24
        for name in [name for name in tensors if "_exps" in name]:
            shape = (8, 64, 24) if "down" in name else (8, 24, 64)
            tensors[name] = Tensor("F32", shape, tensors[name].data[: 4 * 8 * 24 * 64])

    refusal(rewrite(model_path(TINY), tmp_path / "bad.gguf", change), "rows of 24")


# ----- tokenizer -----


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": None}, "tokenizer.ggml.model"),
        ({"model": "llama"}, "tokenizer.ggml.scores"),
        ({"pre": "klingon"}, "klingon"),
        ({"tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokens": 7}, "tokenizer.ggml.tokens"),
        ({"merges": None}, "tokenizer.ggml.merges"),
        ({"merges": ["no such"]}, "merge 0"),
        ({"token_type": [1, 2, 3]}, "3 token types"),
        ({"bos_token_id": 300}, "300"),
        ({"eos_token_id": 1 << 40}, str(1 << 40)),
    ],
)
def test_a_bad_tokenizer_is_named(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    keys = {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    refusal(rewrite(model_path(TINY), tmp_path / "bad.gguf", with_metadata(keys)), words)


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    def change(metadata: dict[str, Any], tensors: Tensors) -> None:
        table = tensors["token_embd.weight"]
        data = table.data[: -4 * table.shape[1]]
        tensors["token_embd.weight"] = Tensor("F32", (299, 64), data)

    path = rewrite(model_path(TINY), tmp_path / "bad.gguf", change)
    refusal(path, "tokenizer has 300", "299")


def test_a_model_larger_than_its_tokenizer_runs(tmp_path: Path) -> None:
    """Padded embeddings are common; their tokens have no text."""

    def change(metadata: dict[str, Any], tensors: Tensors) -> None:
        table = tensors["token_embd.weight"]
        padded = np.concatenate([table.data, table.data[: 20 * 64 * 4]])
        tensors["token_embd.weight"] = Tensor("F32", (320, 64), padded)

    path = rewrite(model_path(TINY), tmp_path / "padded.gguf", change)
    with LLM(path, ctx_size=16) as llm:
        assert llm.spec.n_vocab == 320
        assert llm.tokenizer.n_vocab == 300
        assert len(llm.generate([319, 5, 310], max_tokens=4, ignore_eos=True).token_ids) == 4


# ----- mutations -----


def open_without_gpu(path: Path) -> None:
    """All that happens before memory is allocated, with an invented device."""
    with open_model(path) as model:
        decision = decide(EngineConfig(), model, DISCRETE_12)
        rope = model.spec.ropes[0]
        assert np.isfinite(rope_table(rope, min(64, decision.plan.ctx_size))).all()
        Tokenizer.from_file(model.file)


def sound(path: Path) -> bool:
    """Whether it opens; anything but a one-line VkmoeError fails the test."""
    try:
        open_without_gpu(path)
    except VkmoeError as error:
        assert "\n" not in str(error), repr(str(error))
        return False
    return True


@pytest.fixture
def few_bytes() -> Any:
    """The test may not hold more than a few MB at any time."""
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 << 20


@pytest.mark.usefixtures("few_bytes")
def test_mutated_headers_end_in_our_own_errors(tmp_path: Path) -> None:
    raw = model_path("moe_unnormalised").read_bytes()
    with open_gguf(model_path("moe_unnormalised")) as file:
        start = min(tensor.offset for tensor in file.tensors.values())
    rng = np.random.default_rng(5)
    path = tmp_path / "mutant.gguf"
    n_sound = 0
    reaches = (start, raw.index(b"tokenizer.ggml"))  # all of it, or what the model says of itself
    for index in range(300):
        head = bytearray(raw[:start])
        head[int(rng.integers(reaches[index % 4 // 2]))] = int(rng.integers(256))
        path.write_bytes((mutated(raw[:start], rng) if index % 2 else bytes(head)) + raw[start:])
        n_sound += sound(path)
    assert 5 < n_sound < 200, "the mutations are too brutal, or too timid"


EXTREMES = (0, 1, 3, 1 << 24, 1 << 40, -1, 1e-30, 1e30, float("nan"), "x")


def keys_of(name: str) -> dict[str, str]:
    """The keys of a fixture but the tokens', by what is left without the architecture."""
    prefix = architecture(name) + "."
    with open_gguf(model_path(name)) as file:
        keys = [key for key in file.metadata if not key.startswith("tokenizer.ggml.tok")]
    return {key.removeprefix(prefix): key for key in keys}


@pytest.mark.parametrize(
    "name",
    sampled(
        ["moe_yarn_top1", "gptoss_plain", "deepseek2_v3", "llama_longrope_short"],
        "deepseek2_v3".__eq__,
    ),
)
@pytest.mark.usefixtures("few_bytes")
@pytest.mark.full
def test_every_key_may_be_extreme(name: str, tmp_path: Path) -> None:
    """What all files have is tried with the first."""
    keys, common = keys_of(name), keys_of("moe_yarn_top1")
    if name != "moe_yarn_top1":
        keys = {short: key for short, key in keys.items() if short not in common}
    path = tmp_path / "extreme.gguf"
    results = []
    for key in keys.values():
        for value in EXTREMES:
            if key == "general.architecture" and not isinstance(value, str):
                continue
            results.append(sound(rewrite(model_path(name), path, with_metadata({key: value}))))
    assert any(results) and not all(results)


def test_the_mutations_start_from_sound_files() -> None:
    assert all(sound(model_path(name)) for name in NAMES)
