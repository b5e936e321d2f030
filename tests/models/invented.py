"""Programs of invented models: memory nobody has, layers of any types, ways to serve misses."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import NamedTuple

from tests.models.changed_specs import of_layers
from vkmoe.batch import BatchKind
from vkmoe.facts import (
    AttentionSpec,
    DeltaNetSpec,
    DenseSpec,
    ExpertSpec,
    FeedForward,
    LatentSpec,
    LayerSpec,
    ModelSpec,
    RopeSpec,
)
from vkmoe.gpu.program import Dispatch, Program, memory_range
from vkmoe.kernels.experts.operations import ExpertShape, SpanBiases, SpanMatrix
from vkmoe.kernels.launches import KernelClass, Launch
from vkmoe.kernels.matvec.operations import BLOCK_WEIGHTS, Matrix
from vkmoe.kernels.tuning import Tuning
from vkmoe.kv_types import both
from vkmoe.models.decoder import Decoder
from vkmoe.models.kept import Kept
from vkmoe.models.kv_caches import KvAddresses
from vkmoe.models.weights import (
    AttentionWeights,
    BlockWeights,
    DeltaNetWeights,
    FeedForwardWeights,
    LatentWeights,
    LayerWeights,
    MixerWeights,
    ModelWeights,
    with_slots,
)
from vkmoe.models.workspace import Workspace, mixer_kernels
from vkmoe.modes import RESIDENT, ExpertMode

WIDTH, N_TOKENS, CONTEXT = 512, 1000, 64
EXPERTS = ExpertSpec(n_experts=8, n_used=2, width=256)
ATTENTION = AttentionSpec(4, 2, 64, RopeSpec(64), "per_head")
SPEC = ModelSpec(
    architecture="qwen3moe",
    name="invented",
    width=WIDTH,
    n_vocab=N_TOKENS,
    context_length=CONTEXT,
    norm_eps=1e-6,
    tied_embeddings=False,
    layers=(LayerSpec(ATTENTION, EXPERTS),) * 4,
)
PLAIN = replace(ATTENTION, qk_norm="none")
BIASED = replace(PLAIN, qkv_bias=True, output_bias=True, sinks=True)
OAI = replace(EXPERTS, router_bias=True, biases=True, activation="swiglu_oai")
LATENT = LatentSpec(4, kv_rank=256, nope_dim=64, value_dim=64, rope=RopeSpec(32, style="normal"))
# What each kind of model has besides; layers of their programs are MOE unless a test says so.
DELTA = DeltaNetSpec(2, 4, 64, 4, tiled=True)
KINDS = {
    "olmoe": of_layers(
        SPEC,
        replace(ATTENTION, qk_norm="full_width"),
        *[replace(EXPERTS, renormalise=False)] * 4,
    ),
    "qwen2moe": of_layers(
        SPEC,
        replace(PLAIN, qkv_bias=True),
        *[replace(EXPERTS, shared_width=512, shared_gate=True)] * 4,
    ),
    "gpt-oss": replace(
        SPEC,
        layers=(LayerSpec(replace(BIASED, window=16), OAI), LayerSpec(BIASED, OAI)) * 2,
    ),
    "delta rule": of_layers(
        SPEC, DELTA, *[replace(EXPERTS, shared_width=512, shared_gate=True)] * 4
    ),
    "gated": of_layers(SPEC, replace(ATTENTION, gated=True), *[EXPERTS] * 4),
    "deepseek2 lite": of_layers(SPEC, LATENT, *[replace(EXPERTS, shared_width=512)] * 4),
    "deepseek2": of_layers(
        SPEC,
        replace(LATENT, q_rank=128),
        *[
            replace(
                EXPERTS,
                gating="sigmoid",
                shared_width=512,
                selection_bias=True,
                n_groups=4,
                n_groups_used=2,
            )
        ]
        * 4,
    ),
}
TUNINGS = [
    Tuning("lanes", 64, 4, True, subgroup_size=32, half_tiles=True),
    Tuning(
        *("lanes", 64, 4, False),
        rows_of_few=1,
        launches=(
            (KernelClass("expert_gate_up", "Q4_K", "few", "short"), Launch(32, 6)),
            (KernelClass("expert_down", "Q6_K", "few", "short"), Launch(128, 2)),
        ),
    ),
    Tuning("blocks", 8, 8, False, load_64bit=True, subgroup_size=8),
    Tuning("blocks", 8, 8, False),
]


class Memory:
    """Hands out invented addresses, 256-byte aligned, none twice."""

    def __init__(self) -> None:
        self.next = 1 << 32

    def take(self, n_bytes: int) -> int:
        address, self.next = self.next, self.next + -(-n_bytes // 256) * 256
        return address

    def matrix(self, kind: str, n_rows: int, n_columns: int) -> Matrix:
        row_bytes = -(-n_columns * BYTES[kind] // BLOCK_WEIGHTS[kind] // 16) * 16
        return Matrix(kind, self.take(n_rows * row_bytes), n_rows, n_columns, row_bytes)


BYTES = {"Q4_K": 144, "Q6_K": 210, "Q8_0": 34, "F32": 128}  # of a block


class Types(NamedTuple):
    """The weight types of a layer."""

    q: str = "Q4_K"
    k: str = "Q4_K"
    v: str = "Q4_K"
    gate: str = "Q4_K"
    up: str = "Q4_K"
    down: str = "Q6_K"


def layer(memory: Memory, types: Types, spec: LayerSpec) -> LayerWeights:
    mixer = spec.mixer
    weights: MixerWeights
    if isinstance(mixer, DeltaNetSpec):
        weights = delta_net(memory, types, mixer)
    elif isinstance(mixer, LatentSpec):
        weights = latent_attention(memory, mixer)
    else:
        weights = attention(memory, types, mixer)
    return LayerWeights(weights, feed_forward(memory, types, spec.feed_forward))


def feed_forward(memory: Memory, types: Types, spec: FeedForward) -> FeedForwardWeights:
    if isinstance(spec, DenseSpec):
        shape = span(types, spec.width, biased=spec.bias)
        block = BlockWeights(shape, memory.take(shape.span_bytes))
        return FeedForwardWeights(memory.take(4 * WIDTH), block)
    shape = span(types, spec.width, biased=spec.biases)
    homes = spec.n_experts * shape.span_bytes
    block = BlockWeights(shape, ranges=(memory_range(memory.take(homes), homes),))
    shared = None
    if spec.shared_width:
        shared_shape = span(types, spec.shared_width)
        shared = BlockWeights(shared_shape, memory.take(shared_shape.span_bytes))
    return FeedForwardWeights(
        gain=memory.take(4 * WIDTH),
        block=block,
        router=memory.matrix("F32", spec.n_experts, WIDTH),
        router_bias=memory.take(4 * spec.n_experts) if spec.router_bias else 0,
        selection_bias=memory.take(4 * spec.n_experts) if spec.selection_bias else 0,
        output_scales=memory.take(4 * spec.n_experts) if spec.output_scales else 0,
        shared=shared,
        shared_gate=memory.matrix("F32", 1, WIDTH) if spec.shared_gate else None,
    )


def span(types: Types, inner: int, biased: bool = False) -> ExpertShape:
    end = 0
    matrices = []
    shapes = [(types.gate, inner, WIDTH), (types.up, inner, WIDTH), (types.down, WIDTH, inner)]
    shapes += [("F32", 1, n) for n in (inner, inner, WIDTH) if biased]
    for kind, n_rows, n_columns in shapes:
        row_bytes = -(-n_columns * BYTES[kind] // BLOCK_WEIGHTS[kind] // 16) * 16
        matrices.append(SpanMatrix(kind, end, n_rows, n_columns, row_bytes))
        end += -(-n_rows * row_bytes // 256) * 256
    gate, up, down, *biases = matrices
    offsets = SpanBiases(*(bias.offset for bias in biases)) if biases else None
    return ExpertShape(gate, up, down, end, offsets)


def attention(memory: Memory, types: Types, spec: AttentionSpec) -> AttentionWeights:
    return AttentionWeights(
        gain=memory.take(4 * WIDTH),
        q=memory.matrix(types.q, spec.q_width, WIDTH),
        k=memory.matrix(types.k, spec.kv_width, WIDTH),
        v=memory.matrix(types.v, spec.kv_width, WIDTH),
        output=memory.matrix("Q4_K", WIDTH, spec.q_width),
        q_gain=memory.take(4 * spec.head_dim),
        k_gain=memory.take(4 * spec.head_dim),
        qkv_bias=memory.take(4 * spec.qkv_width) if spec.qkv_bias else 0,
        output_bias=memory.take(4 * WIDTH) if spec.output_bias else 0,
        sinks=memory.take(4 * spec.n_heads) if spec.sinks else 0,
        gate=memory.matrix(types.q, spec.q_width, WIDTH) if spec.gated else None,
    )


def delta_net(memory: Memory, types: Types, spec: DeltaNetSpec) -> DeltaNetWeights:
    return DeltaNetWeights(
        gain=memory.take(4 * WIDTH),
        qkv=memory.matrix(types.q, spec.n_channels, WIDTH),
        gate=memory.matrix(types.k, spec.attended_width, WIDTH),
        beta=memory.matrix("F32", spec.n_heads, WIDTH),
        alpha=memory.matrix("F32", spec.n_heads, WIDTH),
        output=memory.matrix("Q4_K", WIDTH, spec.attended_width),
        taps=memory.take(4 * spec.n_channels * spec.n_taps),
        scales=memory.take(4 * spec.n_heads),
        biases=memory.take(4 * spec.n_heads),
        out_gain=memory.take(4 * spec.head_dim),
    )


def latent_attention(memory: Memory, spec: LatentSpec) -> LatentWeights:
    rank, n_heads = spec.q_rank, spec.n_heads
    return LatentWeights(
        gain=memory.take(4 * WIDTH),
        q=memory.matrix("Q8_0", n_heads * spec.query_dim, rank or WIDTH),
        kv=memory.matrix("Q8_0", spec.row, WIDTH),
        kv_gain=memory.take(4 * spec.kv_rank),
        k_up=memory.matrix("Q8_0", n_heads * spec.kv_rank, spec.nope_dim),
        v_up=memory.matrix("Q8_0", n_heads * spec.value_dim, spec.kv_rank),
        output=memory.matrix("Q8_0", WIDTH, n_heads * spec.value_dim),
        q_down=memory.matrix("Q8_0", rank, WIDTH) if rank else None,
        q_gain=memory.take(4 * rank) if rank else 0,
    )


def token_program(
    layers: list[tuple[Types, bool]],
    tuning: Tuning = TUNINGS[0],
    with_logits: bool = True,
    mode: ExpertMode = RESIDENT,
    spec: ModelSpec = SPEC,
    dense: DenseSpec | None = None,
) -> Program:
    """The program of an invented model; a layer is its types and whether it has experts.

    In a cache every layer has a slot arena of its own, and all share scratch to gather in.
    Layers without experts have a `dense` block.
    """
    memory = Memory()
    n_moe_layers = sum(is_moe for _, is_moe in layers)
    dense = dense or DenseSpec(256, activation=spec.layers[0].feed_forward.activation)
    kinds = itertools.cycle(spec.layers)
    spec = replace(
        spec,
        layers=tuple(
            kind if is_moe else replace(kind, feed_forward=dense)
            for kind, (_, is_moe) in zip(kinds, layers, strict=False)
        ),
    )
    kernels = mixer_kernels(spec, Kept(CONTEXT, both("f16"), 2), tuning)
    ropes: dict[RopeSpec | None, int] = {None: 0}
    ropes |= {rope: memory.take(CONTEXT * rope.dim * 4) for rope in spec.ropes}
    caches = tuple(
        KvAddresses(
            CONTEXT,
            1,
            ropes[layer.mixer.rope],
            tuple(map(memory.take, kernels[layer.mixer].state_bytes)),
        )
        for layer in spec.layers
    )
    table_bytes = max(1, n_moe_layers) * (EXPERTS.n_experts + EXPERTS.n_used) * 8
    weights = ModelWeights(
        embeddings=memory.matrix("Q8_0", N_TOKENS, WIDTH),
        output_gain=memory.take(4 * WIDTH),
        output=memory.matrix("Q6_K", N_TOKENS, WIDTH),
        layers=tuple(
            layer(memory, types, kind) for (types, _), kind in zip(layers, spec.layers, strict=True)
        ),
        expert_table=memory_range(memory.take(table_bytes), table_bytes),
    )
    if mode.can_miss:
        scratch = memory_range(memory.take(1 << 20), 1 << 20)
        arenas = [memory_range(memory.take(1 << 20), 1 << 20) for _ in range(n_moe_layers)]
        places = [(arena, scratch) for arena in arenas].__getitem__
        weights = with_slots(weights, places, places, EXPERTS.n_used)
    workspace = Workspace(spec, tuning, kernels)
    decoder = Decoder(spec, tuning, weights, workspace, caches, mode)
    program = decoder.program(BatchKind("decode", 1, int(with_logits)))
    decoder.close_program(program)
    return program


def dispatches(program: Program, index: int) -> list[Dispatch]:
    return list(program.dispatches(f"layer {index} "))


MOE = (Types(), True)
DENSE = (Types(), False)
