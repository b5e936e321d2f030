"""The tensors of a file that a model consists of, layer by layer.

Shapes are NumPy's: [rows, columns], rows being outputs. Which names they have in a file, and what
shapes they must have, is the subject of tensors.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vkmoe.facts import LatentSpec
from vkmoe.gguf_file import TensorInfo

__all__ = [
    "AttentionTensors",
    "ExpertMatrix",
    "FeedForwardTensors",
    "LatentTensors",
    "LayerTensors",
    "ModelTensors",
]


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
        """Which of `parts` an expert's rows lie in, and the first of them."""
        return (0, expert * self.n_rows) if len(self.parts) == 1 else (expert, 0)


@dataclass(frozen=True)
class FeedForwardTensors:
    """A feed-forward block: of the routed experts, the shared one, or a layer without experts."""

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
    """Grouped-query attention."""

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
    """Multi-head latent attention.

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
        """All but those between the compressed keys and values and the heads."""
        down = (self.q_down,) if self.q_down is not None else ()
        return (*down, self.q, self.kv, self.output)


@dataclass(frozen=True)
class LayerTensors:
    """One layer. `router` is None in a layer without experts, whose block is `feed_forward`."""

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
