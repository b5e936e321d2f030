"""Where the commands of a token are cut: at routers, and at layer borders."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

import pytest

from tests.models.invented import DENSE, MOE, TUNINGS, Types, token_program
from vkmoe.execute.segments import (
    Bring,
    Compute,
    Part,
    cut_at_handovers,
    cut_at_layers,
    cut_at_routers,
    cut_within,
    layer_ends,
)
from vkmoe.gpu.program import Command, Dispatch, Mark
from vkmoe.kernels.tuning import Tuning

LAYERS = {
    "moe": [MOE] * 3,
    "first dense": [DENSE, MOE, MOE],
    "alternating": [MOE, DENSE, MOE, DENSE],
    "last moe": [DENSE, DENSE, MOE],
    "mixed types": [(Types(v="Q6_K", up="Q8_0"), True), (Types(down="Q4_K"), True)],
    "one": [MOE],
}


def body(layers: list[tuple[Types, bool]], tuning: Tuning = TUNINGS[0]) -> list[Command]:
    """A token's commands, without the serial behind them."""
    commands = token_program(layers, tuning).commands
    assert commands[-1].label == "finish"
    return commands[:-1]


def kernel_of(command: Command) -> str:
    assert isinstance(command, Dispatch)
    return command.kernel


def log_words(command: Command) -> list[int]:
    """Where it writes to the log: a router's ids tell its MoE layer."""
    return [item.start for item in command.writes if item.resource == "log"]


@pytest.mark.parametrize("tuning", TUNINGS, ids=str)
@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_a_token_is_cut_at_every_router(layers: list[tuple[Types, bool]], tuning: Tuning) -> None:
    commands = body(layers, tuning)
    found = cut_at_routers(commands)
    parts = [part.commands for part in found]
    n_moe_layers = sum(is_moe for _, is_moe in layers)
    assert [part.then for part in found] == [*map(Bring, range(n_moe_layers)), None]
    for part in parts[:-1]:
        assert kernel_of(part[-1]) == "router_topk"
    for before, after in pairwise(parts):
        assert after[0] is before[-1], "the look-up comes again, with another table"
        assert kernel_of(after[1]) == "expert_gate_up", "and its experts follow at once"
    again = parts[0] + [command for part in parts[1:] for command in part[1:]]
    assert again == commands
    routers = [log_words(part[-1])[0] for part in parts[:-1]]
    assert routers == sorted(set(routers))


def test_a_model_without_experts_is_one_segment() -> None:
    commands = body([DENSE] * 2)
    assert cut_at_routers(commands) == [Part(commands)]


def test_with_logits_or_without_only_the_last_segment_differs() -> None:
    with_head = [part.commands for part in cut_at_routers(body([MOE] * 3))]
    prompt = token_program([MOE] * 3, with_logits=False).commands[:-1]
    without = [part.commands for part in cut_at_routers(prompt)]
    assert with_head[:-1] == without[:-1]
    assert with_head[-1][: len(without[-1])] == without[-1]
    assert len(with_head[-1]) > len(without[-1])


def test_borders_are_found_by_marks_whatever_kernels_and_labels_are_called() -> None:
    commands = [renamed(command) for command in body([MOE] * 2)]
    assert len(cut_at_routers(commands)) == 3
    assert len(layer_ends(commands)) == 2


def renamed(command: Command) -> Command:
    assert isinstance(command, Dispatch)
    return replace(command, label="anything", kernel="anything", variant="anything")


def test_every_command_of_a_layer_says_its_layer_and_what_it_is_for() -> None:
    for command in body([DENSE, MOE]):
        layer = command.mark.layer
        assert command.label.startswith(f"layer {layer} ") == (layer is not None)
    roles = [role for role, _ in groupby(command.mark.role for command in body([DENSE, MOE]))]
    dense, moe = ["attention", "dense"], ["attention", "router", "choice", "routed"]
    assert roles == ["embed", *dense, *moe, "head"]


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_layers_end_with_their_last_down_projection(layers: list[tuple[Types, bool]]) -> None:
    commands = body(layers)
    ends = layer_ends(commands)
    assert len(ends) == len(layers)
    for index, end in enumerate(ends):
        assert commands[end - 1].label.startswith(f"layer {index} ")
        following = commands[end].label
        assert following.startswith(f"layer {index + 1} ") or following == "logits"


@pytest.mark.parametrize("first_layers", [(), (1,), (2, 3), (1, 2, 3, 4)])
def test_parts_put_together_are_the_whole(first_layers: tuple[int, ...]) -> None:
    commands = body([MOE] * 4)
    parts = cut_at_layers(commands, first_layers)
    assert [command for part in parts for command in part.commands] == commands
    assert [part.commands[0].mark.layer for part in parts[1:]] == [
        layer if layer < 4 else None for layer in first_layers
    ]


def test_a_head_that_is_not_there_is_no_part() -> None:
    prompt = token_program([MOE] * 2, with_logits=False).commands[:-1]
    assert len(cut_at_layers(prompt, (1, 2))) == 2
    assert len(cut_at_layers(body([MOE] * 2), (1, 2))) == 3


# Roles of the commands of layers that hand over to the CPU: one with a shared expert, one without.
SHARED = [
    "attention",
    "router",
    "choice",
    "handed",
    "handed",
    "shared",
    "shared",
    "joined",
    "joined",
]
PLAIN_LAYER = ["attention", "router", "choice", "handed", "handed", "joined", "joined"]


@pytest.mark.parametrize("before_head", [False, True])
def test_a_chain_is_cut_where_rows_go_and_where_they_come_back(before_head: bool) -> None:
    roles: list[Any] = ["embed", *SHARED, "attention", "dense", *PLAIN_LAYER, "head", "head"]
    one = body([MOE])[0]
    commands = [replace(one, label=str(i), mark=Mark(role)) for i, role in enumerate(roles)]
    parts = cut_at_handovers(commands, before_head)
    assert [command for part in parts for command in part.commands] == commands
    found = [(len(part.commands), part.then, part.waits) for part in parts]
    last = [(2, None, True), (2, None, False)] if before_head else [(4, None, True)]
    assert found == [(6, Compute(0), False), (2, None, False), (9, Compute(1), True), *last]


def test_a_long_part_of_a_chain_is_cut_within() -> None:
    """The host's work stays behind its end, and waiting at its begin; short parts stay whole."""
    one = body([MOE])[0]
    commands = [replace(one, label=str(i), mark=Mark("dense", i // 2)) for i in range(10)]
    parts = [Part(commands[:4], Compute(0)), Part(commands[4:], Compute(1), waits=True)]
    cut = cut_within(parts, lambda a, b: a.mark != b.mark)
    assert [command for part in cut for command in part.commands] == commands
    found = [(len(part.commands), part.then, part.waits) for part in cut]
    assert found == [(4, Compute(0), False), (2, None, True), (2, None, False),
                     (2, Compute(1), False)]  # fmt: skip
    assert cut_within(parts, lambda a, b: False) == parts


def test_empty_parts_are_refused() -> None:
    with pytest.raises(AssertionError):
        cut_at_layers(body([MOE] * 2), (1, 1))
