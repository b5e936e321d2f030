"""Programs of invented models: memory nobody has, layers of any types, ways to serve misses."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from vkmoe.facts import ExpertSpec, ModelSpec, RopeSpec
from vkmoe.gpu.program import Dispatch, Program, memory_range
from vkmoe.models.decoder import Decoder, KvAddresses, MissService
from vkmoe.models.weights import (
    AttentionWeights,
    LayerWeights,
    ModelWeights,
    with_landing,
    with_slots,
)
from vkmoe.models.workspace import Workspace, attention_shape
from vkmoe.ops.attention import choose_split
from vkmoe.ops.experts import ExpertShape, SpanMatrix
from vkmoe.ops.matvec import BLOCK_WEIGHTS, Matrix
from vkmoe.ops.tuning import Tuning

__all__ = [
    "DENSE",
    "EXPERTS",
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


def layer(memory: Memory, types: Types, is_moe: bool) -> LayerWeights:
    span_at = 0
    spans = []
    for kind, n_rows, n_columns in (
        (types.gate, 256, WIDTH),
        (types.up, 256, WIDTH),
        (types.down, WIDTH, 256),
    ):
        row_bytes = -(-n_columns * BYTES[kind] // BLOCK_WEIGHTS[kind] // 16) * 16
        spans.append(SpanMatrix(kind, span_at, n_rows, n_columns, row_bytes))
        span_at += -(-n_rows * row_bytes // 256) * 256
    homes = (EXPERTS.n_experts if is_moe else 1) * span_at
    home = memory.take(homes)
    return LayerWeights(
        attention_gain=memory.take(4 * WIDTH),
        attention=AttentionWeights(
            q=memory.matrix(types.q, 256, WIDTH),
            k=memory.matrix(types.k, 128, WIDTH),
            v=memory.matrix(types.v, 128, WIDTH),
            output=memory.matrix("Q4_K", WIDTH, 256),
            q_gain=memory.take(256),
            k_gain=memory.take(256),
        ),
        feed_forward_gain=memory.take(4 * WIDTH),
        router=memory.matrix("F32", EXPERTS.n_experts, WIDTH) if is_moe else None,
        expert_shape=ExpertShape(spans[0], spans[1], spans[2], span_at),
        expert_ranges=(memory_range(home, homes),) if is_moe else (),
        dense_span=0 if is_moe else home,
    )


def token_program(
    layers: list[tuple[Types, bool]],
    tuning: Tuning = TUNINGS[0],
    with_logits: bool = True,
    misses: MissService | None = None,
) -> Program:
    """The program of an invented model; a layer is its types and whether it has experts.

    With `misses` every layer has a slot arena of its own, and all share scratch to gather in.
    """
    memory = Memory()
    n_moe_layers = sum(is_moe for _, is_moe in layers)
    spec = replace(SPEC, n_layers=len(layers), experts=EXPERTS if n_moe_layers else None)
    shape = attention_shape(spec, CONTEXT, "f16")
    split = choose_split(shape, tuning)
    caches = tuple(
        KvAddresses(memory.take(shape.cache_bytes), memory.take(shape.cache_bytes)) for _ in layers
    )
    table_bytes = max(1, n_moe_layers) * (EXPERTS.n_experts + EXPERTS.n_used) * 8
    weights = ModelWeights(
        embeddings=memory.matrix("Q8_0", N_TOKENS, WIDTH),
        output_gain=memory.take(4 * WIDTH),
        output=memory.matrix("Q6_K", N_TOKENS, WIDTH),
        layers=tuple(layer(memory, types, is_moe) for types, is_moe in layers),
        rope_table=memory.take(shape.rope_bytes),
        expert_table=memory_range(memory.take(table_bytes), table_bytes),
    )
    if misses:
        scratch = memory_range(memory.take(1 << 20), 1 << 20)
        arenas = [memory_range(memory.take(1 << 20), 1 << 20) for _ in range(n_moe_layers)]
        weights = with_slots(weights, lambda i: (arenas[i], scratch))
        weights = with_landing(weights, EXPERTS.n_used, lambda i: (arenas[i], scratch))
    workspace = Workspace(spec, tuning, split, shape)
    decoder = Decoder(spec, tuning, weights, workspace, shape, split, caches, misses)
    program = decoder.token_program(with_logits)
    decoder.close_program(program)
    return program


def dispatches(program: Program, index: int) -> list[Dispatch]:
    return list(program.dispatches(f"layer {index} "))


MOE = (Types(), True)
DENSE = (Types(), False)
