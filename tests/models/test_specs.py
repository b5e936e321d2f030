"""What is read from the metadata of each architecture, and what is taken where a file is silent."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.tiny import Tensor, architecture, model_path, rewrite
from tests.models.tiny_specs import changed, spec_of
from vkmoe.cli.info import spec_lines
from vkmoe.config import EngineConfig
from vkmoe.errors import ModelFileError, UnsupportedModelError, UsageError
from vkmoe.facts import (
    AttentionSpec,
    DeltaNetSpec,
    DenseSpec,
    ExpertSpec,
    LatentSpec,
    ModelSpec,
    RopeSpec,
)
from vkmoe.gguf_file import open_gguf
from vkmoe.kv_types import both
from vkmoe.models import ARCHITECTURES, read_spec
from vkmoe.models.kept import Kept, state_bytes
from vkmoe.models.kv_caches import caching_layers
from vkmoe.models.layers.rope import rope_table
from vkmoe.models.program_sizes import sure_context
from vkmoe.models.tensors import read_tensors
from vkmoe.models.trunk_tensors import FileMatrix


def experts_of(spec: ModelSpec) -> ExpertSpec:
    assert spec.experts is not None
    return spec.experts


def attention_of(spec: ModelSpec, layer: int = 0) -> AttentionSpec:
    mixer = spec.layers[layer].mixer
    assert isinstance(mixer, AttentionSpec)
    return mixer


def latent_of(spec: ModelSpec) -> LatentSpec:
    (mixer,) = spec.mixers
    assert isinstance(mixer, LatentSpec)
    return mixer


def rope_of(spec: ModelSpec) -> RopeSpec:
    (rope,) = spec.ropes
    return rope


def has_biased_blocks(spec: ModelSpec) -> bool:
    return all(block.bias for block in spec.dense_blocks)


def test_every_architecture_is_read_here() -> None:
    names = ("dense_tied", "moe_plain", "olmoe_plain", "llama_plain", "mixtral_plain",
             "qwen2moe_plain", "gptoss_plain", "deepseek2_v3", "qwen35moe_odd", "qwen35_dense",
             "qwen3next_odd", "glm4moe_odd", "ernie45moe_odd", "dots1_odd", "minimaxm2_odd",
             "bailingmoe2_odd", "hyv3_odd", "hunyuanmoe_odd", "deepseek32_odd", "glmdsa_odd",
             "mistral4_odd", "gemma4_odd")  # fmt: skip
    assert {spec_of(model_path(name)).architecture for name in names} == set(ARCHITECTURES)


# ----- norms behind blocks -----


def test_gemma4(tmp_path: Path) -> None:
    spec = spec_of(model_path("gemma4_odd"))
    narrow, wide = attention_of(spec), attention_of(spec, 3)
    assert (narrow.window, narrow.head_dim, narrow.n_kv_heads) == (6, 32, 2)
    assert (wide.window, wide.head_dim, wide.n_kv_heads) == (0, 64, 1)
    assert narrow.value_norm and wide.value_norm and narrow.scale == wide.scale == 1.0
    assert (narrow.rope.base, wide.rope.base) == (1e4, 1e6)
    assert not narrow.rope.factors and np.isinf(wide.rope.factors).sum() == 24
    assert all(layer.post_norms and layer.scaled for layer in spec.layers)
    experts = experts_of(spec)
    assert experts.beside_width == 64 and experts.output_scales and experts.activation == "geglu"
    assert spec.embedding_scale == spec.width**0.5 and spec.logit_cap == 8.0
    bare = changed(tmp_path, "gemma4_odd", final_logit_softcapping=None)
    assert bare.logit_cap == 0.0


def test_small_models_of_gemma4() -> None:
    spec = spec_of(model_path("gemma4_dense_inputs"))
    assert spec.input_width == 64 and spec_of(model_path("gemma4_odd")).input_width == 0
    mixers = [attention_of(spec, layer) for layer in range(7)]
    assert [mixer.own_kv for mixer in mixers] == [True] * 4 + [False] * 3
    assert caching_layers(spec) == (0, 1, 2, 3, 2, 2, 3)
    # Not the last two before, whatever their kind.
    assert caching_layers(spec_of(model_path("gemma4_shared"))) == (0, 1, 2, 2, 1)
    assert [mixer.qkv_width for mixer in mixers[2:5]] == [6 * 32, 6 * 64, 4 * 32]
    assert state_bytes(mixers[4], Kept(100, both("f16"))) == ()
    assert [block.width for block in spec.dense_blocks] == [64] * 4 + [128] * 3
    lines = spec_lines(spec)
    assert lines[0] == "layers        7 of width 32; a token brings 64 numbers to each"
    assert sum("those of an earlier layer in" in line for line in lines) == 2


# ----- gated delta rule -----


def test_qwen35(tmp_path: Path) -> None:
    spec = spec_of(model_path("qwen35moe_odd"))
    kinds = [type(layer.mixer) for layer in spec.layers]
    assert kinds == [DeltaNetSpec, DeltaNetSpec, AttentionSpec, DeltaNetSpec]
    assert spec.layers[0].mixer == DeltaNetSpec(2, 6, 32, 4, tiled=True)
    full = attention_of(spec, 2)
    assert full.gated and full.qk_norm == "per_head" and full.rope.dim == 16
    assert experts_of(spec) == ExpertSpec(7, 3, 32, shared_width=64, shared_gate=True)
    assert spec_of(model_path("qwen3next_odd")).layers[0].mixer == DeltaNetSpec(2, 6, 32, 4, False)
    every_second = spec_of(model_path("qwen3next_all_experts"))
    assert [layer.mixer.is_recurrent for layer in every_second.layers] == [True, False]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("ssm.state_size", 0, "ssm.state_size is 0: must be between 1 and 256"),
        ("ssm.conv_kernel", 9, "ssm.conv_kernel is 9: must be between 1 and 7"),
        ("ssm.group_count", 4, "6 heads of 32 with 4 key heads"),
        ("ssm.inner_size", 96, "ssm.inner_size 96"),
        ("attention.recurrent_layers", [True] * 3, "an array of 3: the model has 5 layers"),
        ("attention.recurrent_layers", [1, 1, 0, 1, 0], "must hold true or false"),
        ("ssm.dt_rank", 3, "unknown metadata 'qwen35moe.ssm.dt_rank'"),
    ],
)
def test_delta_rules_that_cannot_be(tmp_path: Path, key: str, value: Any, words: str) -> None:
    with pytest.raises((ModelFileError, UnsupportedModelError), match=re.escape(words)):
        changed(tmp_path, "qwen35moe_odd", **{key.replace(".", "__"): value})


# ----- grouped attention -----


def test_olmoe(tmp_path: Path) -> None:
    spec = spec_of(model_path("olmoe_plain"))
    mixer = attention_of(spec)
    assert mixer.qk_norm == "full_width" and mixer.rope.style == "neox" and not mixer.qkv_bias
    assert experts_of(spec) == ExpertSpec(4, 2, 32, renormalise=False)
    assert experts_of(changed(tmp_path, "olmoe_plain", expert_weights_norm=True)).renormalise


def test_llama() -> None:
    spec = spec_of(model_path("llama_plain"))
    mixer = attention_of(spec)
    assert spec.experts is None and mixer.qk_norm == "none"
    assert mixer.rope == RopeSpec(32, 1e4, "normal")
    assert not (mixer.qkv_bias or mixer.output_bias or has_biased_blocks(spec))
    biased = spec_of(model_path("llama_biases"))
    mixer = attention_of(biased)
    assert mixer.qkv_bias and mixer.output_bias and not has_biased_blocks(biased)
    assert has_biased_blocks(spec_of(model_path("llama_mlp_biases")))


def test_llama_with_a_count_of_no_experts(tmp_path: Path) -> None:
    spec = changed(tmp_path, "llama_plain", expert_count=0, expert_used_count=0)
    assert spec.experts is None


def test_mixtral(tmp_path: Path) -> None:
    wanted = ExpertSpec(8, 2, 32, renormalise=True)
    assert experts_of(spec_of(model_path("mixtral_plain"))) == wanted
    scaled = changed(tmp_path, "mixtral_plain", expert_weights_scale=2.5, expert_weights_norm=False)
    assert experts_of(scaled) == ExpertSpec(8, 2, 32, renormalise=False, scale=2.5)


def test_heads_are_as_wide_as_the_hidden_state_allows_unless_a_file_says_so() -> None:
    with open_gguf(model_path("olmoe_plain")) as file:
        assert "olmoe.attention.key_length" not in file.metadata
    spec = spec_of(model_path("olmoe_plain"))
    mixer = attention_of(spec)
    assert mixer.head_dim == mixer.rope.dim == spec.width // mixer.n_heads


def test_as_many_heads_as_one_likes_share_keys_and_values(tmp_path: Path) -> None:
    """Files with more than 16 heads per KV head were refused once, and narrow heads."""

    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        metadata["llama.attention.head_count"] = 24
        metadata["llama.attention.head_count_kv"] = 1
        for key in ("key_length", "value_length"):
            metadata[f"llama.attention.{key}"] = 8
        metadata["llama.rope.dimension_count"] = 8
        width = metadata["llama.embedding_length"]
        shapes = {"q": (192, width), "k": (8, width), "v": (8, width), "output": (width, 192)}
        for layer in range(metadata["llama.block_count"]):
            for name, shape in shapes.items():
                zeros = np.zeros(4 * shape[0] * shape[1], np.uint8)
                tensors[f"blk.{layer}.attn_{name}.weight"] = Tensor("F32", shape, zeros)

    mixer = attention_of(
        spec_of(rewrite(model_path("llama_plain"), tmp_path / "many.gguf", change))
    )
    assert (mixer.n_heads, mixer.n_kv_heads, mixer.head_dim) == (24, 1, 8)


def test_qwen2moe(tmp_path: Path) -> None:
    spec = spec_of(model_path("qwen2moe_plain"))
    mixer = attention_of(spec)
    assert mixer.qkv_bias and not mixer.output_bias and mixer.qk_norm == "none"
    wanted = ExpertSpec(4, 2, 32, renormalise=False, shared_width=64, shared_gate=True)
    assert experts_of(spec) == wanted
    silent = {"expert_feed_forward_length": None, "expert_shared_feed_forward_length": None}
    early = changed(tmp_path, "qwen2moe_plain", **silent, feed_forward_length=64)
    assert experts_of(early) == wanted, "widths as the tensors and a dense layer have them"


def test_gpt_oss() -> None:
    spec = spec_of(model_path("gptoss_plain"))
    mixer, experts = attention_of(spec), experts_of(spec)
    assert mixer.qkv_bias and mixer.output_bias and mixer.sinks
    assert experts.activation == "swiglu_oai"
    assert experts.router_bias and experts.biases and experts.renormalise
    assert mixer.window > 0
    for layer in range(spec.n_layers):
        assert attention_of(spec, layer) == replace(mixer, window=(mixer.window, 0)[layer % 2])
    assert mixer.rope.style == "neox" and not mixer.rope.truncate


def test_numbers_of_each_layer_are_read_from_one_number_or_an_array(tmp_path: Path) -> None:
    wanted = spec_of(model_path("dense_tied"))
    arrays = {"attention__head_count": [8, 8], "attention__head_count_kv": [2, 2]}
    assert changed(tmp_path, "dense_tied", **arrays, feed_forward_length=[64, 64]) == wanted


def test_windows_are_read_from_a_period_or_a_pattern(tmp_path: Path) -> None:
    """With period n every n-th layer sees everything."""
    plain = spec_of(model_path("gptoss_plain"))
    window = attention_of(plain).window

    def windows(pattern: Any) -> list[int]:
        key = {"attention__sliding_window_pattern": pattern}
        spec = changed(tmp_path, "gptoss_plain", **key)
        return [attention_of(spec, layer).window for layer in range(2)]

    assert windows(2) == windows([True, False]) == [window, 0]
    assert windows(1) == windows([False, False]) == [0, 0]
    assert windows(3) == windows([True, True]) == [window, window]


# ----- grouped attention, and experts chosen by a bias -----


def test_glm4moe() -> None:
    spec = spec_of(model_path("glm4moe_odd"))
    mixer, experts = attention_of(spec), experts_of(spec)
    assert mixer.qkv_bias and not mixer.output_bias and mixer.qk_norm == "per_head"
    assert mixer.rope.style == "neox" and mixer.rope.dim == mixer.head_dim // 2
    assert experts.gating == "sigmoid" and experts.selection_bias and experts.renormalise
    assert (experts.n_groups, experts.scale) == (1, 2.5)
    assert experts.shared_width == 32 and not experts.shared_gate
    assert spec.moe_layers == (1, 2) and spec.dense_blocks == (DenseSpec(64),)


def test_glm4moe_has_norms_and_biases_where_their_tensors_are() -> None:
    air, bare = (spec_of(model_path(f"glm4moe_{name}")) for name in ("groups", "bare"))
    assert attention_of(air).qkv_bias and attention_of(air).qk_norm == "none"
    assert experts_of(air).n_groups == 4 and experts_of(air).shared_width == 64
    assert not attention_of(bare).qkv_bias and attention_of(bare).qk_norm == "none"
    assert attention_of(bare).rope.dim == attention_of(bare).head_dim


def test_ernie_with_experts(tmp_path: Path) -> None:
    spec = spec_of(model_path("ernie45moe_odd"))
    mixer, experts = attention_of(spec), experts_of(spec)
    assert mixer.rope.style == "normal" and mixer.qk_norm == "none" and not mixer.qkv_bias
    assert experts.gating == "softmax" and experts.selection_bias and experts.renormalise
    assert experts.shared_width == 64 and not experts.shared_gate
    assert spec.moe_layers == (1, 2)
    silent = {"expert_shared_feed_forward_length": None, "interleave_moe_layer_step": None}
    assert changed(tmp_path, "ernie45moe_odd", **silent) == spec
    assert experts_of(spec_of(model_path("ernie45moe_unshared"))).shared_width == 0


def test_dots1(tmp_path: Path) -> None:
    spec = spec_of(model_path("dots1_odd"))
    mixer, experts = attention_of(spec), experts_of(spec)
    assert mixer.qk_norm == "per_head" and mixer.rope.style == "neox"
    assert mixer.rope.dim == mixer.head_dim and not mixer.qkv_bias
    assert experts.gating == "sigmoid" and experts.selection_bias and experts.renormalise
    assert experts.shared_width == 64 and spec.moe_layers == (2,)
    assert changed(tmp_path, "dots1_odd", expert_gating_func=None) == spec
    plain = experts_of(spec_of(model_path("dots1_unbiased")))
    assert not plain.selection_bias and not plain.renormalise


def test_minimax_m2(tmp_path: Path) -> None:
    spec = spec_of(model_path("minimaxm2_odd"))
    mixer, experts = attention_of(spec), experts_of(spec)
    assert mixer.qk_norm == "full_width" and mixer.rope.dim == mixer.head_dim // 2
    assert mixer.rope.style == "neox" and not mixer.qkv_bias
    wanted = ExpertSpec(7, 3, 32, gating="sigmoid", selection_bias=True)
    assert experts == wanted and spec.moe_layers == (0, 1)
    assert changed(tmp_path, "minimaxm2_odd", expert_gating_func=None) == spec


def test_hunyuan_moe(tmp_path: Path) -> None:
    spec = spec_of(model_path("hunyuanmoe_odd"))
    mixer, experts = attention_of(spec), experts_of(spec)
    assert mixer.qk_norm == "per_head_turned" and mixer.rope.style == "neox"
    assert mixer.rope.base == pytest.approx(1e4 * 1000 ** (64 / 62)) and not mixer.qkv_bias
    assert experts == ExpertSpec(7, 3, 32, shared_width=32) and spec.moe_layers == (0, 1, 2)
    silent = {"expert_shared_feed_forward_length": None, "expert_shared_count": None}
    assert changed(tmp_path, "hunyuanmoe_odd", **silent) == spec


def test_bailingmoe2(tmp_path: Path) -> None:
    spec = spec_of(model_path("bailingmoe2_odd"))
    mixer, experts = attention_of(spec), experts_of(spec)
    assert mixer.qk_norm == "per_head" and mixer.rope.dim == mixer.head_dim // 2
    assert mixer.rope.style == "neox" and not mixer.qkv_bias
    assert experts.gating == "sigmoid" and experts.selection_bias and experts.renormalise
    assert (experts.n_groups, experts.n_groups_used) == (4, 2)
    assert experts.shared_width == 64 and spec.moe_layers == (1, 2)
    silent = {"expert_shared_feed_forward_length": None}
    assert changed(tmp_path, "bailingmoe2_odd", **silent) == spec


def test_matrices_of_one_tensor_are_its_rows() -> None:
    with open_gguf(model_path("bailingmoe2_odd")) as file:
        tensors = read_tensors(file, read_spec(file))
        whole = file.data("blk.0.attn_qkv.weight").reshape(5 * 32, -1)
        parts = [tensors.layers[0].mixer[field] for field in "qkv"]
        found = [part.data(file) for part in parts if isinstance(part, FileMatrix)]
    assert [len(rows) for rows in found] == [3 * 32, 32, 32]
    np.testing.assert_array_equal(np.concatenate(found), whole)


def test_hy_v3(tmp_path: Path) -> None:
    spec = spec_of(model_path("hyv3_odd"))
    mixer, experts = attention_of(spec), experts_of(spec)
    assert mixer.qk_norm == "per_head" and mixer.rope.style == "neox"
    assert mixer.rope.dim == mixer.head_dim and not mixer.qkv_bias
    assert experts.gating == "sigmoid" and experts.selection_bias and experts.renormalise
    assert experts.shared_width == 64 and spec.moe_layers == (1, 2)
    assert changed(tmp_path, "hyv3_odd", expert_gating_func=None) == spec


def test_the_bias_that_chooses_has_two_names(tmp_path: Path) -> None:
    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for layer in (1, 2):
            tensors[f"blk.{layer}.exp_probs_b.bias"] = tensors.pop(f"blk.{layer}.exp_probs_b")

    renamed = spec_of(rewrite(model_path("hyv3_odd"), tmp_path / "renamed.gguf", change))
    assert renamed == spec_of(model_path("hyv3_odd"))


# ----- latent attention -----


def test_deepseek2_of_the_third_version() -> None:
    spec = spec_of(model_path("deepseek2_v3"))
    experts, latent = experts_of(spec), latent_of(spec)
    assert latent.q_rank > 0
    assert experts.gating == "sigmoid" and experts.selection_bias and experts.renormalise
    assert experts.n_groups > experts.n_groups_used >= 1
    assert experts.shared_width % experts.width == 0 < experts.shared_width
    assert not experts.shared_gate
    n_dense = len(spec.dense_blocks)
    assert n_dense >= 1 and spec.moe_layers == tuple(range(n_dense, spec.n_layers))
    assert latent.rope.style == "normal" and rope_of(spec).dim == latent.rope_dim


def test_deepseek2_of_the_second_version() -> None:
    experts = experts_of(spec_of(model_path("deepseek2_v2")))
    assert experts.gating == "softmax" and not experts.selection_bias and not experts.renormalise


def test_deepseek2_files_of_before_the_absorbed_form() -> None:
    spec = spec_of(model_path("deepseek2_unsplit"))
    latent = latent_of(spec)
    assert (latent.kv_rank, latent.nope_dim, latent.rope_dim) == (32, 64, 16)
    assert (latent.value_dim, latent.q_rank) == (32, 0)
    assert experts_of(spec).gating == "softmax" and experts_of(spec).n_groups == 1


def test_deepseek2_without_experts(tmp_path: Path) -> None:
    """Layers of nothing but dense blocks."""

    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        metadata["deepseek2.block_count"] = metadata["deepseek2.leading_dense_block_count"] = 1
        metadata["deepseek2.expert_shared_count"] = 0
        told = {"deepseek2.expert_shared_count", "deepseek2.expert_feed_forward_length"}
        for key in [key for key in metadata if key.startswith("deepseek2.expert_")]:
            if key not in told:
                del metadata[key]
        for name in [name for name in tensors if name.startswith(("blk.1.", "blk.2."))]:
            del tensors[name]

    spec = spec_of(rewrite(model_path("deepseek2_v3"), tmp_path / "dense.gguf", change))
    assert spec.experts is None and spec.moe_layers == () and len(spec.dense_blocks) == 1


@pytest.mark.parametrize("name", ["deepseek2_v3", "bailingmoe2_odd"])
def test_layers_that_guess_ahead_are_not_among_the_others(name: str, tmp_path: Path) -> None:
    kind = architecture(name)

    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        n_layers = metadata[f"{kind}.block_count"]
        metadata[f"{kind}.block_count"] = n_layers + 1
        metadata[f"{kind}.nextn_predict_layers"] = 1
        tensors[f"blk.{n_layers}.nextn.eh_proj.weight"] = tensors["blk.0.attn_norm.weight"]

    path = rewrite(model_path(name), tmp_path / "ahead.gguf", change)
    wanted = replace(spec_of(model_path(name)), n_ahead_layers=1)
    assert spec_of(path) == wanted


@pytest.mark.parametrize(("name", "gating"), [("v3", "sigmoid"), ("v2", "softmax")])
def test_files_that_do_not_name_their_gating(name: str, gating: str, tmp_path: Path) -> None:
    spec = changed(tmp_path, f"deepseek2_{name}", expert_gating_func=None)
    assert experts_of(spec).gating == gating


@pytest.mark.parametrize("multiplier", [0.0707, 0.1])
def test_yarn_of_deepseek2_scales_scores_by_a_square(multiplier: float, tmp_path: Path) -> None:
    """Of 0.1 m ln(factor) + 1; a file has 0.1 m. Sines and cosines are left alone."""
    spec = changed(
        tmp_path,
        "deepseek2_lite",
        rope__scaling__type="yarn",
        rope__scaling__factor=40.0,
        rope__scaling__original_context_length=32,
        rope__scaling__yarn_log_multiplier=multiplier,
    )
    growth = multiplier * math.log(40) + 1
    latent = latent_of(spec)
    assert latent.scale == pytest.approx(growth**2 / math.sqrt(latent.query_dim), rel=1e-6)
    assert latent.rope.attention_factor == 1.0


def test_without_yarn_the_scale_is_that_of_the_width(tmp_path: Path) -> None:
    keys = ("type", "factor", "original_context_length", "yarn_log_multiplier")
    with open_gguf(model_path("deepseek2_lite")) as file:
        there = [key for key in keys if f"deepseek2.rope.scaling.{key}" in file.metadata]
    spec = changed(tmp_path, "deepseek2_lite", **{f"rope__scaling__{key}": None for key in there})
    latent = latent_of(spec)
    assert latent.scale == pytest.approx(latent.query_dim**-0.5)
    assert latent.rope.attention_factor is None


@pytest.mark.parametrize("name", ["deepseek32_top1", "glmdsa_all_experts"])
def test_an_indexer_limits_the_context(name: str, tmp_path: Path) -> None:
    """Up to the number of positions that it chooses attention is DeepSeek-V3's."""
    spec = spec_of(model_path(name))
    assert latent_of(spec).indexer and spec.context_length == 40
    assert "indexer leaves positions out" in spec.context_limit
    more = changed(tmp_path, name, attention__indexer__top_k=2048)
    assert (more.context_length, more.context_limit) == (128, "")
    with pytest.raises(UsageError, match=r"more than the 40 tokens .* can take: beyond them"):
        sure_context(EngineConfig(ctx_size=41), spec)
    assert any("40 tokens" in line and "indexer" in line for line in spec_lines(spec))


def test_queries_that_grow_limit_the_context(tmp_path: Path) -> None:
    spec = spec_of(model_path("mistral4_top1"))
    assert spec.context_length == 32 and "queries" in spec.context_limit
    for keys in ({"temperature_scale": 0.0}, {"temperature_length": 128}):
        changes = {f"attention__{key}": value for key, value in keys.items()}
        more = changed(tmp_path, "mistral4_top1", **changes)
        assert (more.context_length, more.context_limit) == (128, "")


def test_mistral4() -> None:
    spec = spec_of(model_path("mistral4_odd"))
    experts = experts_of(spec)
    assert experts.gating == "softmax" and experts.renormalise and experts.shared_width == 64
    assert latent_of(spec).rope.attention_factor == 1.0 and not latent_of(spec).indexer


def test_indexers_are_left_over_where_there_should_be_none(tmp_path: Path) -> None:
    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["blk.0.indexer.proj.weight"] = tensors["blk.0.attn_norm.weight"]

    with pytest.raises(UnsupportedModelError, match=r"does not know: 'blk\.0\.indexer\.proj"):
        spec_of(rewrite(model_path("deepseek2_v3"), tmp_path / "more.gguf", change))


# ----- rotary embedding -----


def test_frequencies_are_divided_by_factors_of_the_file() -> None:
    rope = rope_of(spec_of(model_path("llama_rope_freqs")))
    assert rope.scaling == "none" and len(rope.factors) == rope.dim // 2
    assert rope.factors[0] == 1.0 and rope.factors[-1] == 8.0


def test_a_pair_with_an_enormous_factor_does_not_turn(tmp_path: Path) -> None:
    """As in Gemma 4's files; sines are exactly 0, wherever a token stands."""

    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        data = np.array([1.0] * 4 + [1e30] * 12, np.float32)
        tensors["rope_freqs.weight"] = Tensor("F32", data.shape, data.view(np.uint8))

    file = rewrite(model_path("llama_rope_freqs"), tmp_path / "still.gguf", change)
    rope = rope_of(spec_of(file))
    assert rope.factors == (1.0,) * 4 + (math.inf,) * 12
    table = rope_table(rope, 5000)
    plain = rope_table(replace(rope, factors=()), 5000)
    np.testing.assert_array_equal(table[:, :4], plain[:, :4])
    np.testing.assert_array_equal(table[:, 4:], np.broadcast_to([1.0, 0.0], (5000, 12, 2)))


def test_longrope_has_two_rows_of_factors() -> None:
    spec = spec_of(model_path("llama_longrope_long"))
    rope = rope_of(spec)
    assert rope.scaling == "longrope" and rope.original_context == 32
    assert len(rope.factors) == len(rope.long_factors) == rope.dim // 2
    assert rope.factors[1] < rope.long_factors[1]
    stretch = 1 + math.log(spec.context_length / 32) / math.log(32)
    assert rope.attention_factor == pytest.approx(math.sqrt(stretch))


def test_longrope_without_an_attention_factor_has_that_of_its_paper(tmp_path: Path) -> None:
    plain = rope_of(spec_of(model_path("llama_longrope_long"))).attention_factor
    silent = changed(tmp_path, "llama_longrope_long", rope__scaling__attn_factor=None)
    assert rope_of(silent).attention_factor == pytest.approx(plain)


@pytest.mark.parametrize("key", ["rope__scaling__factor", "rope__scale_linear"])
def test_a_factor_without_a_kind_is_linear(key: str, tmp_path: Path) -> None:
    rope = rope_of(changed(tmp_path, "llama_plain", **{key: 4.0}))
    assert (rope.scaling, rope.factor) == ("linear", 4.0)


def test_yarn_takes_the_attention_factor_of_a_file(tmp_path: Path) -> None:
    ropes = [
        rope_of(changed(tmp_path, "moe_yarn_top1", **{f"rope__scaling__{key}": 1.5}))
        for key in ("yarn_attn_factor", "attn_factor")
    ]
    assert [rope.attention_factor for rope in ropes] == [1.5, 1.5]
    assert rope_of(spec_of(model_path("moe_yarn_top1"))).attention_factor is None


def test_factors_are_not_asked_for_twice(tmp_path: Path) -> None:
    """An architecture of neox style divides by them too; none is left over as unknown."""

    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        data = np.full(16, 2.0, np.float16)
        tensors["rope_freqs.weight"] = Tensor("F16", data.shape, data.view(np.uint8))

    spec = spec_of(rewrite(model_path("moe_plain"), tmp_path / "more.gguf", change))
    assert rope_of(spec).factors == (2.0,) * 16
