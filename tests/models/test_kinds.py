"""The programs of each kind of model: what a layer takes, in what order, where it may be cut."""

from __future__ import annotations

import itertools
import struct
from dataclasses import replace

import pytest

from tests.gpu.checker import unguarded
from tests.models.changed_specs import with_experts, with_mixer
from tests.models.invented import (
    DENSE,
    EXPERTS,
    KINDS,
    MOE,
    SPEC,
    TUNINGS,
    Types,
    dispatches,
    token_program,
)
from vkmoe.execute.segments import cut_at_routers, layer_ends
from vkmoe.facts import AttentionSpec, DenseSpec, RopeSpec
from vkmoe.gpu.hazards import plan_barriers
from vkmoe.gpu.kernels import KERNELS
from vkmoe.gpu.program import MEMORY, Dispatch, Program
from vkmoe.kernels.tuning import Tuning
from vkmoe.modes import Cache, ExpertMode, Resident

GROUPED = ["qkv", "attention", "attention combine", "output"]
GATED = ["qkv", "qkv", "attention", "attention combine", "gate", "output"]
DELTA = ["qkv", "qkv", "inputs", "delta", "gate", "output"]
LATENT = ["q/kv", "absorbed", "attention", "attention combine", "values", "output"]
COMPRESSED = ["q/kv", "q norm", "q", *LATENT[1:]]
ROUTED = ["router", "top-k", "gate/up", "down"]
SHARED = ["router", "shared gate/up", "top-k", "gate/up", "down", "shared down"]
LAYERS = {
    "olmoe": [*GROUPED, *ROUTED],
    "qwen2moe": [*GROUPED, *SHARED],
    "gpt-oss": [*GROUPED, *ROUTED],
    "delta rule": [*DELTA, *SHARED],
    "gated": [*GATED, *ROUTED],
    "deepseek2 lite": [*LATENT, *SHARED],
    "deepseek2": [*COMPRESSED, *SHARED],
}
MODES = [Resident(), Cache(), Cache(promotes=True), Cache("gather")]


def labels(program: Program, index: int) -> list[str]:
    return [item.label.removeprefix(f"layer {index} ") for item in dispatches(program, index)]


def kind_program(kind: str, tuning: Tuning = TUNINGS[0], dense: int = 0) -> Program:
    return token_program([DENSE] * dense + [MOE] * 3, tuning, spec=KINDS[kind])


@pytest.mark.parametrize("tuning", TUNINGS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_takes_these_dispatches_in_this_order(kind: str, tuning: Tuning) -> None:
    program = kind_program(kind, tuning)
    for index in range(3):
        assert labels(program, index) == LAYERS[kind]
    assert len(program.dispatches()) == 3 * len(LAYERS[kind]) + 5


@pytest.mark.parametrize("kind", KINDS)
def test_leading_dense_layers_have_neither_a_router_nor_a_shared_expert(kind: str) -> None:
    program = kind_program(kind, dense=1)
    attention = LAYERS[kind][: LAYERS[kind].index("router")]
    assert labels(program, 0) == [*attention, "gate/up", "down"]
    assert labels(program, 1) == LAYERS[kind]


def test_biases_take_no_dispatch_of_their_own() -> None:
    """Nor do sinks and windows: gpt-oss has as many as a model without."""
    assert len(LAYERS["gpt-oss"]) == len(LAYERS["olmoe"]) == 8
    biased = with_mixer(KINDS["olmoe"], qkv_bias=True, output_bias=True)
    program = token_program([DENSE] * 2, spec=biased, dense=DenseSpec(256, bias=True))
    assert labels(program, 1) == [*GROUPED, "gate/up", "down"]


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_one_kind_share_their_pipelines(kind: str) -> None:
    """A window is told in push constants: no layer has a kernel that another has not."""
    program = kind_program(kind)
    first, *others = [
        [(item.variant, item.constants) for item in dispatches(program, index)]
        for index in range(3)
    ]
    assert all(other == first for other in others)


def test_layers_see_their_own_window() -> None:
    program = token_program([MOE] * 4, spec=KINDS["gpt-oss"])
    pushes = [
        item.push
        for index in range(4)
        for item in dispatches(program, index)
        if item.label.endswith("attention")
    ]
    sizes = {len(push) for push in pushes}
    assert len(sizes) == 1
    same = token_program([MOE] * 4, spec=with_mixer(KINDS["gpt-oss"], window=0))
    whole = [item.push for i in range(4) for item in dispatches(same, i)
             if item.label.endswith("attention")]  # fmt: skip
    assert [a == b for a, b in zip(pushes, whole, strict=True)] == [False, True] * 2


def test_layers_read_the_rotary_table_of_their_own_embedding() -> None:
    spec = KINDS["olmoe"]
    one = spec.layers[0]
    assert isinstance(one.mixer, AttentionSpec)
    other = replace(one, mixer=replace(one.mixer, rope=RopeSpec(64, base=1e6)))
    program = token_program([MOE] * 4, spec=replace(spec, layers=(one, other)))
    fields = [item.name for item in KERNELS["attention"].push]  # addresses come first
    tables = [
        struct.unpack_from("<Q", item.push, 8 * fields.index("rope_table"))[0]
        for item in program.dispatches("layer")
        if item.kernel == "attention"
    ]
    assert len(set(tables)) == 2 and tables[:2] == tables[2:]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_end_behind_a_shared_expert(kind: str, mode: ExpertMode) -> None:
    layers = [DENSE, MOE, MOE]
    commands = token_program(layers, mode=mode, spec=KINDS[kind]).commands[:-1]
    ends = layer_ends(commands)
    assert len(ends) == 3
    for index, end in enumerate(ends):
        assert commands[end - 1].label.startswith(f"layer {index} ")
        assert commands[end - 1].label.endswith("down")
        assert not commands[end].label.startswith(f"layer {index} ")


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_end_before_the_first_routed_expert(kind: str, mode: ExpertMode) -> None:
    """And after what a shared expert does without the router."""
    layers = [DENSE, MOE, MOE]
    commands = token_program(layers, mode=mode, spec=KINDS[kind]).commands[:-1]
    parts = [part.commands for part in cut_at_routers(commands)]
    assert len(parts) == 3
    for part in parts[:-1]:
        assert part[-1].label.endswith("top-k")
    for part in parts[1:]:
        wanted = "gather" if mode.gathers else "gate/up"
        assert part[1].label.endswith(wanted) and "shared" not in part[1].label
    again = parts[0] + list(itertools.chain(*(part[1:] for part in parts[1:])))
    assert len(again) == sum(map(len, parts)) - 2


@pytest.mark.parametrize("kind", ["qwen2moe", "deepseek2 lite", "deepseek2"])
def test_a_shared_expert_is_begun_beside_the_router(kind: str) -> None:
    """Its gate/up waits for nothing that the router's matvec does not wait for."""
    program = kind_program(kind)
    barriers = plan_barriers(program.commands)
    at = next(i for i, item in enumerate(program.commands) if "shared gate/up" in item.label)
    assert program.commands[at - 1].label.endswith("router")
    assert barriers[at - 1] and not barriers[at]


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_is_read_by_address_is_declared(kind: str) -> None:
    """Biases, sinks and gains too: the recorder refuses to guess what a command touches."""
    program = kind_program(kind, dense=1)
    for command in program.commands:
        assert isinstance(command, Dispatch)
        without = command.kernel == "attention_combine" or (
            command.kernel == "gate_heads" and kind == "gated"  # no norm
        )
        if "layer" in command.label and not without:
            assert any(item.resource == MEMORY for item in command.reads), command.label


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_barrier_is_needed(kind: str, mode: ExpertMode) -> None:
    """An independent judge finds nothing unguarded, and misses each barrier that is taken away."""
    commands = token_program([DENSE, MOE, MOE], mode=mode, spec=KINDS[kind]).commands
    barriers = plan_barriers(commands)
    assert unguarded(commands, barriers) == []
    for index in [i for i, barrier in enumerate(barriers) if barrier]:
        without = [*barriers]
        without[index] = False
        assert any(second == index for _, second in unguarded(commands, without))


def declared_bytes(program: Program, label: str) -> int:
    (command,) = (item for item in program.commands if item.label == label)
    return sum(item.end - item.start for item in command.reads if item.resource == MEMORY)


def test_each_bias_is_among_what_its_command_reads() -> None:
    """Sinks are read where the splits are joined."""
    spec = KINDS["gpt-oss"]
    plain = with_mixer(spec, qkv_bias=False, output_bias=False, sinks=False)
    plain = with_experts(plain, router_bias=False)
    mixer = spec.layers[0].mixer
    assert spec.experts is not None
    programs = [token_program([MOE], spec=item) for item in (spec, plain)]
    grown = {}
    for name in (*GROUPED, "router", "top-k"):
        with_biases, without = (declared_bytes(item, f"layer 0 {name}") for item in programs)
        grown[name] = with_biases - without
    assert grown == {
        "qkv": 4 * mixer.qkv_width,
        "attention": 0,
        "attention combine": 4 * mixer.n_heads,
        "output": 4 * spec.width,
        "router": 4 * spec.experts.n_experts,
        "top-k": 0,
    }


def test_a_selection_bias_is_read_by_the_choice() -> None:
    spec = KINDS["deepseek2"]
    assert spec.experts is not None
    plain = with_experts(spec, selection_bias=False)
    pair = [declared_bytes(token_program([MOE], spec=item), "layer 0 top-k")
            for item in (spec, plain)]  # fmt: skip
    assert pair[0] - pair[1] == 4 * spec.experts.n_experts


def test_scales_of_experts_are_read_by_the_choice() -> None:
    """Each layer reads its own."""
    scaled = token_program([MOE] * 2, spec=with_experts(SPEC, output_scales=True))
    plain = token_program([MOE] * 2)
    for index in range(2):
        pair = [declared_bytes(item, f"layer {index} top-k") for item in (scaled, plain)]
        assert pair[0] - pair[1] == 4 * EXPERTS.n_experts
    numbers = [numbers_of(scaled, f"layer {index} top-k") for index in range(2)]
    assert len({item["output_scales"] for item in numbers} - {0}) == 2


def test_logits_are_capped_before_the_candidates_see_them() -> None:
    program = token_program([MOE], spec=replace(SPEC, logit_cap=30.0))
    labels = [command.label for command in program.commands]
    assert labels[-5:] == ["logits", "cap", "candidates", "candidates merge", "finish"]
    assert plan_barriers(program.commands)[-5:-2] == [True] * 3
    assert numbers_of(program, "cap")["cap"] == 30.0


def test_embeddings_have_the_scale_of_the_model() -> None:
    scaled = token_program([MOE], spec=replace(SPEC, embedding_scale=22.5))
    assert numbers_of(scaled, "embed")["scale"] == 22.5
    assert numbers_of(token_program([MOE]), "embed")["scale"] == 1.0


def numbers_of(program: Program, label: str) -> dict[str, int | float]:
    (command,) = (item for item in program.dispatches() if item.label == label)
    return KERNELS[command.kernel].numbers_of(command.push, command.constants)


def test_mixed_types_cost_the_new_kinds_what_they_cost_the_old() -> None:
    program = token_program([(Types(v="Q6_K", up="Q8_0"), True)], spec=KINDS["gpt-oss"])
    assert len(labels(program, 0)) == len(LAYERS["gpt-oss"]) + 2
