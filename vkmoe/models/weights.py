"""A model's weights in the form that programs need: matrices and vectors with addresses, spans with
offsets.

Owns no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from vkmoe.gpu.program import Range
from vkmoe.ops.expert_spans import ExpertShape
from vkmoe.ops.matvec import Matrix

__all__ = [
    "AttentionWeights",
    "LatentWeights",
    "LayerWeights",
    "ModelWeights",
    "SharedExpert",
    "with_landing",
    "with_slots",
]


@dataclass(frozen=True)
class AttentionWeights:
    """The weights of grouped-query attention. Vectors are addresses of f32; 0: there is none."""

    q: Matrix
    k: Matrix
    v: Matrix
    output: Matrix
    q_gain: int = 0
    k_gain: int = 0
    qkv_bias: int = 0  # of q, k and v behind one another
    output_bias: int = 0
    sinks: int = 0

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return (self.q, self.k, self.v, self.output)


@dataclass(frozen=True)
class LatentWeights:
    """The weights of latent attention. `k_up` and `v_up` are stacks of a matrix for each head."""

    q: Matrix  # of the heads; with `q_down` from the compressed queries
    kv: Matrix
    kv_gain: int
    k_up: Matrix  # [n_heads * kv_rank, nope_dim]
    v_up: Matrix  # [n_heads * value_dim, kv_rank]
    output: Matrix
    q_down: Matrix | None = None
    q_gain: int = 0

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        down = (self.q_down,) if self.q_down else ()
        return (*down, self.q, self.kv, self.k_up, self.v_up, self.output)


@dataclass(frozen=True)
class SharedExpert:
    """The expert that every token uses, at a fixed address; `gate` weighs it, None: by 1."""

    shape: ExpertShape
    span: int
    gate: Matrix | None = None


@dataclass(frozen=True)
class LayerWeights:
    """The weights of a layer. Gains and biases are addresses of f32 vectors; 0: there is none."""

    attention_gain: int
    attention: AttentionWeights | LatentWeights
    feed_forward_gain: int
    router: Matrix | None  # None: a dense layer, whose only span is `dense_span`
    expert_shape: ExpertShape
    expert_ranges: tuple[Range, ...]  # the memory in which the routed experts may lie
    dense_span: int = 0
    landing_ranges: tuple[Range, ...] = ()  # the memory its kernels may store experts in
    router_bias: int = 0
    selection_bias: int = 0
    shared: SharedExpert | None = None


@dataclass(frozen=True)
class ModelWeights:
    """All weights, the rotary table and the expert table, by address."""

    embeddings: Matrix
    output_gain: int
    output: Matrix
    layers: tuple[LayerWeights, ...]
    rope_table: int
    expert_table: Range
    n_landing: int = 0  # landing places of a layer in the expert table

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The numbers of the layers with experts; the expert table counts only these."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.router is not None)

    @property
    def span_bytes(self) -> tuple[int, ...]:
        """Bytes of one expert in each layer with experts."""
        return tuple(self.layers[i].expert_shape.span_bytes for i in self.moe_layers)


def with_slots(weights: ModelWeights, slots: Callable[[int], tuple[Range, ...]]) -> ModelWeights:
    """Say that experts may also lie in the memory `slots(MoE layer)`."""
    layers = list(weights.layers)
    for moe_layer, index in enumerate(weights.moe_layers):
        layer = layers[index]
        ranges = (*layer.expert_ranges, *slots(moe_layer))
        layers[index] = replace(layer, expert_ranges=ranges)
    return replace(weights, layers=tuple(layers))


def with_landing(
    weights: ModelWeights, n_landing: int, memory: Callable[[int], tuple[Range, ...]]
) -> ModelWeights:
    """Say that experts may be stored into the memory `memory(MoE layer)` by kernels.

    The expert table has `n_landing` places for each layer. What is stored there is also read
    there: `with_slots` must name that memory too.
    """
    layers = list(weights.layers)
    for moe_layer, index in enumerate(weights.moe_layers):
        layers[index] = replace(layers[index], landing_ranges=memory(moe_layer))
    return replace(weights, layers=tuple(layers), n_landing=n_landing)
