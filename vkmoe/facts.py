"""This module holds plain data: what was found (a device, a model), what was decided (a plan).

Nothing here asks a driver or opens a file, so tests invent devices and models freely. What a user
asked for is in config.py.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

from vkmoe.choices import BufferName, Executor, Layout
from vkmoe.kv_types import KvTypes
from vkmoe.modes import ExpertMode

# ----- the device -----


@dataclass(frozen=True)
class Heap:
    """Describes a Vulkan memory heap; `budget` and `usage` are bytes if the driver reports them."""

    size: int
    device_local: bool
    budget: int | None = None
    usage: int | None = None


@dataclass(frozen=True)
class MemoryType:
    """Describes a Vulkan memory type: its heap and property flags such as `DEVICE_LOCAL`."""

    heap: int
    flags: frozenset[str]


@dataclass(frozen=True)
class DeviceLimits:
    """Holds the limits that bind vkmoe; sizes in bytes."""

    max_storage_buffer_range: int = 1 << 27
    max_memory_allocation_size: int = 1 << 30
    max_buffer_size: int = 1 << 30
    max_memory_allocation_count: int = 4096
    max_workgroup_size: tuple[int, int, int] = (128, 128, 64)
    max_workgroup_invocations: int = 128
    max_workgroup_count: tuple[int, int, int] = (65535, 65535, 65535)
    max_shared_memory: int = 16384
    max_push_constants: int = 128
    timestamp_period: float = 1.0
    min_storage_buffer_offset_alignment: int = 256
    non_coherent_atom_size: int = 256


class MatrixShape(NamedTuple):
    """Describes a product that a device's matrix units take in one step, in a subgroup:
    [rows, depth] times [depth, columns], added to sums [rows, columns]. Types are named f16, s8.
    """

    rows: int
    columns: int
    depth: int
    factors: str
    sums: str

    @property
    def sizes(self) -> str:
        """Return its sizes for people."""
        return f"{self.rows}x{self.columns}x{self.depth}"


# What kernels on matrix units need: their shaders are of Vulkan's memory model. The last one is for
# all other kernels that have atomics, as the model's scopes hold for them where it is switched on.
MATRIX_FEATURES = frozenset({"cooperative_matrix", "memory_model", "memory_model_device_scope"})


@dataclass(frozen=True)
class DeviceInfo:
    """Describes a device. `type` is discrete, integrated, virtual, cpu or other.

    The CPU itself is described as the Vulkan devices are, but for its `layout` of weights.
    """

    index: int
    name: str
    type: str
    vendor_id: int
    driver_name: str
    driver_info: str
    api_version: tuple[int, ...]
    subgroup_size: int
    subgroup_arithmetic: bool
    features: frozenset[str]
    heaps: tuple[Heap, ...]
    memory_types: tuple[MemoryType, ...]
    limits: DeviceLimits
    subgroup_range: tuple[int, int] = (1, 128)  # what drivers choose from, pipeline by pipeline
    subgroup_shuffle: bool = False  # lanes can hand values to each other
    takes_subgroup_size: bool = False  # pipelines may require one of these sizes, in full subgroups
    layout: Layout = "planes"  # of weights; "file": kernels read them where the file is mapped
    matrix_shapes: tuple[MatrixShape, ...] = ()  # () where there are no matrix units

    @property
    def half_shapes(self) -> tuple[MatrixShape, ...]:
        """List the shapes of f16 whose sums are f32, in the driver's order; () where it lacks what
        kernels need besides."""
        if not self.features >= MATRIX_FEATURES | {"float16"}:
            return ()
        return tuple(s for s in self.matrix_shapes if (s.factors, s.sums) == ("f16", "f32"))

    @property
    def has_one_subgroup_size(self) -> bool:
        return self.subgroup_range[0] == self.subgroup_range[1]

    @property
    def is_cpu(self) -> bool:
        return self.type == "cpu"

    @property
    def is_vulkan(self) -> bool:
        """Say whether shaders run there; else ggml's kernels do, on threads of the CPU."""
        return self.layout == "planes"

    @property
    def is_uma(self) -> bool:
        """Say whether the GPU shares the host's memory: all stays in place, nothing is copied."""
        return self.type in ("integrated", "cpu")

    @property
    def driver(self) -> str:
        return f"{self.driver_name} {self.driver_info}".strip()


# ----- the model; sizes in elements -----

Activation = Literal["silu", "swiglu_oai", "geglu"]


@dataclass(frozen=True)
class RopeSpec:
    """Describes rotary embedding. `style`: neox pairs element i with i + dim/2, normal with i + 1.

    `scaling` yarn follows Peng et al. 2023 (arXiv:2309.00071); linear divides positions; longrope
    (Ding et al. 2024, arXiv:2402.13753) divides each pair's frequency by a factor of its own, from
    `long_factors` where the context is longer than the original one.
    """

    dim: int
    base: float = 10000.0
    style: Literal["neox", "normal"] = "neox"
    scaling: Literal["none", "linear", "yarn", "longrope"] = "none"
    factor: float = 1.0
    original_context: int = 0
    attention_factor: float | None = None  # None: yarn's own 0.1 ln(factor) + 1
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # yarn's ramp begins and ends at whole pairs
    factors: tuple[float, ...] = ()  # [dim / 2] frequencies are divided by these; () = by none
    long_factors: tuple[float, ...] = ()  # [dim / 2]


# Of each head, or of all together; in each head, with the gains behind the rotation.
QkNorm = Literal["none", "per_head", "full_width", "per_head_turned"]


@dataclass(frozen=True)
class AttentionSpec:
    """Describes grouped-query attention; layers of one kind have equal ones."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope: RopeSpec
    qk_norm: QkNorm = "none"
    window: int = 0  # positions seen, the token's own included; 0: all
    scale: float = 0.0  # of the dot products; 0: head_dim ** -0.5
    sinks: bool = False  # a logit per head that takes part in the softmax alone
    qkv_bias: bool = False
    output_bias: bool = False  # of the output projection
    gated: bool = False  # by the logistic function of as many numbers, projected beside each query
    value_norm: bool = False  # RMSNorm of the values of each KV head, without a gain
    own_kv: bool = True  # keys and values; else those of the last layer before that has alike ones
    is_recurrent: ClassVar[bool] = False  # what it keeps holds for every earlier position

    @property
    def query_dim(self) -> int:
        """Count the elements of a head's query."""
        return self.head_dim

    @property
    def q_width(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.n_kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Count the elements that are projected from the hidden state: q, k, v and gates."""
        return (1 + self.gated) * self.q_width + 2 * self.kv_width * self.own_kv

    @property
    def attended_width(self) -> int:
        """Count the elements that the output projection reads."""
        return self.q_width

    @property
    def cached(self) -> AttentionSpec:
        """Describe what the caches have: alike where layers can see the same ones."""
        return replace(self, own_kv=True, n_heads=self.n_kv_heads)


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) caches a compressed row.

    A head's query and key have `nope_dim` elements without a position and `rope_dim` that rotate.
    """

    n_heads: int
    kv_rank: int  # of the compressed keys and values
    nope_dim: int
    value_dim: int
    rope: RopeSpec
    q_rank: int = 0  # of the compressed queries; 0: they are not
    scale: float = 0.0  # of the dot products; 0: query_dim ** -0.5
    indexer: bool = False  # files have one; it chooses all of the positions that vkmoe runs
    is_recurrent: ClassVar[bool] = False

    @property
    def n_kv_heads(self) -> int:
        """Return 1: all heads read the one row of a position."""
        return 1

    @property
    def rope_dim(self) -> int:
        return self.rope.dim

    @property
    def query_dim(self) -> int:
        """Count the elements of a head's query."""
        return self.nope_dim + self.rope_dim

    @property
    def row(self) -> int:
        """Count the elements cached for a position."""
        return self.kv_rank + self.rope_dim

    @property
    def qkv_width(self) -> int:
        """Count the elements that are projected from the hidden state."""
        return (self.q_rank or self.n_heads * self.query_dim) + self.row

    @property
    def attended_width(self) -> int:
        """Count the elements that the output projection reads."""
        return self.n_heads * self.value_dim


RING_ROWS = 16  # that were projected last, which a layer with a convolution keeps of a sequence


@dataclass(frozen=True)
class DeltaNetSpec:
    """Describes the gated delta rule behind a short convolution (Gated DeltaNet, Yang et al. 2024,
    arXiv:2412.06464). What a layer keeps of a sequence does not grow with it."""

    n_key_heads: int
    n_heads: int  # of values, each with a state [head_dim, head_dim]
    head_dim: int
    n_taps: int  # of the convolution: the row's own and those before it
    tiled: bool  # head h of v goes with head h % n_key_heads of k; else neighbours share one
    rope: ClassVar[None] = None
    is_recurrent: ClassVar[bool] = True

    @property
    def n_channels(self) -> int:
        """Count the channels of the convolution: q and k of each key head, v of each head."""
        return (2 * self.n_key_heads + self.n_heads) * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Count the elements that are projected from the hidden state: channels, a gate of each
        element that comes out, and two numbers of each head."""
        return self.n_channels + self.attended_width + 2 * self.n_heads

    @property
    def attended_width(self) -> int:
        """Count the elements that the output projection reads."""
        return self.n_heads * self.head_dim


@dataclass(frozen=True)
class DenseSpec:
    """Describes a feed-forward block that every token uses whole."""

    width: int  # rows of gate and up
    bias: bool = False  # of gate, up and down
    activation: Activation = "silu"


@dataclass(frozen=True)
class ExpertSpec:
    """Describes the routed experts of a layer; `n_used` of `n_experts` run for each token.

    With `n_groups` above 1 only experts of the `n_groups_used` best groups can be chosen.
    """

    n_experts: int
    n_used: int
    width: int  # rows of gate and up
    renormalise: bool = True
    scale: float = 1.0
    gating: Literal["softmax", "sigmoid"] = "softmax"
    shared_width: int = 0  # of the shared expert, which every token uses; 0: there is none
    shared_gate: bool = False  # its weight is the sigmoid of a logit; else 1
    router_bias: bool = False  # added to the logits
    selection_bias: bool = False  # added to the scores to choose by, not to the weights
    biases: bool = False  # of gate, up and down
    n_groups: int = 1
    n_groups_used: int = 1
    output_scales: bool = False  # what each expert gives is multiplied by a number of its own
    activation: Activation = "silu"
    # Of a dense block beside the experts. It, they and the router read the state behind norms of
    # their own, and what the two give is normed before it is added; 0: there is none.
    beside_width: int = 0


Attention = AttentionSpec | LatentSpec
Mixer = Attention | DeltaNetSpec
FeedForward = DenseSpec | ExpertSpec


@dataclass(frozen=True)
class LayerSpec:
    """Says what mixes positions in a layer, and what then works on each of them alone."""

    mixer: Mixer
    feed_forward: FeedForward
    post_norms: bool = False  # what mixer and feed-forward give is normed before it is added
    scaled: bool = False  # what leaves the layer is multiplied by a number of its own


@dataclass(frozen=True)
class ModelSpec:
    """Describes the shape of a model, read from its file; sizes in elements.

    The layer `ahead` guesses the token after the next one (multi-token prediction, DeepSeek-V3,
    arXiv:2412.19437, section 2.2), from the state of a token as the output matrix reads it and the
    embedding of the next token. A `drafter` does so in its place: a model no wider, with layers and
    an output matrix of its own, which sees keys and values of this one and keeps none.
    """

    architecture: str
    name: str
    width: int
    n_vocab: int
    context_length: int
    norm_eps: float
    tied_embeddings: bool
    layers: tuple[LayerSpec, ...]
    context_limit: str = ""  # why `context_length` is less than the model was trained for
    embedding_scale: float = 1.0  # what the first layer reads is multiplied by it
    logit_cap: float = 0.0  # logits are cap * tanh(logits / cap); 0: as they are
    input_width: int = 0  # of what a token brings to each layer besides the state; 0: nothing
    n_ahead_layers: int = 0  # of the file, behind the others
    ahead: LayerSpec | None = None  # the first of these; None: nothing is guessed with it
    drafter: ModelSpec | None = None

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def kept_layers(self) -> tuple[LayerSpec, ...]:
        """List the layers that keep something of sequences: what guesses is behind the others."""
        if self.ahead is None and self.drafter is None:
            return self.layers
        return (*self.layers, *self.of_ahead.layers)

    @cached_property
    def of_ahead(self) -> ModelSpec:
        """Describe what guesses as a model. Must hold: there is such a thing."""
        if self.drafter is not None:
            return self.drafter
        assert self.ahead is not None, self.name
        return replace(self, layers=(self.ahead,), ahead=None)

    @cached_property
    def n_layers_of(self) -> dict[Mixer, int]:
        """Count the layers with each kind of mixer, in the order of the first that has it."""
        return Counter(layer.mixer for layer in self.kept_layers)

    @cached_property
    def mixers(self) -> tuple[Mixer, ...]:
        """List each kind of mixer once, in the order of the first layer that has it."""
        return tuple(self.n_layers_of)

    @cached_property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """List each rotary embedding once, in the order of the first layer that has it."""
        found = (mixer.rope for mixer in self.mixers)
        return tuple(dict.fromkeys(rope for rope in found if rope is not None))

    @property
    def is_recurrent(self) -> bool:
        """Say whether some layer keeps a state that holds for one position alone."""
        return any(mixer.is_recurrent for mixer in self.mixers)

    @property
    def dense_blocks(self) -> tuple[DenseSpec, ...]:
        """List the feed-forward blocks of the layers without experts."""
        blocks = (layer.feed_forward for layer in self.layers)
        return tuple(block for block in blocks if isinstance(block, DenseSpec))

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """List the numbers of the layers with experts."""
        layers = enumerate(self.layers)
        return tuple(i for i, layer in layers if isinstance(layer.feed_forward, ExpertSpec))

    def picks(self, moe_layer: int) -> bool:
        """Say whether a prompt's rows need the experts of a MoE layer only where they want logits.

        So it is in the last layer, where nothing but the head reads what rows become there.
        """
        return self.moe_layers[moe_layer] == self.n_layers - 1 and self.ahead is None

    @property
    def experts(self) -> ExpertSpec | None:
        """Find the routed experts, alike in all layers that have any; None: no layer has."""
        blocks = (layer.feed_forward for layer in self.layers)
        return next((block for block in blocks if isinstance(block, ExpertSpec)), None)


# ----- what was decided -----

SizingStatus = Literal["ok", "below_recommended", "budget_exhausted", "empty"]


class SpanInFile(NamedTuple):
    """Counts the bytes of a layer's experts as a CPU reads them."""

    mapped: int  # where the file is mapped
    copied: int  # that it cannot read there


@dataclass(frozen=True)
class WeightBytes:
    """Counts the bytes of the weights in device layout, rounded as they will be allocated."""

    pieces: tuple[int, ...]  # of the trunk, in the order they are placed
    experts: int
    spans: tuple[int, ...] = ()  # of one expert in each MoE layer
    mapped: int = 0  # that CPUs read where the file is mapped; then spans are addresses
    mapped_experts: int = 0  # of these
    copied: int = 0  # that they cannot read there
    file_spans: tuple[SpanInFile, ...] = ()  # in each MoE layer, where the CPU computes experts
    table_pieces: int = 0  # how many, behind the first, hold rows of tokens: host memory has these
    layer_pieces: tuple[int, ...] = ()  # how many of those behind each layer has
    ahead_pieces: int = 0  # how many of `pieces`, the last ones, the layer has that guesses tokens
    ahead: int = 0  # bytes of that layer
    table: int = 0  # bytes of which a token reads a row, besides the first piece
    ahead_experts: int = 0  # of these

    @property
    def trunk(self) -> int:
        return sum(self.pieces)

    def trunk_pieces(self, host_layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Part the trunk: what is on the device, and what is in host memory: rows of tokens, and
        what the last layers have.
        """
        pieces, first = self.pieces, 1 + self.table_pieces
        end = first + sum(self.layer_pieces)
        start = end - sum(self.layer_pieces[len(self.layer_pieces) - host_layers :])
        on_host = pieces[1:first] + pieces[start:end]
        return pieces[:1] + pieces[first:start] + pieces[end:], on_host


@dataclass(frozen=True)
class CacheSizing:
    """Compares how many experts are in memory with what a model needs to run well.

    `experts/decide/settings.py` makes it and says it in words.
    """

    status: SizingStatus
    n_slots_smallest_layer: int
    n_slots_largest_layer: int
    n_slots: int  # of all layers
    n_total: int  # experts of all layers
    n_experts: int  # of one layer
    n_bytes: int  # of all slots; in a plan as they are allocated
    recommended: int  # slots per layer
    ratio: float  # slots of a layer, on average / recommended
    remedy: str  # empty when all is well
    place: Literal["device", "host pool"] = "device"  # the pool: a small one without slots

    @property
    def slots_text(self) -> str:
        """Say how many slots a layer has, where that may differ between layers."""
        few, many = self.n_slots_smallest_layer, self.n_slots_largest_layer
        if few == many:
            return f"{few}"
        return f"{few} {'or' if many == few + 1 else 'to'} {many}"


class SpanRun(NamedTuple):
    """Describes equal spans that lie one behind the other in a buffer."""

    chunk: int  # the index of the buffer
    offset: int  # of the first, from the buffer's first aligned address
    span_bytes: int
    n_spans: int


@dataclass(frozen=True)
class ArenaLayout:
    """Says how spans lie in a few large buffers, decided before these are allocated."""

    buffers: tuple[int, ...] = ()  # bytes of each
    runs: tuple[SpanRun, ...] = ()  # all spans in their order; () where buffers are used whole


@dataclass(frozen=True)
class Allocation:
    """Holds a line of the plan: memory for what, where, how much at most, why there, which heap.

    With `layouts` the device is asked for these buffers, by `name`. Without, the line is a share of
    the buffers of that name; without a name it is memory that this process takes for itself. In
    the place "file" nothing is taken: weights are read where it is mapped. "spare" is host memory
    that is taken only as long as nothing else needs it.
    """

    item: str
    place: Literal["device", "host", "file", "spare"]
    n_bytes: int
    reason: str
    heap: int = 0
    name: BufferName | None = None
    layouts: tuple[ArenaLayout, ...] = ()


@dataclass(frozen=True)
class MemoryPlan:
    """Holds the plan of memory, which is decided before anything is allocated.

    In a cache `expert_slots[layer]` experts of each MoE layer have a copy on the device. Where host
    memory has homes for some at a time only, `host_slots` counts them for each size of expert, in
    the order of the first layers that have it; placement/pools.py makes pools of them.
    """

    ctx_size: int  # positions that a sequence can have
    kv_types: KvTypes
    mode: ExpertMode
    lines: tuple[Allocation, ...]
    expert_slots: tuple[int, ...] = ()
    sizing: CacheSizing | None = None
    host_slots: tuple[int, ...] = ()  # () where there are homes for all
    # These hold every expert that has no slot, so that none comes from the file once all is loaded.
    exchanges: bool = False
    landing_slots: int = 0  # of each layer that has slots, besides these
    cpu_layers: int = 0  # MoE layers from the first on whose experts the CPU computes
    host_layers: int = 0  # from the last on, whose trunk is in host memory
    brought_places: int = 0  # of each half that experts of prompts are brought to; 0: they are not
    chunk_rows: int = 0  # of a prompt, at most
    executor: Executor = "fused"
    executor_reason: str = ""
    mode_reason: str = ""  # why this mode, where no option asked for it
    n_regions: int = 1  # of the KV cache, one for each sequence
    n_versions: int = 1  # of a recurrent state, which a sequence keeps
    margin: int = 0  # positions that layers with a window keep beside those that it sees
    n_state_copies: int = 0  # in host memory, at most
    n_guesses: int = 0  # tokens that a layer of the model guesses ahead at a time
    first_positions: int = 0  # of each region, that the KV cache begins with
    spare_bytes: int = 0  # of the device, which nothing uses at the start
    gives_slots: bool = False  # to the KV cache, when that grows
    notes: tuple[str, ...] = ()  # options that have no effect and why, and what was reduced

    @property
    def kept_bytes(self) -> int:
        """Count the bytes of host memory for texts that leave the KV cache, at most."""
        return self.total("spare")

    @property
    def splits_layers(self) -> bool:
        """Say whether the CPU computes the experts of some layers, the device those of others."""
        return self.cpu_layers > 0 and self.layouts("experts") != ()

    def layouts(self, name: BufferName) -> tuple[ArenaLayout, ...]:
        """Return how the buffers of a name lie; () where there are none."""
        return tuple(part for line in self.lines if line.name == name for part in line.layouts)

    def layout(self, name: BufferName) -> ArenaLayout:
        """Return the one layout of a name, which is empty where there are no such buffers."""
        (found,) = self.layouts(name) or (ArenaLayout(),)
        return found

    def total(self, place: str) -> int:
        return sum(line.n_bytes for line in self.lines if line.place == place)

    def heap_totals(self) -> dict[int, int]:
        """Count the bytes that are asked of each Vulkan heap, by the heap that is tried first."""
        totals: dict[int, int] = {}
        for line in self.lines:
            if line.name is None or line.place == "spare":  # not the device's, or not for sure
                continue
            totals[line.heap] = totals.get(line.heap, 0) + line.n_bytes
        return totals
