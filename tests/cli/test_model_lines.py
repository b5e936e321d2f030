"""What `vkmoe info` says of the shape of models, from specs and tensors of every kind."""

from __future__ import annotations

from dataclasses import replace

from tests.models.changed_specs import of_layers, with_mixer
from tests.models.invented import ATTENTION, EXPERTS, SPEC
from vkmoe.cli.info import spec_lines, type_lines
from vkmoe.facts import DenseSpec, LatentSpec, LayerSpec, RopeSpec
from vkmoe.gguf_file import TensorInfo
from vkmoe.models.tensors import (
    ExpertMatrix,
    FeedForwardTensors,
    LayerTensors,
    ModelTensors,
)
from vkmoe.models.trunk_tensors import FileMatrix, FileVector
from vkmoe.models.weights import AttentionWeights


def tensor(kind: str) -> TensorInfo:
    return TensorInfo("invented", kind, (256, 256), 0, 0)


def model(*types: tuple[str, str, str]) -> ModelTensors:
    """Layers of experts whose gate, up and down have these types."""
    one = tensor("F32")
    matrix, vector = FileMatrix(one), FileVector((one,))
    layers = []
    for kinds in types:
        matrices = tuple(ExpertMatrix((tensor(kind),), 1, 256, 256) for kind in kinds)
        layers.append(
            LayerTensors(FeedForwardTensors(matrices), True, {}, AttentionWeights, {}, {})
        )
    return ModelTensors(matrix, vector, matrix, tuple(layers))


def test_a_plain_mixture_of_experts() -> None:
    assert spec_lines(SPEC) == [
        "layers        4 of width 512",
        "attention     grouped, 4 heads of 64, 2 for keys and values, normed q and k",
        "context       64 tokens",
        "experts       8 per layer, 2 used for each token, width 256",
        "routing       softmax, weights add up to 1",
    ]


def test_windows_sinks_biases_and_scaling() -> None:
    """As of gpt-oss."""
    whole = replace(
        ATTENTION,
        qk_norm="none",
        qkv_bias=True,
        sinks=True,
        rope=RopeSpec(64, scaling="yarn", factor=32.0, original_context=4096),
    )
    biased, windowed = replace(EXPERTS, biases=True), replace(whole, window=128)
    spec = replace(SPEC, layers=(LayerSpec(windowed, biased), LayerSpec(whole, biased)) * 2)
    assert spec_lines(spec)[1:5] == [
        "attention     grouped, 4 heads of 64, 2 for keys and values, biases, sinks",
        "              a token sees the last 128 tokens in 2 layers, all in 2 layers",
        "context       64 tokens (yarn scaling x 32 from 4096)",
        "experts       8 per layer, 2 used for each token, width 256, with biases",
    ]
    freqs = spec_lines(with_mixer(spec, rope=RopeSpec(64, factors=(8.0,) * 32)))
    assert "context       64 tokens (rotary frequencies scaled one by one)" in freqs
    everywhere = spec_lines(with_mixer(spec, window=128))
    assert "              a token sees the last 128 tokens in 4 layers" in everywhere


def test_attention_of_several_kinds() -> None:
    other = replace(ATTENTION, n_kv_heads=4, qk_norm="none")
    kinds = [LayerSpec(ATTENTION, EXPERTS), LayerSpec(other, EXPERTS)]
    assert spec_lines(replace(SPEC, layers=(*kinds, kinds[0])))[1:3] == [
        "attention     grouped, 4 heads of 64, 2 for keys and values, normed q and k in 2 layers",
        "              full, 4 heads of 64, 4 for keys and values in 1 layer",
    ]


def test_latent_attention_shared_experts_and_groups() -> None:
    """As of DeepSeek."""
    experts = replace(
        EXPERTS, gating="sigmoid", scale=2.5, shared_width=512, selection_bias=True, n_groups=8,
        n_groups_used=4,
    )  # fmt: skip
    latent = LatentSpec(4, 512, nope_dim=128, value_dim=128, rope=RopeSpec(64), q_rank=1536)
    dense = DenseSpec(256)
    spec = of_layers(SPEC, latent, dense, experts, experts, experts)
    assert spec_lines(spec)[1:] == [
        "attention     latent, 4 heads of 192; keys and values of a token compressed to 576 "
        "numbers, queries to 1536",
        "context       64 tokens",
        "feed-forward  dense in the first layer, width 256; then experts",
        "experts       8 per layer, 2 used for each token, width 256",
        "shared expert width 512, used for every token",
        "routing       sigmoid, from the best 4 of 8 groups, chosen with a bias, weights add up "
        "to 1, scaled by 2.5",
    ]
    gated = of_layers(SPEC, latent, dense, dense, dense, replace(experts, shared_gate=True))
    lines = "\n".join(spec_lines(gated))
    assert "the first 3 layers" in lines and "weighted by a gate of its own" in lines


def test_a_dense_model_has_no_experts() -> None:
    mixer = replace(ATTENTION, n_kv_heads=4, qk_norm="none")
    dense = of_layers(SPEC, mixer, *[DenseSpec(256)] * 4)
    assert spec_lines(dense)[1:] == [
        "attention     full, 4 heads of 64, 4 for keys and values",
        "context       64 tokens",
        "feed-forward  dense, width 256",
    ]


def test_types_of_experts_and_where_they_differ() -> None:
    assert type_lines(model(("Q4_0", "Q4_0", "Q4_0"))) == ["expert types  Q4_0"]
    medium = model(("Q4_K", "Q4_K", "Q6_K"), ("Q4_K", "Q4_K", "Q4_K"), ("Q4_K", "Q4_K", "Q6_K"))
    assert type_lines(medium) == [
        "expert types  gate and up Q4_K, down Q6_K in 2 layers",
        "expert types  Q4_K in 1 layer",
    ]
    assert type_lines(model(("Q2_K", "Q3_K", "IQ4_XS"))) == [
        "expert types  gate Q2_K, up Q3_K, down IQ4_XS"
    ]
    assert not type_lines(model())
