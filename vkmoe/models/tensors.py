"""Which tensors of a file a model consists of; every tensor is used or named as ignored.

Names are llama.cpp's. What is made of them is in layer_tensors.py; how tensors are found and
checked is the subject of finder.py.
"""

from __future__ import annotations

from vkmoe.facts import LatentSpec, ModelSpec
from vkmoe.gguf_file import GgufFile
from vkmoe.models.finder import Finder
from vkmoe.models.layer_tensors import (
    AttentionTensors,
    ExpertMatrix,
    FeedForwardTensors,
    LatentTensors,
    LayerTensors,
    ModelTensors,
)
from vkmoe.models.rope_metadata import factor_tensors

__all__ = [
    "AttentionTensors",
    "ExpertMatrix",
    "FeedForwardTensors",
    "LatentTensors",
    "LayerTensors",
    "ModelTensors",
    "read_tensors",
]

# The norm before the feed-forward block is called `ffn_norm` elsewhere.
FEED_FORWARD_NORMS = {"gpt-oss": "post_attention_norm"}


def read_tensors(file: GgufFile, spec: ModelSpec) -> ModelTensors:
    """Find and check every tensor the spec asks for.

    Raises ModelFileError for a missing tensor or a wrong shape, UnsupportedModelError for a type
    that cannot be run or a tensor vkmoe does not know.
    """
    finder = Finder(file)
    width = spec.width
    embeddings = finder.matrix("token_embd.weight", spec.n_vocab, width)
    output_gain = finder.vector("output_norm.weight", width)
    output = (
        embeddings if spec.tied_embeddings else finder.matrix("output.weight", spec.n_vocab, width)
    )
    layers = tuple(_layer(finder, spec, index) for index in range(spec.n_layers))
    for index in range(spec.n_layers, spec.n_layers + spec.n_ahead_layers):
        finder.ignore_layer(index)
    for name in factor_tensors(spec.rope):
        finder.ignore(name)  # read with the spec
    finder.finish()
    return ModelTensors(embeddings, output_gain, output, layers)


def _layer(finder: Finder, spec: ModelSpec, index: int) -> LayerTensors:
    prefix, width = f"blk.{index}.", spec.width
    feed_forward_norm = FEED_FORWARD_NORMS.get(spec.architecture, "ffn_norm")
    gain = finder.vector(prefix + "attn_norm.weight", width)
    attention = (
        _latent(finder, spec, spec.latent, prefix)
        if spec.latent
        else _attention(finder, spec, prefix)
    )
    feed_forward_gain = finder.vector(f"{prefix}{feed_forward_norm}.weight", width)
    experts = spec.experts
    if experts is None or not spec.has_experts(index):
        biased, inner = spec.feed_forward_bias, spec.feed_forward_width
        block = _block(finder, prefix, "", inner, width, biased)
        return LayerTensors(gain, attention, feed_forward_gain, block)
    n_experts, shared, gated = experts.n_experts, experts.shared_width, experts.shared_gate
    router = prefix + "ffn_gate_inp"
    return LayerTensors(
        attention_gain=gain,
        attention=attention,
        feed_forward_gain=feed_forward_gain,
        feed_forward=_experts(finder, spec, prefix),
        router=finder.matrix(router + ".weight", n_experts, width),
        router_bias=finder.vector(router + ".bias", n_experts) if experts.router_bias else None,
        selection_bias=finder.vector(prefix + "exp_probs_b.bias", n_experts)
        if experts.selection_bias
        else None,
        shared=_block(finder, prefix, "_shexp", shared, width) if shared else None,
        shared_gate=finder.row(router + "_shexp.weight", width) if gated else None,
    )


def _attention(finder: Finder, spec: ModelSpec, prefix: str) -> AttentionTensors:
    width, q_width = spec.width, spec.n_heads * spec.head_dim
    kv_width = spec.n_kv_heads * spec.head_dim
    sizes = {"q": q_width, "k": kv_width, "v": kv_width}
    q, k, v = (
        finder.matrix(f"{prefix}attn_{name}.weight", rows, width) for name, rows in sizes.items()
    )
    q_gain = k_gain = None
    if spec.qk_norm != "none":
        per_head = spec.qk_norm == "per_head"
        q_gain, k_gain = (
            finder.vector(f"{prefix}attn_{x}_norm.weight", spec.head_dim if per_head else sizes[x])
            for x in ("q", "k")
        )
    biases = [
        finder.vector(f"{prefix}attn_{name}.bias", rows)
        for name, rows in sizes.items()
        if spec.qkv_bias
    ]
    output = prefix + "attn_output"
    return AttentionTensors(
        q=q,
        k=k,
        v=v,
        output=finder.matrix(output + ".weight", width, q_width),
        q_gain=q_gain,
        k_gain=k_gain,
        qkv_bias=tuple(biases),
        output_bias=finder.vector(output + ".bias", width) if spec.output_bias else None,
        sinks=finder.vector(prefix + "attn_sinks.weight", spec.n_heads) if spec.sinks else None,
    )


def _latent(finder: Finder, spec: ModelSpec, latent: LatentSpec, prefix: str) -> LatentTensors:
    width, heads, rank = spec.width, spec.n_heads, latent.q_rank
    q_name = "attn_q_b" if rank else "attn_q"
    k_up = v_up = kv_up = None
    if finder.has(prefix + "attn_k_b.weight"):
        k_up = finder.matrix(prefix + "attn_k_b.weight", heads, latent.kv_rank, latent.nope_dim)
        v_up = finder.matrix(prefix + "attn_v_b.weight", heads, latent.value_dim, latent.kv_rank)
        finder.ignore(prefix + "attn_kv_b.weight")  # the same once more
    else:
        rows = heads * (latent.nope_dim + latent.value_dim)
        kv_up = finder.matrix(prefix + "attn_kv_b.weight", rows, latent.kv_rank)
    return LatentTensors(
        n_heads=heads,
        shape=latent,
        q=finder.matrix(f"{prefix}{q_name}.weight", heads * latent.query_dim, rank or width),
        kv=finder.matrix(prefix + "attn_kv_a_mqa.weight", latent.row, width),
        kv_gain=finder.vector(prefix + "attn_kv_a_norm.weight", latent.kv_rank),
        output=finder.matrix(prefix + "attn_output.weight", width, heads * latent.value_dim),
        q_down=finder.matrix(prefix + "attn_q_a.weight", rank, width) if rank else None,
        q_gain=finder.vector(prefix + "attn_q_a_norm.weight", rank) if rank else None,
        k_up=k_up,
        v_up=v_up,
        kv_up=kv_up,
    )


def _block(
    finder: Finder, prefix: str, suffix: str, inner: int, width: int, biased: bool = False
) -> FeedForwardTensors:
    """A block that every token uses."""
    shapes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    gate, up, down = (
        ExpertMatrix((finder.matrix(f"{prefix}ffn_{name}{suffix}.weight", *shape),), 1, *shape)
        for name, shape in shapes.items()
    )
    biases = [
        ExpertMatrix((finder.vector(f"{prefix}ffn_{name}.bias", rows),), 1, 1, rows)
        for name, (rows, _) in shapes.items()
        if biased
    ]
    return FeedForwardTensors(gate, up, down, tuple(biases))


def _experts(finder: Finder, spec: ModelSpec, prefix: str) -> FeedForwardTensors:
    """The routed experts: one tensor of all, or, in old files, one of each."""
    experts, width = spec.experts, spec.width
    assert experts is not None, spec.name
    n, inner = experts.n_experts, experts.width
    shapes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    matrices = []
    for name, shape in shapes.items():
        single = [f"{prefix}ffn_{name}.{expert}.weight" for expert in range(n)]
        if finder.has(single[0]):
            parts = finder.alike(single, *shape)
        else:
            parts = (finder.matrix(f"{prefix}ffn_{name}_exps.weight", n, *shape),)
        matrices.append(ExpertMatrix(parts, n, *shape))
    biases = [
        ExpertMatrix((finder.vector(f"{prefix}ffn_{name}_exps.bias", n, shape[0]),), n, 1, shape[0])
        for name, shape in shapes.items()
        if experts.biases
    ]
    gate, up, down = matrices
    return FeedForwardTensors(gate, up, down, tuple(biases))
