"""Programs of invented models: memory nobody has, layers of any types, ways to serve misses."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from vkmoe.facts import ON_DEVICE, ExpertMode, ExpertSpec, LatentSpec, ModelSpec, RopeSpec
from vkmoe.gpu.program import Dispatch, Program, memory_range
from vkmoe.models.decoder import Decoder
from vkmoe.models.weights import (
    AttentionWeights,
    LatentWeights,
    LayerWeights,
    ModelWeights,
    SharedExpert,
    with_landing,
    with_slots,
)
from vkmoe.models.workspace import KvAddresses, Workspace, attention_shape
from vkmoe.ops.attention_shapes import choose_split
from vkmoe.ops.expert_spans import ExpertShape, SpanBiases, SpanMatrix
from vkmoe.ops.matvec import BLOCK_WEIGHTS, Matrix
from vkmoe.ops.tuning import Tuning

__all__ = [
    "DENSE",
    "EXPERTS",
    "KINDS",
    "MOE",
    "TUNINGS",
    "Memory",
    "Types",
    "dispatches",
    "layer",
    "token_program",
]

WIDTH, N_TOKENS, CONTEXT = 512, 1000, 64
EXPERTS = ExpertSpec(n_experts=8, n_used=2, width=256)
SPEC = ModelSpec(
    architecture="qwen3moe",
    name="invented",
    n_layers=4,
    width=WIDTH,
    n_heads=4,
    n_kv_heads=2,
    head_dim=64,
    n_vocab=N_TOKENS,
    context_length=CONTEXT,
    norm_eps=1e-6,
    rope=RopeSpec(64),
    qk_norm="per_head",
    feed_forward_width=256,
    experts=EXPERTS,
    tied_embeddings=False,
)
# What each kind of model has besides; layers of their programs are MOE unless a test says so.
KINDS = {
    "olmoe": replace(SPEC, qk_norm="full_width", experts=replace(EXPERTS, renormalise=False)),
    "qwen2moe": replace(
        SPEC,
        qk_norm="none",
        qkv_bias=True,
        experts=replace(EXPERTS, shared_width=512, shared_gate=True),
    ),
    "gpt-oss": replace(
        SPEC,
        qk_norm="none",
        qkv_bias=True,
        output_bias=True,
        sinks=True,
        windows=(16, 0) * 2,
        activation="swiglu_oai",
        experts=replace(EXPERTS, router_bias=True, biases=True),
    ),
    "deepseek2 lite": replace(
        SPEC,
        qk_norm="none",
        n_kv_heads=1,
        head_dim=96,
        rope=RopeSpec(32, style="normal"),
        latent=LatentSpec(kv_rank=256, nope_dim=64, rope_dim=32, value_dim=64),
        experts=replace(EXPERTS, shared_width=512),
    ),
    "deepseek2": replace(
        SPEC,
        qk_norm="none",
        n_kv_heads=1,
        head_dim=96,
        rope=RopeSpec(32, style="normal"),
        latent=LatentSpec(kv_rank=256, nope_dim=64, rope_dim=32, value_dim=64, q_rank=128),
        experts=replace(
            EXPERTS,
            gating="sigmoid",
            shared_width=512,
            selection_bias=True,
            n_groups=4,
            n_groups_used=2,
        ),
    ),
}
TUNINGS = [
    Tuning("lanes", 64, 4, True, subgroup_size=32),
    Tuning("lanes", 64, 4, False),
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


def layer(memory: Memory, types: Types, is_moe: bool, spec: ModelSpec = SPEC) -> LayerWeights:
    experts = spec.experts or EXPERTS
    inner = experts.width if is_moe else spec.feed_forward_width
    shape = span(types, inner, biased=experts.biases if is_moe else spec.feed_forward_bias)
    homes = (experts.n_experts if is_moe else 1) * shape.span_bytes
    home = memory.take(homes)
    width = experts.shared_width if is_moe else 0
    shared = None
    if width:
        shared_shape = span(types, width)
        gate = memory.matrix("F32", 1, WIDTH) if experts.shared_gate else None
        shared = SharedExpert(shared_shape, memory.take(shared_shape.span_bytes), gate)
    biases = [
        memory.take(4 * experts.n_experts) if asked and is_moe else 0
        for asked in (experts.router_bias, experts.selection_bias)
    ]
    return LayerWeights(
        attention_gain=memory.take(4 * WIDTH),
        attention=latent_attention(memory, spec) if spec.latent else attention(memory, types, spec),
        feed_forward_gain=memory.take(4 * WIDTH),
        router=memory.matrix("F32", experts.n_experts, WIDTH) if is_moe else None,
        expert_shape=shape,
        expert_ranges=(memory_range(home, homes),) if is_moe else (),
        dense_span=0 if is_moe else home,
        router_bias=biases[0],
        selection_bias=biases[1],
        shared=shared,
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


def attention(memory: Memory, types: Types, spec: ModelSpec) -> AttentionWeights:
    return AttentionWeights(
        q=memory.matrix(types.q, 256, WIDTH),
        k=memory.matrix(types.k, 128, WIDTH),
        v=memory.matrix(types.v, 128, WIDTH),
        output=memory.matrix("Q4_K", WIDTH, 256),
        q_gain=memory.take(256),
        k_gain=memory.take(256),
        qkv_bias=memory.take(4 * spec.qkv_width) if spec.qkv_bias else 0,
        output_bias=memory.take(4 * WIDTH) if spec.output_bias else 0,
        sinks=memory.take(4 * spec.n_heads) if spec.sinks else 0,
    )


def latent_attention(memory: Memory, spec: ModelSpec) -> LatentWeights:
    latent, n_heads = spec.latent, spec.n_heads
    assert latent is not None
    rank = latent.q_rank
    return LatentWeights(
        q=memory.matrix("Q8_0", n_heads * latent.query_dim, rank or WIDTH),
        kv=memory.matrix("Q8_0", latent.row, WIDTH),
        kv_gain=memory.take(4 * latent.kv_rank),
        k_up=memory.matrix("Q8_0", n_heads * latent.kv_rank, latent.nope_dim),
        v_up=memory.matrix("Q8_0", n_heads * latent.value_dim, latent.kv_rank),
        output=memory.matrix("Q8_0", WIDTH, n_heads * latent.value_dim),
        q_down=memory.matrix("Q8_0", rank, WIDTH) if rank else None,
        q_gain=memory.take(4 * rank) if rank else 0,
    )


def token_program(
    layers: list[tuple[Types, bool]],
    tuning: Tuning = TUNINGS[0],
    with_logits: bool = True,
    mode: ExpertMode = ON_DEVICE,
    spec: ModelSpec = SPEC,
) -> Program:
    """The program of an invented model; a layer is its types and whether it has experts.

    In a cache every layer has a slot arena of its own, and all share scratch to gather in.
    """
    memory = Memory()
    n_moe_layers = sum(is_moe for _, is_moe in layers)
    spec = replace(spec, n_layers=len(layers), experts=spec.experts if n_moe_layers else None)
    shape = attention_shape(spec, CONTEXT, "f16")
    split = choose_split(shape, tuning)
    caches = tuple(
        KvAddresses(*(memory.take(shape.cache_bytes) for _ in range(spec.n_caches))) for _ in layers
    )
    table_bytes = max(1, n_moe_layers) * (EXPERTS.n_experts + EXPERTS.n_used) * 8
    weights = ModelWeights(
        embeddings=memory.matrix("Q8_0", N_TOKENS, WIDTH),
        output_gain=memory.take(4 * WIDTH),
        output=memory.matrix("Q6_K", N_TOKENS, WIDTH),
        layers=tuple(layer(memory, types, is_moe, spec) for types, is_moe in layers),
        rope_table=memory.take(shape.rope_bytes),
        expert_table=memory_range(memory.take(table_bytes), table_bytes),
    )
    if not mode.on_device:
        scratch = memory_range(memory.take(1 << 20), 1 << 20)
        arenas = [memory_range(memory.take(1 << 20), 1 << 20) for _ in range(n_moe_layers)]
        weights = with_slots(weights, lambda i: (arenas[i], scratch))
        weights = with_landing(weights, EXPERTS.n_used, lambda i: (arenas[i], scratch))
    workspace = Workspace(spec, tuning, split, shape)
    decoder = Decoder(spec, tuning, weights, workspace, shape, split, caches, mode)
    program = decoder.token_program(with_logits)
    decoder.close_program(program)
    return program


def dispatches(program: Program, index: int) -> list[Dispatch]:
    return list(program.dispatches(f"layer {index} "))


MOE = (Types(), True)
DENSE = (Types(), False)
