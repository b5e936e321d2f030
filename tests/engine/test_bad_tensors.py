"""Tensors of every architecture that are missing, misshapen or of a wrong type: one clear line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.other_types import of_types
from tests.engine.tiny import Change, Tensor, model_path, retyped, rewrite
from vkmoe.errors import ModelFileError, UnsupportedModelError, VkmoeError
from vkmoe.facts import LatentSpec
from vkmoe.models import open_model
from vkmoe.quants import TYPES

# What a layer of each kind of model has that others do not.
OWN = {
    "gptoss_odd": (
        *("attn_q.bias", "attn_output.bias", "attn_sinks.weight", "post_attention_norm.weight"),
        *("ffn_gate_inp.bias", "ffn_gate_exps.bias", "ffn_down_exps.bias"),
    ),
    "qwen2moe_plain": (
        *("attn_v.bias", "ffn_gate_shexp.weight", "ffn_down_shexp.weight"),
        "ffn_gate_inp_shexp.weight",
    ),
    "deepseek2_v3": (
        *("attn_q_a.weight", "attn_q_a_norm.weight", "attn_q_b.weight", "attn_kv_a_mqa.weight"),
        *("attn_kv_a_norm.weight", "attn_v_b.weight", "ffn_up_shexp.weight"),
    ),
    "deepseek2_unsplit": ("attn_kv_b.weight", "attn_q.weight"),
    "mixtral_one_by_one": ("ffn_gate.0.weight", "ffn_up.1.weight", "ffn_down.2.weight"),
    "olmoe_plain": ("attn_q_norm.weight",),
    "glm4moe_odd": (
        *("attn_k.bias", "attn_k_norm.weight", "post_attention_norm.weight"),
        *("exp_probs_b.bias", "ffn_gate_shexp.weight"),
    ),
    "ernie45moe_odd": ("ffn_down_shexp.weight", "ffn_gate_inp.weight"),
    "dots1_odd": ("attn_k_norm.weight", "ffn_norm.weight", "ffn_up_shexp.weight"),
    "minimaxm2_odd": ("attn_q_norm.weight", "exp_probs_b.bias"),
    "bailingmoe2_odd": ("attn_q_norm.weight", "ffn_up_shexp.weight"),
    "hunyuanmoe_odd": ("attn_k_norm.weight", "ffn_down_shexp.weight"),
    "hyv3_odd": ("attn_q_norm.weight", "ffn_up_shexp.weight"),
    "glmdsa_odd": ("attn_q_a.weight", "attn_v_b.weight", "ffn_gate_shexp.weight"),
    "gemma4_odd": (
        *("post_attention_norm.weight", "pre_ffw_norm_2.weight", "post_ffw_norm_1.weight"),
        *("ffn_gate_inp.scale", "ffn_down_exps.scale", "ffn_gate.weight", "ffn_down.weight"),
    ),
    "gemma4_dense_inputs": ("inp_gate.weight", "proj.weight", "post_norm.weight", "attn_k.weight"),
    "mistral4_odd": ("attn_q_b.weight", "ffn_down_shexp.weight"),
}
CASES = [(model, name) for model, names in OWN.items() for name in names]


def last(tensors: dict[str, Tensor], name: str) -> str:
    """The tensor of this name in the last layer that has one, which may guess tokens ahead."""
    layers = [int(key.split(".")[1]) for key in tensors if key.endswith(f".{name}")]
    return f"blk.{max(layers)}.{name}"


def refusal(model: str, change: Change, tmp_path: Path, *words: str) -> VkmoeError:
    """The error that reading the file ends with: one line that names the file and `words`."""
    path = rewrite(model_path(model), tmp_path / "bad.gguf", change)
    with pytest.raises(VkmoeError) as caught, open_model(path) as opened:
        assert opened.ahead is not None, "nothing was refused"
        opened.guessing()
    message = str(caught.value)
    assert "\n" not in message and str(path) in message and caught.value.hint
    for word in words:
        assert word in message, message
    return caught.value


@pytest.mark.parametrize(("model", "name"), CASES)
def test_a_missing_tensor_is_named(model: str, name: str, tmp_path: Path) -> None:
    """Of experts one by one the first that is missing: without any, the stack of all is."""

    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        del tensors[last(tensors, name)]

    wanted = "ffn_gate_exps.weight" if name == "ffn_gate.0.weight" else name
    error = refusal(model, change, tmp_path, f".{wanted} is missing")
    assert isinstance(error, ModelFileError)


def test_a_tensor_that_is_part_of_another_is_not_called_missing(tmp_path: Path) -> None:
    """As converters write them where they are asked to fuse; gates lie between queries here."""

    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["blk.2.attn_qkv.weight"] = tensors.pop("blk.2.attn_q.weight")

    words = "blk.2.attn_q.weight is a part of blk.2.attn_qkv.weight"
    assert "without fusing" in refusal("qwen35moe_odd", change, tmp_path, words).hint


@pytest.mark.parametrize(("model", "name"), CASES)
def test_a_row_or_element_less_is_named(model: str, name: str, tmp_path: Path) -> None:
    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        key = last(tensors, name)
        first, *rest = tensors[key].shape
        data = tensors[key].data.reshape(first, -1)[:-1]
        tensors[key] = Tensor("F32", (first - 1, *rest), data.reshape(-1))

    error = refusal(model, change, tmp_path, f".{name} has shape [", "expected [")
    assert isinstance(error, ModelFileError)


@pytest.mark.parametrize(("model", "name"), CASES)
def test_whole_numbers_are_no_weights(model: str, name: str, tmp_path: Path) -> None:
    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        key = last(tensors, name)
        tensors[key] = tensors[key]._replace(type="I32")

    error = refusal(model, change, tmp_path, f".{name} is of type I32")
    assert isinstance(error, UnsupportedModelError)


@pytest.mark.parametrize("kind", ["Q8_1", "Q8_K", "I8"])
def test_a_type_that_is_not_for_weights_lists_those_that_are(kind: str, tmp_path: Path) -> None:
    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        metadata["qwen3moe.expert_feed_forward_length"] = 256
        for name in [name for name in tensors if "_exps" in name]:
            shape = (8, 64, 256) if "down" in name else (8, 256, 64)
            tensors[name] = Tensor("F32", shape, np.zeros(4 * 8 * 64 * 256, np.uint8))
        block = TYPES[kind]
        data = np.zeros(8 * 64 * 256 // block.block_weights * block.block_bytes, np.uint8)
        tensors["blk.1.ffn_down_exps.weight"] = Tensor(kind, (8, 64, 256), data)

    error = refusal("moe_plain", change, tmp_path, f"ffn_down_exps.weight is of type {kind} (")
    assert isinstance(error, UnsupportedModelError)
    assert "Q4_K" in error.hint and "IQ2_XXS" in error.hint


def test_experts_of_one_layer_in_two_types_are_named(tmp_path: Path) -> None:
    """The span of an expert has one size."""

    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        key = last(tensors, "ffn_up.2.weight")
        tensors[key] = retyped(tensors[key], "Q8_0")

    words = "ffn_up.2.weight is of type Q8_0", "ffn_up.0.weight of type F32"
    refusal("mixtral_one_by_one", change, tmp_path, *words)


def test_experts_both_stacked_and_single_are_refused(tmp_path: Path) -> None:
    """Which are meant is not known."""

    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        key = last(tensors, "ffn_up.0.weight")
        data = np.zeros(3 * tensors[key].data.size, np.uint8)
        stack = key.replace(".0.weight", "_exps.weight")
        tensors[stack] = Tensor("F32", (3, *tensors[key].shape), data)

    refusal("mixtral_one_by_one", change, tmp_path, "ffn_up_exps.weight")


def test_one_expert_too_many_is_named(tmp_path: Path) -> None:
    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["blk.0.ffn_up.3.weight"] = tensors["blk.0.ffn_up.2.weight"]

    refusal("mixtral_one_by_one", change, tmp_path, "blk.0.ffn_up.3.weight")


def test_latent_keys_without_values_are_named(tmp_path: Path) -> None:
    """Old and new form are told apart by the keys."""

    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        del tensors["blk.0.attn_v_b.weight"]

    refusal("deepseek2_lite", change, tmp_path, "blk.0.attn_v_b.weight is missing")


def test_both_forms_of_latent_keys_and_values_may_be_there(tmp_path: Path) -> None:
    """Converters wrote both for a while; they say the same."""

    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for layer in range(2):
            key = f"blk.{layer}.attn_kv_b.weight"
            tensors[key] = Tensor("F32", (128, 32), np.zeros(4 * 128 * 32, np.uint8))

    path = rewrite(model_path("deepseek2_lite"), tmp_path / "both.gguf", change)
    with open_model(path) as file:
        assert isinstance(file.spec.layers[0].mixer, LatentSpec)


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1"])
def test_quantised_biases_are_refused(kind: str, tmp_path: Path) -> None:
    """They are added as they are: nobody writes such files."""
    change = of_types({"ffn_down_exps.bias": kind})
    refusal("gptoss_odd", change, tmp_path, "ffn_down_exps.bias is of type " + kind)


def test_rows_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    """Of a shared expert, whose width is its own."""

    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        metadata["qwen2moe.expert_shared_feed_forward_length"] = 40
        for name in [name for name in tensors if name.endswith("_shexp.weight")]:
            if "inp" not in name:
                shape = (32, 40) if "down" in name else (40, 32)
                tensors[name] = Tensor("F32", shape, tensors[name].data[: 4 * 32 * 40])

    refusal("qwen2moe_plain", change, tmp_path, "rows of 40")
