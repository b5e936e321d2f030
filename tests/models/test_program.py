"""The program of a token: how many dispatches, how labelled, in what order, for which layers."""

from __future__ import annotations

import struct
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest

from vkmoe.facts import ExpertSpec, ModelSpec, RopeSpec
from vkmoe.gpu.hazards import plan_barriers
from vkmoe.gpu.kernels import KERNELS, spirv_folder
from vkmoe.gpu.program import Dispatch, Program, memory_range
from vkmoe.models.decoder import Decoder, KvAddresses, MissService
from vkmoe.models.steps import layer_ends, segments
from vkmoe.models.weights import LayerWeights, ModelWeights, with_landing, with_slots
from vkmoe.models.workspace import Workspace, attention_shape
from vkmoe.ops.attention import choose_split
from vkmoe.ops.experts import ExpertShape, SpanMatrix
from vkmoe.ops.matvec import BLOCK_WEIGHTS, Matrix
from vkmoe.ops.router import router_topk
from vkmoe.ops.tuning import Tuning

MOST_DISPATCHES = 9  # of a layer
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
        q=memory.matrix(types.q, 256, WIDTH),
        k=memory.matrix(types.k, 128, WIDTH),
        v=memory.matrix(types.v, 128, WIDTH),
        output=memory.matrix("Q4_K", WIDTH, 256),
        q_gain=memory.take(256),
        k_gain=memory.take(256),
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


@pytest.mark.parametrize("tuning", TUNINGS, ids=str)
@pytest.mark.parametrize(
    ("types", "n_dispatches"),
    [
        (Types(), 8),
        (Types(v="Q6_K"), 9),  # what "medium" mixtures do
        (Types(down="Q4_K"), 8),
        (Types(v="Q6_K", down="Q8_0"), 9),
    ],
    ids=str,
)
def test_a_layer_takes_at_most_nine_dispatches(
    types: Types, n_dispatches: int, tuning: Tuning
) -> None:
    program = token_program([(types, True)] * 3, tuning)
    for index in range(3):
        assert len(dispatches(program, index)) == n_dispatches <= MOST_DISPATCHES
    # embed, logits, two for the candidates, finish
    assert program.n_dispatches == 3 * n_dispatches + 5


def test_a_dense_layer_has_no_router() -> None:
    program = token_program([DENSE] * 2)
    assert len(dispatches(program, 0)) == 6
    assert not any("router" in command.label for command in program.commands)


def test_without_logits_the_head_is_left_out() -> None:
    whole, prompt = token_program([MOE] * 2), token_program([MOE] * 2, with_logits=False)
    left_out = {c.label for c in whole.commands} - {c.label for c in prompt.commands}
    assert left_out == {"logits", "candidates", "candidates merge"}
    assert prompt.commands[-1].label == whole.commands[-1].label == "finish"


@pytest.mark.parametrize("tuning", TUNINGS, ids=str)
def test_every_dispatch_is_labelled_and_has_a_kernel(tuning: Tuning) -> None:
    program = token_program([MOE, (Types(v="Q6_K", up="Q8_0"), True)], tuning)
    printed = str(program).splitlines()
    assert len(printed) == len(program.commands) + 1
    families = sorted(KERNELS, key=len, reverse=True)
    for command, line in zip(program.commands, printed[1:], strict=True):
        assert command.label and command.label in line
        assert isinstance(command, Dispatch)
        assert (spirv_folder() / f"{command.variant}.spv").exists(), command.variant
        family = next(name for name in families if command.variant.startswith(name))
        spec = KERNELS[family]
        assert len(command.tensors) == len(spec.bindings)
        assert len(command.push) == spec.push_bytes <= 128
        assert len(command.constants) == len(spec.constants)
        assert min(command.groups) >= 1
        assert command.writes, f"{command.label} does nothing"


def test_parts_of_a_step_wait_for_each_other_only_where_they_must() -> None:
    """Gate is finished before up multiplies into it; q/k and v are independent."""
    program = token_program([(Types(v="Q6_K", up="Q8_0"), True)] * 2)
    barriers = plan_barriers(program.commands)
    waits = {
        one.label: barriers[at]
        for at, (one, other) in enumerate(pairwise(program.commands), start=1)
        if one.label == other.label
    }
    assert waits == {
        "layer 0 qkv": False,
        "layer 0 gate/up": True,
        "layer 1 qkv": False,
        "layer 1 gate/up": True,
    }


def moe_layers(program: Program) -> list[int]:
    """The layer each top-k dispatch is told, from its push constants."""
    name = router_topk.__name__
    fields = [item.name for item in KERNELS[name].push]
    assert fields[:2] == ["shared_address", "layer"]
    return [
        struct.unpack_from("<I", command.push, 8)[0]
        for command in program.commands
        if isinstance(command, Dispatch) and command.variant.startswith(name)
    ]


@pytest.mark.parametrize(
    "layers", [[MOE] * 3, [DENSE, MOE, MOE], [MOE, DENSE, MOE, DENSE], [DENSE, DENSE, MOE]]
)
def test_the_expert_table_counts_moe_layers(layers: list[tuple[Types, bool]]) -> None:
    """As the loader fills it: dense layers have no row of their own."""
    n_moe = sum(is_moe for _, is_moe in layers)
    program = token_program(layers)
    assert moe_layers(program) == list(range(n_moe))
    logs = [command.writes for command in program.commands if "top-k" in command.label]
    starts = [r.start for writes in logs for r in writes if r.resource == "log"]
    assert starts == [16 + 4 * EXPERTS.n_used * i for i in range(n_moe)]


def test_layers_are_ordered_by_barriers() -> None:
    """Every layer waits for the one before; only what is independent shares a step."""
    program = token_program([MOE] * 3)
    barriers = plan_barriers(program.commands)
    for index in range(3):
        first = program.commands.index(dispatches(program, index)[0])
        assert barriers[first]
    assert barriers[-1], "finish must come after everything"
    assert sum(barriers) >= 8 * 3


KEEP, GATHER = MissService("read", keep=True), MissService("gather", keep=True)
MIXED = [MOE, (Types(v="Q6_K", up="Q8_0"), True), DENSE, MOE]


def test_without_keeping_misses_take_the_program_of_a_model_without_cache() -> None:
    """But for the look-up's words: nothing is stored, nothing more is read or launched."""
    plain = token_program(MIXED)
    served = token_program(MIXED, misses=MissService("read", keep=False))
    assert str(served) == str(plain)
    assert [c.writes for c in served.commands] == [c.writes for c in plain.commands]


@pytest.mark.parametrize("tuning", TUNINGS, ids=str)
def test_keeping_what_is_read_takes_no_more_dispatches_and_no_more_barriers(tuning: Tuning) -> None:
    plain, keeping = token_program(MIXED, tuning), token_program(MIXED, tuning, misses=KEEP)
    assert plan_barriers(keeping.commands) == plan_barriers(plain.commands)
    assert layer_ends(keeping.commands) == layer_ends(plain.commands)
    for one, other in zip(plain.commands, keeping.commands, strict=True):
        assert isinstance(one, Dispatch) and isinstance(other, Dispatch)
        is_routed = "expert" in one.variant and not one.label.startswith("layer 2")
        wanted = one.variant.replace(".", "_keep.", 1) if is_routed else one.variant
        assert other.variant == wanted and other.groups == one.groups
        assert (spirv_folder() / f"{other.variant}.spv").exists()
        # A slot arena, the shared scratch, and the log.
        assert len(set(other.writes) - set(one.writes)) == (3 if is_routed else 0)


def test_gathering_takes_one_dispatch_a_layer_with_a_barrier_on_either_side() -> None:
    plain, gathering = token_program(MIXED), token_program(MIXED, misses=GATHER)
    barriers = plan_barriers(gathering.commands)
    added = [i for i, command in enumerate(gathering.commands) if "gather" in command.label]
    assert [gathering.commands[i].label for i in added] == [
        "layer 0 gather", "layer 1 gather", "layer 3 gather"]  # fmt: skip
    for index in added:
        assert "top-k" in gathering.commands[index - 1].label
        assert "gate/up" in gathering.commands[index + 1].label
        assert barriers[index] and barriers[index + 1]
    rest = [c.label for i, c in enumerate(gathering.commands) if i not in added]
    assert rest == [command.label for command in plain.commands]
    cut = segments(gathering.commands)
    assert ["gather" in command.label for command in cut[1]][:2] == [False, True]
    assert not any("gather" in command.label for command in cut[0])


@pytest.mark.parametrize("misses", [KEEP, GATHER], ids=["keep", "gather"])
def test_what_was_filled_has_its_own_words_in_the_log(misses: MissService) -> None:
    """Behind the ids of all layers, two words a used expert, a row for each MoE layer."""
    program = token_program(MIXED, misses=misses)
    n_ids = len(MIXED) * EXPERTS.n_used
    words = [[r.start // 4 - 4 - n_ids for r in command.writes if r.resource == "log"]
             for command in program.commands
             if "gate/up" in command.label or "gather" in command.label]  # fmt: skip
    rows = [row[0] for row in words if row]
    wanted = [0, 4, 4, 8] if misses is KEEP else [0, 4, 8]  # gate and up apart in one layer
    assert rows == wanted


@pytest.mark.parametrize("misses", [KEEP, GATHER], ids=["keep", "gather"])
def test_the_look_up_is_told_where_landing_places_are(misses: MissService) -> None:
    fields = [item.name for item in KERNELS["router_topk"].push]
    assert fields[-2:] == ["first_landing", "n_landing"]
    program = token_program(MIXED, misses=misses)
    told = [struct.unpack_from("<II", command.push, len(command.push) - 8)
            for command in program.commands
            if isinstance(command, Dispatch) and command.kernel == "router_topk"]  # fmt: skip
    entries = 3 * EXPERTS.n_experts
    assert told == [(entries + 2 * layer, EXPERTS.n_used) for layer in range(3)]
