"""gate/up, down and gather against their twins: many experts, mixed types, any places."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.tunings import (
    MAPPINGS,
    SIZES,
    TYPES_AND_MAPPINGS,
    every_type,
    mapping_of,
    step_of,
    tuning_for,
)
from vkmoe.gpu.hazards import plan_barriers
from vkmoe.gpu.program import Program, TensorRef, memory_range
from vkmoe.gpu.runner import Runner
from vkmoe.kernels.context import OpContext
from vkmoe.kernels.experts.cases import DownCase, GateUpCase
from vkmoe.kernels.experts.spans import Use
from vkmoe.kernels.inputs import PARAMS, WEIGHT_TYPES
from vkmoe.kernels.memory.cases import GatherCase
from vkmoe.kernels.memory.operations import GROUP_BYTES, LandingMemory, gather
from vkmoe.kernels.memory.twins import gather as twin
from vkmoe.kernels.router.operations import RoutingLog
from vkmoe.kernels.tuning import Tuning

CPU_TUNING = tuning_for("+blocks", 8, 4)
GPU_TUNING = tuning_for("", 32, 4)


@pytest.mark.parametrize(("kind", "suffix"), TYPES_AND_MAPPINGS)
def test_gate_and_up(runner: Runner, kind: str, suffix: str) -> None:
    """Gate and up of one type in one dispatch, of two types in two; 1 to 8 slots."""
    i, j = WEIGHT_TYPES.index(kind), MAPPINGS.index(suffix)
    other = WEIGHT_TYPES[(i + 1 + j) % len(WEIGHT_TYPES)] if (i + j) % 2 else kind
    rng = np.random.default_rng([i, j])
    case = GateUpCase(
        tuning_for(suffix, SIZES[(i + j) % len(SIZES)], 1 + (3 * i + j) % 4),
        (kind, other),
        Use(int(rng.integers(8, 20)), 1 + (i + 2 * j) % 8),
        n_rows=int(rng.integers(1, 30)),
        n_columns=step_of(kind, other) * int(rng.integers(1, 4)),
        n_partials=int(rng.integers(1, 100)),
    )
    case.run(runner).verify()


@pytest.mark.parametrize(("kind", "suffix"), TYPES_AND_MAPPINGS)
def test_down(runner: Runner, kind: str, suffix: str) -> None:
    i, j = WEIGHT_TYPES.index(kind), MAPPINGS.index(suffix)
    rng = np.random.default_rng([i, j, 1])
    case = DownCase(
        tuning_for(suffix, SIZES[(i + j + 2) % len(SIZES)], 1 + (i + 3 * j) % 4),
        kind,
        Use(int(rng.integers(8, 20)), 1 + (3 * i + j) % 8),
        n_rows=int(rng.integers(1, 30)),
        n_columns=step_of(kind) * int(rng.integers(1, 4)),
    )
    case.run(runner).verify()


@pytest.mark.parametrize("tuning", [CPU_TUNING, GPU_TUNING], ids=["blocks", "lanes"])
def test_eight_of_128_experts(runner: Runner, tuning: Tuning) -> None:
    """The experts that are not routed to are NaN throughout."""
    GateUpCase(tuning, ("Q4_K", "Q4_K"), Use(128, 8), 12, 256).run(runner).verify()
    with Runner(runner.device) as other:
        DownCase(tuning, "Q6_K", Use(128, 8), 12, 256).run(other).verify()


def test_without_a_norm(runner: Runner) -> None:
    GateUpCase(CPU_TUNING, ("F16", "F16"), Use(3, 2), 4, 32, n_partials=0).run(runner).verify()


@every_type
def test_damaged_rows_leave_their_neighbours_alone(runner: Runner, kind: str) -> None:
    """Row 2 of every expert is NaN; the partial sum it takes part in is NaN, no other is.

    A block of NVFP4 cannot say that it is not a number: its numbers are finite, whatever its bytes.
    """
    tuning = CPU_TUNING if mapping_of(kind).startswith("+blocks") else GPU_TUNING
    use = Use(5, 3, damaged_row=2)
    with np.errstate(invalid="ignore"):
        checks = GateUpCase(tuning, (kind, kind), use, 7, 256).run(runner)
        with Runner(runner.device) as other:
            left = DownCase(tuning, kind, use, 9, 256).run(other)
    checks.verify()
    left.verify()
    assert (checks.n_left_out, left.n_left_out) == ((0, 0) if kind == "NVFP4" else (3, 1))


@pytest.mark.parametrize(
    "span_bytes", [16, 16 * 63, GROUP_BYTES - 16, GROUP_BYTES, GROUP_BYTES + 16, 3 * GROUP_BYTES]
)
@pytest.mark.parametrize("misses", [(), (2,), (1, 3, 4), (0, 1, 2, 3, 4)], ids=str)
def test_missed_spans_are_copied(runner: Runner, span_bytes: int, misses: tuple[int, ...]) -> None:
    GatherCase(span_bytes, 5, misses).run(runner).verify()


def test_one_gathered_expert(runner: Runner) -> None:
    GatherCase(4096, 1, (0,)).run(runner).verify()


def test_a_span_of_more_workgroups_than_a_line_takes(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an expert of Mixtral in F32, 704 MB, with the limit that allows 512 MiB in one line."""
    monkeypatch.setattr("vkmoe.gpu.program.MAX_GROUPS", 3)
    for n_groups in (3, 4, 7):
        GatherCase(n_groups * GROUP_BYTES - 16, 3, (0, 2)).run(runner).verify()


def test_the_twin_copies_what_has_a_partner() -> None:
    """Worked out by hand: three slots of 4 bytes, the second is copied."""
    memory = np.arange(16, dtype=np.uint8)
    ids = np.array([7, 8, 9], np.uint32)
    addresses, partners = (np.array(list(a), np.uint64) for a in ((256, 264, 256), (0, 260, 0)))
    after, filled = twin(memory, ids, addresses, partners, 4)
    assert after.tolist() == [*range(8), 4, 5, 6, 7, 12, 13, 14, 15]
    assert filled.tolist() == [[0, 0], [9, 9], [0, 0]]


def test_scratch_that_layers_share_is_ordered_by_barriers() -> None:
    """Written by a layer only when the one before has read it, and read when it is written."""
    log, routing = RoutingLog(2, 2), TensorRef("routing", 12)
    scratch, home = memory_range(4096, 1024), memory_range(1 << 20, 1024)
    program = Program("two layers")
    for layer in range(2):
        op = OpContext(program, CPU_TUNING, f"gather {layer}")
        gather(op, routing, PARAMS, LandingMemory((scratch,), log, layer), 512, (home,))
    assert plan_barriers(program.commands) == [False, True], "both write the same places"
    gathered = program.commands[0]
    assert gathered.writes == (log.filled(0), scratch)
    assert gathered.reads == (routing.whole, PARAMS.whole, home)
