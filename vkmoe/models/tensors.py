"""Which tensors of a file a model consists of, layer by layer; every tensor is used or named as
ignored.

Names are llama.cpp's. Shapes are NumPy's: [rows, columns], rows being outputs. Does not read what
tensors hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vkmoe.errors import ModelFileError, UnsupportedModelError
from vkmoe.facts import LatentSpec, ModelSpec, RopeSpec
from vkmoe.gguf_file import GgufFile, TensorInfo
from vkmoe.gguf_file.header import shown
from vkmoe.quants import HAS_KERNEL, TYPES, can_load

__all__ = [
    "LONGROPE_FACTORS",
    "ROPE_FACTORS",
    "VECTOR_TYPES",
    "AttentionTensors",
    "ExpertMatrix",
    "FeedForwardTensors",
    "LatentTensors",
    "LayerTensors",
    "ModelTensors",
    "read_tensors",
]

VECTOR_TYPES = frozenset({"F32", "F16", "BF16"})  # a file's types of what is used as float32
ROPE_FACTORS = "rope_freqs.weight"  # divisors for any context, as Llama 3.1 has them
LONGROPE_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")

# The norm before the feed-forward block is called `ffn_norm` elsewhere.
_FEED_FORWARD_NORMS = {"gpt-oss": "post_attention_norm"}
# What converters put into one tensor where they are asked to.
_FUSED = {"attn_q": "attn_qkv", "ffn_gate_exps": "ffn_gate_up_exps"}
_HINT = "the file was converted wrongly, is damaged, or needs a newer vkmoe"


@dataclass(frozen=True)
class ExpertMatrix:
    """One matrix of a feed-forward block, or a vector of biases as one of a single row.

    `parts` is one tensor that has the blocks of all experts behind one another, or one of each.
    """

    parts: tuple[TensorInfo, ...]
    n_experts: int
    n_rows: int  # of one expert
    n_columns: int

    @property
    def type(self) -> str:
        return self.parts[0].type

    def of_expert(self, expert: int) -> tuple[int, int]:
        """Say which of `parts` an expert's rows lie in, and which of its rows is the first."""
        return (0, expert * self.n_rows) if len(self.parts) == 1 else (expert, 0)


@dataclass(frozen=True)
class FeedForwardTensors:
    """A feed-forward block: routed experts, a shared one, or the block of a layer without any."""

    gate: ExpertMatrix
    up: ExpertMatrix
    down: ExpertMatrix
    biases: tuple[ExpertMatrix, ...] = ()  # of gate, up and down; or none

    @property
    def matrices(self) -> tuple[ExpertMatrix, ...]:
        return (self.gate, self.up, self.down)

    @property
    def n_experts(self) -> int:
        return self.gate.n_experts


@dataclass(frozen=True)
class AttentionTensors:
    """The tensors of grouped-query attention."""

    q: TensorInfo
    k: TensorInfo
    v: TensorInfo
    output: TensorInfo
    q_gain: TensorInfo | None = None
    k_gain: TensorInfo | None = None
    qkv_bias: tuple[TensorInfo, ...] = ()  # of q, k and v; or none
    output_bias: TensorInfo | None = None
    sinks: TensorInfo | None = None

    @property
    def matrices(self) -> tuple[TensorInfo, ...]:
        return (self.q, self.k, self.v, self.output)


@dataclass(frozen=True)
class LatentTensors:
    """The tensors of multi-head latent attention.

    `k_up` [n_heads, kv_rank, nope_dim] and `v_up` [n_heads, value_dim, kv_rank]; older files have
    `kv_up` [n_heads * (nope_dim + value_dim), kv_rank] instead, with the keys' rows transposed.
    """

    n_heads: int
    shape: LatentSpec
    q: TensorInfo  # of the heads, from the hidden state or the compressed queries
    kv: TensorInfo
    kv_gain: TensorInfo
    output: TensorInfo
    q_down: TensorInfo | None = None
    q_gain: TensorInfo | None = None
    k_up: TensorInfo | None = None
    v_up: TensorInfo | None = None
    kv_up: TensorInfo | None = None

    @property
    def matrices(self) -> tuple[TensorInfo, ...]:
        """All matrices but those between the compressed keys and values and the heads."""
        down = (self.q_down,) if self.q_down is not None else ()
        return (*down, self.q, self.kv, self.output)


@dataclass(frozen=True)
class LayerTensors:
    """The tensors of a layer. `router` is None where `feed_forward` is the one block there is."""

    attention_gain: TensorInfo
    attention: AttentionTensors | LatentTensors
    feed_forward_gain: TensorInfo
    feed_forward: FeedForwardTensors
    router: TensorInfo | None = None
    router_bias: TensorInfo | None = None
    selection_bias: TensorInfo | None = None
    shared: FeedForwardTensors | None = None
    shared_gate: TensorInfo | None = None


@dataclass(frozen=True)
class ModelTensors:
    """All tensors of a model; `output` is `embeddings` when they are tied."""

    embeddings: TensorInfo
    output_gain: TensorInfo
    output: TensorInfo
    layers: tuple[LayerTensors, ...]

    @property
    def expert_layers(self) -> Iterator[FeedForwardTensors]:
        """The routed experts, layer by layer."""
        return (layer.feed_forward for layer in self.layers if layer.router is not None)


def read_tensors(file: GgufFile, spec: ModelSpec) -> ModelTensors:
    """Find and check every tensor the spec asks for.

    Raises ModelFileError for a missing tensor or a wrong shape, UnsupportedModelError for a type
    that cannot be run or a tensor vkmoe does not know.
    """
    finder = _Finder(file)
    width = spec.width
    embeddings = finder.matrix("token_embd.weight", spec.n_vocab, width)
    output_gain = finder.vector("output_norm.weight", width)
    output = (
        embeddings if spec.tied_embeddings else finder.matrix("output.weight", spec.n_vocab, width)
    )
    layers = tuple(_layer(finder, spec, index) for index in range(spec.n_layers))
    for index in range(spec.n_layers, spec.n_layers + spec.n_ahead_layers):
        finder.ignore_layer(index)
    for name in _factor_names(spec.rope):
        finder.ignore(name)  # read with the spec
    finder.finish()
    return ModelTensors(embeddings, output_gain, output, layers)


def _factor_names(rope: RopeSpec) -> tuple[str, ...]:
    """The tensors that `rope` was read from, which nothing else needs."""
    if rope.scaling == "longrope":
        return LONGROPE_FACTORS
    return (ROPE_FACTORS,) if rope.factors else ()


def _layer(finder: _Finder, spec: ModelSpec, index: int) -> LayerTensors:
    prefix, width = f"blk.{index}.", spec.width
    feed_forward_norm = _FEED_FORWARD_NORMS.get(spec.architecture, "ffn_norm")
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


def _attention(finder: _Finder, spec: ModelSpec, prefix: str) -> AttentionTensors:
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


def _latent(finder: _Finder, spec: ModelSpec, latent: LatentSpec, prefix: str) -> LatentTensors:
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
    finder: _Finder, prefix: str, suffix: str, inner: int, width: int, biased: bool = False
) -> FeedForwardTensors:
    """Find the tensors of a block that every token uses."""
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


def _experts(finder: _Finder, spec: ModelSpec, prefix: str) -> FeedForwardTensors:
    """Find the routed experts: one tensor of all, or, in old files, one of each."""
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


class _Finder:
    """Finds tensors by name and checks them. Call `finish` when all that are known were asked for.

    Raises ModelFileError for a tensor that is missing or of another shape.
    """

    def __init__(self, file: GgufFile) -> None:
        self._path, self._tensors = file.path, file.tensors
        self._used: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self._tensors

    def ignore(self, name: str) -> None:
        """Count a tensor that changes nothing as used, if it is there."""
        self._used.add(name)

    def ignore_layer(self, index: int) -> None:
        """Count all tensors of a layer that is not run as used."""
        prefix = f"blk.{index}."
        self._used |= {name for name in self._tensors if name.startswith(prefix)}

    def matrix(self, name: str, *shape: int) -> TensorInfo:
        """Find weights [..., rows, columns]. Raises UnsupportedModelError if they cannot be run."""
        tensor = self._find(name, shape)
        if not can_load(tensor.type):
            converted = sorted(kind for kind in TYPES if can_load(kind) and kind not in HAS_KERNEL)
            raise UnsupportedModelError(
                f"{self._path}: {name} is of type {tensor.type}, which vkmoe cannot run",
                f"requantise the model; vkmoe runs {', '.join(sorted(HAS_KERNEL))}, and converts "
                f"{', '.join(converted)}",
            )
        if shape[-1] % 32:
            raise UnsupportedModelError(
                f"{self._path}: {name} has rows of {shape[-1]} weights, not a multiple of 32",
                "vkmoe cannot run this model",
            )
        return tensor

    def alike(self, names: Sequence[str], *shape: int) -> tuple[TensorInfo, ...]:
        """Find matrices of one shape, which must have one type."""
        tensors = tuple(self.matrix(name, *shape) for name in names)
        other = next((tensor for tensor in tensors if tensor.type != tensors[0].type), None)
        if other is not None:
            raise UnsupportedModelError(
                f"{self._path}: {other.name} is of type {other.type}, "
                f"{tensors[0].name} of type {tensors[0].type}",
                "vkmoe needs one type for all experts of a layer; convert the model again",
            )
        return tensors

    def row(self, name: str, width: int) -> TensorInfo:
        """Find a matrix of one row, which files also hold as a vector."""
        tensor = self._tensors.get(name)
        if tensor is not None and len(tensor.shape) == 1:
            return self.matrix(name, width)
        return self.matrix(name, 1, width)

    def vector(self, name: str, *shape: int) -> TensorInfo:
        """Find gains or biases, which are used as float32."""
        tensor = self._find(name, shape)
        if tensor.type not in VECTOR_TYPES:
            raise UnsupportedModelError(f"{self._path}: {name} is of type {tensor.type}", _HINT)
        return tensor

    def finish(self) -> None:
        """Raise UnsupportedModelError for tensors that were not asked for."""
        unknown = sorted(set(self._tensors) - self._used)
        if unknown:
            names = ", ".join(shown(name) for name in unknown[:3]) + (
                f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
            )
            raise UnsupportedModelError(
                f"{self._path}: tensors vkmoe does not know: {names}",
                "leaving them out could change the answer; update vkmoe",
            )

    def _find(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        tensor = self._tensors.get(name)
        if tensor is None:
            self._refuse_fused(name)
            raise ModelFileError(f"{self._path}: tensor {name} is missing", _HINT)
        if tuple(tensor.shape) != shape:
            raise ModelFileError(
                f"{self._path}: {name} has shape {list(tensor.shape)}, expected {list(shape)}",
                _HINT,
            )
        self._used.add(name)
        return tensor

    def _refuse_fused(self, name: str) -> None:
        """Say so where a tensor is not missing but a part of another."""
        prefix, _, rest = name.rpartition(".weight")[0].rpartition(".")
        fused = f"{prefix}.{_FUSED.get(rest, rest)}.weight"
        if rest in _FUSED and fused in self._tensors:
            raise UnsupportedModelError(
                f"{self._path}: {name} is a part of {fused}, which vkmoe does not take apart",
                "convert the model again without fusing tensors",
            )
