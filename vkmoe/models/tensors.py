"""This module says which tensors of a file a model consists of; each is used or named as ignored.

A tensor of a layer is declared once, as a row of a table; that it is found and checked, counted and
placed follows from the row. Names are llama.cpp's. Shapes are NumPy's: [rows, columns], rows being
outputs. Does not read what tensors hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vkmoe.errors import UnsupportedModelError
from vkmoe.facts import (
    AttentionSpec,
    DeltaNetSpec,
    DenseSpec,
    ExpertSpec,
    FeedForward,
    LatentSpec,
    LayerSpec,
    ModelSpec,
)
from vkmoe.gguf_file import GgufFile, TensorInfo
from vkmoe.models.tensor_finder import TensorFinder
from vkmoe.models.trunk_tensors import (
    Columns,
    FileMatrix,
    FileVector,
    heads_of,
    read_scales,
    split_heads,
)
from vkmoe.models.weights import AttentionWeights, DeltaNetWeights, LatentWeights, MixerWeights
from vkmoe.quants import TYPES

ROPE_FACTORS = "rope_freqs.weight"  # divisors for any context, as Llama 3.1 has them
LONGROPE_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")

# The norm before the feed-forward block is called `ffn_norm` elsewhere.
_FEED_FORWARD_NORMS = dict.fromkeys(
    ("glm4moe", "gpt-oss", "qwen35", "qwen35moe", "qwen3next"), "post_attention_norm"
)
# What chooses positions to attend to. Where all are chosen it changes nothing.
_INDEXER = ("k_norm.weight", "k_norm.bias", "proj.weight", "attn_k.weight", "attn_q_b.weight")


@dataclass(frozen=True)
class ExpertMatrix:
    """Describes a matrix of a feed-forward block; a vector of biases is one of a single row.

    `parts` is one tensor that has the blocks of all experts behind one another, or one of each.
    Where another matrix is in it too, an expert has `pitch` rows, and this matrix those from
    `first` on.
    """

    parts: tuple[TensorInfo, ...]
    n_experts: int
    n_rows: int  # of one expert
    n_columns: int
    first: int = 0
    pitch: int = 0  # 0: its own rows alone
    scale_tensors: tuple[TensorInfo | None, ...] = (None,)  # of each part

    def scales(self, file: GgufFile) -> NDArray[np.float32]:
        """Read what the weights of each expert are multiplied by: [n_experts]."""
        n = self.n_experts // len(self.scale_tensors)
        return np.concatenate([read_scales(file, each, n) for each in self.scale_tensors])

    @property
    def type(self) -> str:
        return self.parts[0].type

    def of_expert(self, expert: int) -> tuple[int, int]:
        """Say which of `parts` an expert's rows lie in, and which of its rows is the first."""
        if len(self.parts) > 1:
            return expert, self.first
        return 0, expert * (self.pitch or self.n_rows) + self.first


@dataclass(frozen=True)
class FeedForwardTensors:
    """Holds a feed-forward block: routed experts, a shared one, or that of a layer without any."""

    matrices: tuple[ExpertMatrix, ...]  # gate, up and down
    biases: tuple[ExpertMatrix, ...] = ()  # of gate, up and down; or none

    @property
    def n_experts(self) -> int:
        return self.matrices[0].n_experts

    @property
    def table_bytes(self) -> int:
        """Count the bytes of addresses that lead to its experts where these stay in place."""
        return 8 * self.n_experts if self.n_experts > 1 else 0


TrunkTensor = FileMatrix | FileVector | FeedForwardTensors
Row = tuple[str, TrunkTensor]  # of a table: a field of a class of weights, and what it is made of


@dataclass(frozen=True)
class LayerTensors:
    """Holds the tensors of a layer; memory has `block`, or the experts, before the other parts.

    These are in memory's order, by the fields of their weights.
    """

    block: FeedForwardTensors
    has_experts: bool  # in `block`
    mixer: Mapping[str, TrunkTensor]
    mixer_weights: type[MixerWeights]
    feed_forward: Mapping[str, TrunkTensor]  # what there is of FeedForwardWeights besides `block`
    input: Mapping[str, TrunkTensor]  # of InputWeights; empty: a token brings nothing to the layer

    @property
    def trunk(self) -> tuple[TrunkTensor, ...]:
        """List what every token reads, in the order of memory."""
        block = () if self.has_experts else (self.block,)
        parts = self.mixer, self.feed_forward, self.input
        return (*block, *(tensor for part in parts for tensor in part.values()))


@dataclass(frozen=True)
class AheadTensors:
    """Holds what guesses tokens ahead, a layer or a drafter; where it has no matrix of its own that
    a model has too, that is None, and so is what a drafter alone has, or a layer.

    Its first matrix reads the embedding of a token and a state: here it is two.
    """

    layers: tuple[LayerTensors, ...]
    token: FileMatrix
    state: FileMatrix
    token_gain: FileVector | None = None
    state_gain: FileVector | None = None
    output_gain: FileVector | None = None
    embeddings: FileMatrix | None = None
    output: FileMatrix | None = None
    next_state: FileMatrix | None = None

    @property
    def experts(self) -> tuple[FeedForwardTensors, ...]:
        """List the experts of its layers."""
        return tuple(layer.block for layer in self.layers if layer.has_experts)

    @property
    def trunk(self) -> tuple[TrunkTensor, ...]:
        """List all, in the order of memory: with the experts, which are there once and for all."""
        layers = [tensor for layer in self.layers for tensor in layer.trunk]
        own = (self.token, self.state, self.token_gain, self.state_gain, self.output_gain)
        shared = (self.embeddings, self.output, self.next_state)
        return (*self.experts, *layers, *(x for x in (*own, *shared) if x is not None))


@dataclass(frozen=True)
class InputTensors:
    """Holds the tensors of `TokenInputs`. Of the table a token reads a row, so that it may lie in
    host memory."""

    table: FileMatrix
    projection: FileMatrix
    gain: FileVector


@dataclass(frozen=True)
class ModelTensors:
    """Holds all tensors of a model; `output` is `embeddings` when they are tied."""

    embeddings: FileMatrix
    output_gain: FileVector
    output: FileMatrix
    layers: tuple[LayerTensors, ...]
    ahead: AheadTensors | None = None  # to guess tokens with, where that is wanted
    inputs: InputTensors | None = None  # what a token brings to all layers besides the state

    @property
    def expert_layers(self) -> Iterator[FeedForwardTensors]:
        """List the routed experts, layer by layer."""
        return (layer.block for layer in self.layers if layer.has_experts)

    @property
    def trunk(self) -> Iterator[TrunkTensor]:
        """List what every token reads, in the order of memory."""
        yield self.embeddings
        if self.inputs is not None:
            yield self.inputs.table
        for layer in self.layers:
            yield from layer.trunk
        if self.inputs is not None:
            yield from (self.inputs.projection, self.inputs.gain)
        yield self.output_gain
        if self.output is not self.embeddings:
            yield self.output
        if self.ahead is not None:
            yield from self.ahead.trunk


def read_tensors(file: GgufFile, spec: ModelSpec) -> ModelTensors:
    """Find and check every tensor the spec asks for.

    Raises ModelFileError, or UnsupportedModelError for a type or a tensor vkmoe does not know.
    """
    find = TensorFinder(file)
    width = spec.width
    embeddings = find.matrix("token_embd.weight", spec.n_vocab, width)
    output_gain = find.vector("output_norm.weight", width)
    output = (
        embeddings if spec.tied_embeddings else find.matrix("output.weight", spec.n_vocab, width)
    )
    layers = tuple(
        _layer(find.within(f"blk.{index}."), spec, layer) for index, layer in enumerate(spec.layers)
    )
    for index in range(spec.n_layers, spec.n_layers + spec.n_ahead_layers):
        find.ignore_layer(index)
    for rope in spec.ropes:  # these were read with the spec
        is_long = rope.scaling == "longrope"
        for name in LONGROPE_FACTORS if is_long else (ROPE_FACTORS,) * bool(rope.factors):
            find.ignore(name)
    inputs = _inputs(find, spec) if spec.input_width else None
    find.finish()
    return ModelTensors(embeddings, output_gain, output, layers, inputs=inputs)


def _inputs(find: TensorFinder, spec: ModelSpec) -> InputTensors:
    """Find what a token brings to all layers.

    The sum of a row of the table and of what is normed is divided by the root of 2: the gain is
    here, and the row where it is looked up.
    """
    whole = spec.n_layers * spec.input_width
    gain = find.vector("per_layer_proj_norm.weight", spec.input_width)
    return InputTensors(
        find.matrix("per_layer_token_embd.weight", spec.n_vocab, whole),
        find.matrix("per_layer_model_proj.weight", whole, spec.width),
        replace(gain, factor=2**-0.5),
    )


def read_ahead(file: GgufFile, spec: ModelSpec) -> AheadTensors:
    """Find and check the layer that guesses tokens ahead, behind those of a model, or a drafter.

    The file is the model's, or one that has this layer alone, or a drafter's. Raises as
    `read_tensors` does.
    """
    if spec.drafter is not None:
        return _read_drafter(file, spec, spec.drafter)
    assert spec.ahead is not None, spec.name
    prefix, width = f"blk.{spec.n_layers}.", spec.width
    find = TensorFinder(file).within(prefix)
    own = {
        name: find.matrix(f"nextn.{name}.weight", spec.n_vocab, width)
        for name in ("embed_tokens", "shared_head_head")
        if find.has(f"nextn.{name}.weight")
    }
    norm = "nextn.shared_head_norm.weight"
    found = AheadTensors(
        (_layer(find, spec, spec.ahead),),
        *_halves(find, "nextn.eh_proj.weight", width, width),
        find.vector("nextn.enorm.weight", width),
        find.vector("nextn.hnorm.weight", width),
        find.vector(norm, width) if find.has(norm) else None,
        own.get("embed_tokens"),
        own.get("shared_head_head"),
    )
    find.finish(prefix)
    return found


def _read_drafter(file: GgufFile, spec: ModelSpec, drafter: ModelSpec) -> AheadTensors:
    """Find and check the tensors of a drafter, which are all of its file."""
    find, width = TensorFinder(file), drafter.width
    for name in ("masked_embd_centroids.weight", "masked_embd_ordering", ROPE_FACTORS):
        find.ignore(name)  # what chooses tokens of which logits are computed: here all are
    found = AheadTensors(
        tuple(
            _layer(find.within(f"blk.{index}."), drafter, layer)
            for index, layer in enumerate(drafter.layers)
        ),
        *_halves(find, "nextn.pre_projection.weight", width, spec.width),
        output_gain=find.vector("output_norm.weight", width),
        output=find.matrix("token_embd.weight", spec.n_vocab, width),
        next_state=find.matrix("nextn.post_projection.weight", spec.width, width),
    )
    find.finish()
    return found


def _halves(find: TensorFinder, name: str, n_rows: int, n_columns: int) -> tuple[Columns, Columns]:
    """Find a matrix that reads an embedding and a state, of so many columns each: here it is two.

    Raises UnsupportedModelError where blocks of its type have columns of both.
    """
    both = find.matrix(name, n_rows, 2 * n_columns)
    whole, scale = both.tensor, both.scale_tensor
    if n_columns % TYPES[whole.type].block_weights:
        raise UnsupportedModelError(
            f"{find.path}: {whole.name} is of type {whole.type}, and has {n_columns} columns of "
            "each of two inputs, not a multiple of its blocks",
            "leave out --draft mtp",
        )
    return (
        Columns(whole, 0, n_columns, scale_tensor=scale),
        Columns(whole, n_columns, 2 * n_columns, scale_tensor=scale),
    )


def _layer(find: TensorFinder, spec: ModelSpec, layer: LayerSpec) -> LayerTensors:
    width = spec.width
    mixer, has_experts = layer.mixer, isinstance(layer.feed_forward, ExpertSpec)
    weights: type[MixerWeights]
    if isinstance(mixer, DeltaNetSpec):
        weights, tensors = DeltaNetWeights, dict(_delta_net(find, mixer, width))
    elif isinstance(mixer, LatentSpec):
        weights, tensors = LatentWeights, dict(_latent(find, mixer, width))
    else:
        weights, tensors = AttentionWeights, dict(_attention(find, mixer, width))
    block = _block(find, layer.feed_forward, width, "_exps" * has_experts)
    norm = _FEED_FORWARD_NORMS.get(spec.architecture, "ffn_norm")
    others = dict(_feed_forward(find, layer.feed_forward, width, norm))
    if layer.post_norms:
        tensors["post_gain"] = find.vector("post_attention_norm.weight", width)
        others["post_gain"] = find.vector("post_ffw_norm.weight", width)
    inputs = dict(_input(find, spec.input_width, width)) if spec.input_width else {}
    if layer.scaled:
        last = inputs or others
        last["scale"] = find.vector("layer_output_scale.weight", 1)
    return LayerTensors(block, has_experts, tensors, weights, others, inputs)


# ----- the table: every tensor of a layer once, with its field, role, file name and shape -----
# A row is there if the spec says so. Fields are those of the classes in weights.py. The order is
# that of memory, but for a layer's block or experts, which come first.


def _attention(find: TensorFinder, spec: AttentionSpec, width: int) -> Iterator[Row]:
    q, kv = spec.q_width, spec.kv_width
    per_head = spec.qk_norm != "full_width"
    yield "gain", find.vector("attn_norm.weight", width)
    yield from _projections(find, spec, width)
    yield "output", find.matrix("attn_output.weight", width, q)
    if spec.qk_norm != "none":
        yield "q_gain", find.vector("attn_q_norm.weight", spec.head_dim if per_head else q)
        if spec.own_kv:
            yield "k_gain", find.vector("attn_k_norm.weight", spec.head_dim if per_head else kv)
    if spec.qkv_bias:
        sizes = {"attn_q.bias": q, "attn_k.bias": kv, "attn_v.bias": kv}
        found = [find.vector(name, size) for name, size in sizes.items()]
        yield "qkv_bias", FileVector(tuple(vector.tensors[0] for vector in found))
    if spec.output_bias:
        yield "output_bias", find.vector("attn_output.bias", width)
    if spec.sinks:
        yield "sinks", find.vector("attn_sinks.weight", spec.n_heads)


def _projections(find: TensorFinder, spec: AttentionSpec, width: int) -> Iterator[Row]:
    """List what projects queries, keys, values and gates: matrices apart, or in one tensor."""
    q, kv = spec.q_width, spec.kv_width
    if not spec.gated and find.has("attn_qkv.weight"):
        whole = find.matrix("attn_qkv.weight", q + 2 * kv, width)
        for field, first, end in (("q", 0, q), ("k", q, q + kv), ("v", q + kv, q + 2 * kv)):
            yield field, heads_of(whole, 1, first, end)
        return
    if spec.gated:  # a head's query and its gate lie behind one another
        both = find.matrix("attn_q.weight", 2 * q, width)
        for field, first in (("q", 0), ("gate", spec.head_dim)):
            yield field, heads_of(both, spec.n_heads, first, first + spec.head_dim)
    else:
        yield "q", find.matrix("attn_q.weight", q, width)
    keys, values = "attn_k.weight", "attn_v.weight"
    if not spec.own_kv:
        for name in (keys, values, "attn_k_norm.weight"):  # which files may have all the same
            find.ignore(name)
        return
    yield "k", find.matrix(keys, kv, width)
    # Where values are normed otherwise than keys, both may be made of one projection.
    yield "v", find.matrix(keys if spec.value_norm and not find.has(values) else values, kv, width)


def _delta_net(find: TensorFinder, spec: DeltaNetSpec, width: int) -> Iterator[Row]:
    heads, out = spec.n_heads, spec.attended_width
    yield "gain", find.vector("attn_norm.weight", width)
    yield "qkv", find.matrix("attn_qkv.weight", spec.n_channels, width)
    yield "gate", find.matrix("attn_gate.weight", out, width)
    if find.has("ssm_ba.weight"):  # b of a key head's heads, then a of these
        both, n = find.matrix("ssm_ba.weight", 2 * heads, width), heads // spec.n_key_heads
        for field, first in (("beta", 0), ("alpha", n)):
            yield field, heads_of(both, spec.n_key_heads, first, first + n)
    else:
        yield "beta", find.matrix("ssm_beta.weight", heads, width)
        yield "alpha", find.matrix("ssm_alpha.weight", heads, width)
    yield "output", find.matrix("ssm_out.weight", width, out)
    yield "taps", find.vector("ssm_conv1d.weight", spec.n_channels, spec.n_taps)
    yield "scales", find.vector("ssm_a", heads)
    yield "biases", find.vector("ssm_dt.bias", heads)
    yield "out_gain", find.vector("ssm_norm.weight", spec.head_dim)


def _latent(find: TensorFinder, spec: LatentSpec, width: int) -> Iterator[Row]:
    heads, rank, q_rank = spec.n_heads, spec.kv_rank, spec.q_rank
    queries = heads * spec.query_dim
    yield "gain", find.vector("attn_norm.weight", width)
    if q_rank:
        yield "q_down", find.matrix("attn_q_a.weight", q_rank, width)
        yield "q", find.matrix("attn_q_b.weight", queries, q_rank)
    else:
        yield "q", find.matrix("attn_q.weight", queries, width)
    yield "kv", find.matrix("attn_kv_a_mqa.weight", spec.row, width)
    if find.has("attn_k_b.weight"):
        yield "k_up", find.matrix("attn_k_b.weight", heads, rank, spec.nope_dim)
        yield "v_up", find.matrix("attn_v_b.weight", heads, spec.value_dim, rank)
        find.ignore("attn_kv_b.weight")  # the same once more
    else:
        rows = heads * (spec.nope_dim + spec.value_dim)
        both = split_heads(find.matrix("attn_kv_b.weight", rows, rank), spec)
        yield from zip(("k_up", "v_up"), both, strict=True)
    yield "output", find.matrix("attn_output.weight", width, heads * spec.value_dim)
    if q_rank:
        yield "q_gain", find.vector("attn_q_a_norm.weight", q_rank)
    yield "kv_gain", find.vector("attn_kv_a_norm.weight", rank)
    for name in _INDEXER if spec.indexer else ():
        find.ignore(f"indexer.{name}")


def _feed_forward(find: TensorFinder, spec: FeedForward, width: int, norm: str) -> Iterator[Row]:
    """List what there is besides the block or the experts."""
    if isinstance(spec, ExpertSpec) and spec.beside_width:
        yield from _beside(find, spec, width)
    else:
        yield "gain", find.vector(f"{norm}.weight", width)
    if isinstance(spec, DenseSpec):
        return
    yield "router", find.matrix("ffn_gate_inp.weight", spec.n_experts, width)
    if spec.router_bias:
        yield "router_bias", find.vector("ffn_gate_inp.bias", spec.n_experts)
    if spec.selection_bias:
        name = "exp_probs_b" if find.has("exp_probs_b") else "exp_probs_b.bias"
        yield "selection_bias", find.vector(name, spec.n_experts)
    if spec.output_scales:
        yield "output_scales", find.vector("ffn_down_exps.scale", spec.n_experts)
    if spec.shared_width:
        yield "shared", _block(find, DenseSpec(spec.shared_width), width, "_shexp")
    if spec.shared_gate:
        yield "shared_gate", find.matrix("ffn_gate_inp_shexp.weight", 1, width)


def _beside(find: TensorFinder, spec: ExpertSpec, width: int) -> Iterator[Row]:
    """List a dense block beside experts, and the norms before and behind both."""
    yield "gain", find.vector("pre_ffw_norm_2.weight", width)
    yield "beside_gain", find.vector("ffn_norm.weight", width)
    yield "beside", _block(find, DenseSpec(spec.beside_width), width)
    yield "beside_post_gain", find.vector("post_ffw_norm_1.weight", width)
    yield "experts_post_gain", find.vector("post_ffw_norm_2.weight", width)
    scale = find.vector("ffn_gate_inp.scale", width)
    yield "router_gain", replace(scale, factor=width**-0.5)


def _input(find: TensorFinder, inner: int, width: int) -> Iterator[Row]:
    """List what adds that which a token brings to the layer."""
    yield "gate", find.matrix("inp_gate.weight", inner, width)
    yield "output", find.matrix("proj.weight", width, inner)
    yield "post_gain", find.vector("post_norm.weight", width)


def _block(
    find: TensorFinder, spec: FeedForward, width: int, suffix: str = ""
) -> FeedForwardTensors:
    """Find the tensors of a block that every token uses, or of the routed experts.

    Experts have one tensor of all, or, in old files, one of each.
    """
    of_experts, inner = isinstance(spec, ExpertSpec), spec.width
    n, biased = (spec.n_experts, spec.biases) if isinstance(spec, ExpertSpec) else (1, spec.bias)
    leading = (n,) * of_experts
    shapes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    matrices: list[ExpertMatrix] = []
    biases: list[ExpertMatrix] = []
    for name, shape in shapes.items():
        single = [f"ffn_{name}.{expert}.weight" for expert in range(n)]
        fused = f"ffn_gate_up{suffix}.weight"
        first = pitch = 0
        if of_experts and name != "down" and find.has(fused):
            parts = [find.matrix(fused, *leading, 2 * inner, width)]
            first, pitch = inner * (name == "up"), 2 * inner
        elif of_experts and find.has(single[0]):
            parts = find.alike(single, *shape)
        else:
            parts = [find.matrix(f"ffn_{name}{suffix}.weight", *leading, *shape)]
        scales = tuple(part.scale_tensor for part in parts)
        if name == "down" and isinstance(spec, ExpertSpec) and spec.output_scales:
            scales = (None,)  # the router multiplies by them
        tensors = tuple(part.tensor for part in parts)
        matrices.append(ExpertMatrix(tensors, n, *shape, first, pitch, scales))
    for name, (rows, _) in shapes.items() if biased else ():
        found = find.vector(f"ffn_{name}{suffix}.bias", *leading, rows)
        biases.append(ExpertMatrix(found.tensors, n, 1, rows))
    return FeedForwardTensors(tuple(matrices), tuple(biases))
