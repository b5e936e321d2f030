"""The program of a token: how many dispatches, how labelled, in what order, for which layers."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest

from tests.models.invented import (
    DENSE,
    EXPERTS,
    MOE,
    TUNINGS,
    Types,
    dispatches,
    token_program,
)
from vkmoe.gpu.device import spirv_folder
from vkmoe.gpu.hazards import plan_barriers
from vkmoe.gpu.kernels import KERNELS
from vkmoe.gpu.program import Dispatch, Program
from vkmoe.kernels.router.operations import router_topk
from vkmoe.kernels.tuning import Tuning

MOST_DISPATCHES = 9  # of a layer


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
    assert len(program.dispatches()) == 3 * n_dispatches + 5


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
    assert fields[:3] == ["selection_bias", "output_scales", "layer"]
    return [
        struct.unpack_from("<I", command.push, 16)[0]
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
