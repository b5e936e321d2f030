"""This module has a model's weights as programs need them, by address; it owns no memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from vkmoe.experts.store.table import ExpertTable
from vkmoe.gpu.program import Range
from vkmoe.kernels.experts.operations import ExpertShape
from vkmoe.kernels.matvec.operations import Matrix
from vkmoe.kernels.prompt_experts.operations import BroughtPlaces


@dataclass(frozen=True)
class BlockWeights:
    """Describes a feed-forward block at `span`, or experts, to which the expert table leads."""

    shape: ExpertShape
    span: int = 0  # an address; 0: of experts, which come and go
    ranges: tuple[Range, ...] = ()  # the memory in which experts may lie
    landing_ranges: tuple[Range, ...] = ()  # the memory its kernels may store experts in
    # The addresses of gate, up, down and their biases, where `span` has these in place of them.
    parts: tuple[int, ...] = ()
    on_cpu: bool = False  # the CPU computes the experts that the expert table does not have

    @property
    def on_device(self) -> bool:
        """Say whether the device computes any of its experts."""
        return bool(self.ranges) or not self.on_cpu

    @property
    def n_bytes(self) -> int:
        """Count the bytes that every token reads; experts are not among them."""
        if not self.parts:
            return self.shape.span_bytes if self.span else 0
        return sum(part.n_bytes for part in (self.shape.gate, self.shape.up, self.shape.down))

    @property
    def down(self) -> int:
        """Return the address of the last matrix of a block that stays in place."""
        return self.parts[2] if self.parts else self.span + self.shape.down.offset

    @property
    def down_bias(self) -> int:
        """Return the address of that matrix's biases; 0: it has none."""
        biases = self.shape.biases
        if biases is None:
            return 0
        return self.parts[5] if self.parts else self.span + biases.down


# The parts of a layer. A field is a tensor of the table in tensors.py, under the same name. Vectors
# are addresses of f32; 0: there is none. `gain` is that of the norm before the part.


@dataclass(frozen=True)
class AttentionWeights:
    """Holds the weights of grouped-query attention; without k and v it sees another's caches."""

    gain: int
    q: Matrix
    output: Matrix
    k: Matrix | None = None
    v: Matrix | None = None
    q_gain: int = 0
    k_gain: int = 0
    qkv_bias: int = 0  # of q, k and v behind one another
    output_bias: int = 0
    sinks: int = 0
    gate: Matrix | None = None  # of the heads' outputs; None: they have none
    post_gain: int = 0  # of the norm behind the output


@dataclass(frozen=True)
class LatentWeights:
    """Holds the weights of latent attention. `k_up` and `v_up` stack a matrix for each head."""

    gain: int
    q: Matrix  # of the heads; with `q_down` from the compressed queries
    kv: Matrix
    kv_gain: int
    k_up: Matrix  # [n_heads * kv_rank, nope_dim]
    v_up: Matrix  # [n_heads * value_dim, kv_rank]
    output: Matrix
    q_down: Matrix | None = None
    q_gain: int = 0
    output_bias: int = 0
    post_gain: int = 0


@dataclass(frozen=True)
class DeltaNetWeights:
    """Holds the weights of a gated delta rule (kernels/recurrent/operations.py)."""

    gain: int
    qkv: Matrix
    gate: Matrix
    beta: Matrix
    alpha: Matrix
    output: Matrix
    taps: int
    scales: int
    biases: int
    out_gain: int  # f32 [head_dim], of the norm of a head's output
    output_bias: int = 0
    post_gain: int = 0


MixerWeights = AttentionWeights | LatentWeights | DeltaNetWeights


@dataclass(frozen=True)
class FeedForwardWeights:
    """Holds the weights of a feed-forward part: a block alone, or experts behind a router."""

    gain: int
    block: BlockWeights
    router: Matrix | None = None  # None: `block` is the one there is
    router_bias: int = 0
    selection_bias: int = 0
    output_scales: int = 0  # of what each routed expert gives
    shared: BlockWeights | None = None  # the expert that every token uses
    shared_gate: Matrix | None = None  # it weighs `shared`; None: by 1
    post_gain: int = 0  # of the norm behind the part
    scale: int = 0  # by which the state is multiplied behind that; 0: by 1
    # A dense block beside the experts, and the gains of norms that come with it: before the block
    # and the router, and behind the block and the experts.
    beside: BlockWeights | None = None
    beside_gain: int = 0
    router_gain: int = 0
    beside_post_gain: int = 0
    experts_post_gain: int = 0


@dataclass(frozen=True)
class InputWeights:
    """Holds what adds that which a token brings to a layer; see layer_inputs.py."""

    gate: Matrix  # [input width, width]
    output: Matrix  # [width, input width]
    post_gain: int  # of the norm behind the output
    scale: int = 0  # by which the state is multiplied behind that; 0: by 1


@dataclass(frozen=True)
class LayerWeights:
    """Holds the weights of a layer.

    `in_host`: what every token reads of it is in host memory.
    """

    mixer: MixerWeights
    feed_forward: FeedForwardWeights
    in_host: bool = False
    input: InputWeights | None = None  # None: a token brings nothing to it

    @property
    def trunk_bytes(self) -> int:
        """Count the bytes of the matrices and blocks that every token reads."""
        fields = (vars(part) for part in (self.mixer, self.feed_forward, self.input) if part)
        parts = (part for of_part in fields for part in of_part.values())
        return sum(part.n_bytes for part in parts if isinstance(part, Matrix | BlockWeights))

    @property
    def span_bytes(self) -> int:
        """Count the bytes of one of its routed experts; 0: it has none."""
        experts = self.feed_forward
        return experts.block.shape.span_bytes if experts.router is not None else 0


@dataclass(frozen=True)
class TokenInputs:
    """Holds what a token brings to all layers: rows of a table, and a projection of its embedding.

    Both are [..., n_layers * input width]; see layer_inputs.py.
    """

    table: Matrix
    projection: Matrix
    gain: int  # f32 [input width], of the norm of what is projected for a layer


@dataclass(frozen=True)
class ModelWeights:
    """Holds all weights and the expert table, by address."""

    embeddings: Matrix
    output_gain: int
    output: Matrix
    layers: tuple[LayerWeights, ...]
    expert_table: Range
    n_landing: int = 0  # landing places of a layer in the expert table
    brought_places: BroughtPlaces | None = None  # for experts of prompts that are not on the device
    inputs: TokenInputs | None = None  # of all layers

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """List the numbers of the layers with experts; the expert table counts only these."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.span_bytes)

    @property
    def span_bytes(self) -> tuple[int, ...]:
        """List the bytes of one expert in each layer with experts."""
        return tuple(self.layers[i].span_bytes for i in self.moe_layers)


@dataclass(frozen=True)
class AheadWeights:
    """Holds what guesses tokens ahead: a model of one layer or a few, and how its input is made.

    That is token @ norm(embedding) + state @ norm(state); its experts stay in place. A drafter,
    which `next_state` tells, has no such norms.
    """

    model: ModelWeights
    token: Matrix
    state: Matrix
    last_gain: int  # of the norm behind the last layer of the model that is guessed for
    token_gain: int = 0
    state_gain: int = 0
    next_state: Matrix | None = None  # makes the state for the guess behind, of the last one


@dataclass(frozen=True)
class CpuWeights:
    """Holds the experts that a CPU computes beside a GPU, by MoE layer, and what leads to them.

    The table has no address for experts that the GPU computes.
    """

    blocks: Mapping[int, BlockWeights]
    table: ExpertTable


def with_slots(
    weights: ModelWeights,
    slots: Callable[[int], tuple[Range, ...]],
    landing: Callable[[int], tuple[Range, ...]],
    n_landing: int,
    brought_places: BroughtPlaces | None = None,
) -> ModelWeights:
    """Say that experts may also lie in the memory `slots(MoE layer)`.

    Kernels may store them in `landing(MoE layer)`, a part of it; the expert table has `n_landing`
    places for each layer.
    """
    layers = list(weights.layers)
    for moe_layer, index in enumerate(weights.moe_layers):
        part = layers[index].feed_forward
        ranges = (*part.block.ranges, *slots(moe_layer))
        block = replace(part.block, ranges=ranges, landing_ranges=landing(moe_layer))
        layers[index] = replace(layers[index], feed_forward=replace(part, block=block))
    return replace(
        weights, layers=tuple(layers), n_landing=n_landing, brought_places=brought_places
    )
