"""The program of a token whose misses are kept as they are read, or gathered ahead of it."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from tests.gpu.checker import unguarded
from tests.models.invented import DENSE, EXPERTS, MOE, TUNINGS, Types, token_program
from vkmoe.execute.segments import cut_at_routers, layer_ends
from vkmoe.gpu.device import spirv_folder
from vkmoe.gpu.hazards import plan_barriers
from vkmoe.gpu.kernels import KERNELS
from vkmoe.gpu.program import MEMORY, Dispatch, Range
from vkmoe.kernels.tuning import Tuning
from vkmoe.modes import Cache, ExpertMode

KEEP, GATHER = Cache(promotes=True), Cache("gather", promotes=True)
MIXED = [MOE, (Types(v="Q6_K", up="Q8_0"), True), DENSE, MOE]


def test_without_keeping_misses_take_the_program_of_a_model_without_cache() -> None:
    """But for the look-up's words: nothing is stored, nothing more is read or launched."""
    plain = token_program(MIXED)
    served = token_program(MIXED, mode=Cache())
    assert str(served) == str(plain)
    assert [c.writes for c in served.commands] == [c.writes for c in plain.commands]


def sizes(command: Dispatch) -> dict[str, int]:
    """What a kernel is specialised for, but for how much it loads at once: no sum depends on it."""
    names = KERNELS[command.kernel].constants
    named = dict(zip(names, command.constants, strict=True))
    return {name: value for name, value in named.items() if name != "loaded_words"}


@pytest.mark.parametrize("tuning", TUNINGS, ids=str)
def test_keeping_what_is_read_takes_no_more_dispatches_and_no_more_barriers(tuning: Tuning) -> None:
    plain, keeping = token_program(MIXED, tuning), token_program(MIXED, tuning, mode=KEEP)
    assert plan_barriers(keeping.commands) == plan_barriers(plain.commands)
    assert layer_ends(keeping.commands) == layer_ends(plain.commands)
    for one, other in zip(plain.commands, keeping.commands, strict=True):
        assert isinstance(one, Dispatch) and isinstance(other, Dispatch)
        is_routed = "expert" in one.variant and not one.label.startswith("layer 2")
        wanted = one.variant.replace(".", "_keep.", 1) if is_routed else one.variant
        assert other.variant == wanted and other.groups == one.groups
        assert sizes(other) == sizes(one) and other.subgroup_size == one.subgroup_size
        assert (spirv_folder() / f"{other.variant}.spv").exists()
        # A slot arena, the shared scratch, and the log.
        assert len(set(other.writes) - set(one.writes)) == (3 if is_routed else 0)


def test_gathering_takes_one_dispatch_a_layer_with_a_barrier_on_either_side() -> None:
    plain, gathering = token_program(MIXED), token_program(MIXED, mode=GATHER)
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
    cut = [part.commands for part in cut_at_routers(gathering.commands)]
    assert ["gather" in command.label for command in cut[1]][:2] == [False, True]
    assert not any("gather" in command.label for command in cut[0])


@pytest.mark.parametrize("mode", [KEEP, GATHER], ids=["keep", "gather"])
def test_what_was_filled_has_its_own_words_in_the_log(mode: ExpertMode) -> None:
    """Behind the ids of all layers, two words a used expert, a row for each MoE layer."""
    program = token_program(MIXED, mode=mode)
    n_ids = sum(is_moe for _, is_moe in MIXED) * EXPERTS.n_used
    words = [[r.start // 4 - 4 - n_ids for r in command.writes if r.resource == "log"]
             for command in program.commands
             if "gate/up" in command.label or "gather" in command.label]  # fmt: skip
    rows = [row[0] for row in words if row]
    wanted = [0, 4, 4, 8] if mode is KEEP else [0, 4, 8]  # gate and up apart in one layer
    assert rows == wanted


@pytest.mark.parametrize("mode", [KEEP, GATHER], ids=["keep", "gather"])
def test_the_look_up_is_told_where_landing_places_are(mode: ExpertMode) -> None:
    fields = [item.name for item in KERNELS["router_topk"].push]
    behind = 4 * len(fields[fields.index("first_landing") :])  # words, but for an address before
    assert fields[fields.index("first_landing") + 1] == "n_landing"
    program = token_program(MIXED, mode=mode)
    told = [struct.unpack_from("<II", command.push, len(command.push) - behind)
            for command in program.commands
            if isinstance(command, Dispatch) and command.kernel == "router_topk"]  # fmt: skip
    entries = 3 * EXPERTS.n_experts
    assert told == [(entries + 2 * layer, EXPERTS.n_used) for layer in range(3)]


@pytest.mark.parametrize("mode", [KEEP, GATHER], ids=["keep", "gather"])
def test_every_barrier_of_served_misses_is_needed(mode: ExpertMode) -> None:
    """An independent judge finds nothing unguarded, and misses each barrier that is taken away."""
    commands = token_program(MIXED, mode=mode).commands
    barriers = plan_barriers(commands)
    assert unguarded(commands, barriers) == []
    for index in [i for i, barrier in enumerate(barriers) if barrier]:
        without = [*barriers]
        without[index] = False
        assert any(second == index for _, second in unguarded(commands, without))


def test_memory_alone_orders_gathering_and_reading() -> None:
    """Without any tensor: gathered before it is read, read before the next layer gathers there."""
    commands = [replace(c, reads=only_memory(c.reads), writes=only_memory(c.writes))
                for c in token_program([MOE] * 2, mode=GATHER).commands
                if isinstance(c, Dispatch)]  # fmt: skip
    barriers = plan_barriers(commands)
    labels = [command.label for command in commands]
    assert barriers[labels.index("layer 0 gate/up")], "read after write"
    between = slice(labels.index("layer 0 down") + 1, labels.index("layer 1 gather") + 1)
    assert any(barriers[between]), "write after read, of the scratch that both share"


def only_memory(ranges: tuple[Range, ...]) -> tuple[Range, ...]:
    return tuple(item for item in ranges if item.resource == MEMORY)
