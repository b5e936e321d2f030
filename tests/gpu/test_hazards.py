"""Barriers: unit cases, properties against a brute-force checker, and mutation of real programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu.checker import conflict, unguarded
from vkmoe.batch import BatchKind, Phase
from vkmoe.choices import Executor
from vkmoe.config import EngineConfig
from vkmoe.engine import Engine
from vkmoe.gpu.backend import Backend
from vkmoe.gpu.hazards import plan_barriers
from vkmoe.gpu.program import MEMORY, Command, Copy, Dispatch, Program, Range

pytestmark = pytest.mark.usefixtures("one_device")

MODELS = Path(__file__).resolve().parent.parent / "fixtures" / "models"


def command(reads: list[Range] | None = None, writes: list[Range] | None = None) -> Dispatch:
    """A dispatch of which only the ranges matter."""
    return Dispatch("any", (), (), b"", (1, 1, 1), tuple(reads or ()), tuple(writes or ()), "any")


A, B = Range("a", 0, 64), Range("b", 0, 64)
READ, WRITE = command(reads=[A]), command(writes=[A])


@pytest.mark.parametrize(
    ("first", "second", "hazard"),
    [
        (WRITE, READ, "RAW"),
        (READ, WRITE, "WAR"),
        (WRITE, WRITE, "WAW"),
        (READ, READ, ""),
        (WRITE, command(reads=[B], writes=[B]), ""),
        (command(writes=[Range("a", 0, 32)]), command(reads=[Range("a", 32, 64)]), ""),
        (command(writes=[Range("a", 0, 33)]), command(reads=[Range("a", 32, 64)]), "RAW"),
        (command(writes=[Range("a", 16, 16)]), READ, ""),
        (command(writes=[Range(MEMORY, 1 << 40, (1 << 40) + 1)]),
         command(reads=[Range(MEMORY, 0, 1 << 41)]), "RAW"),
    ],
)  # fmt: skip
def test_two_commands(first: Dispatch, second: Dispatch, hazard: str) -> None:
    """The plan and the checker agree with what is obvious."""
    assert conflict(first, second) == hazard
    assert plan_barriers([first, second]) == [False, bool(hazard)]


def test_a_barrier_settles_all_that_was_before_it() -> None:
    writes_both = command(writes=[A, B])
    reads_a, reads_b = command(reads=[A]), command(reads=[B])
    assert plan_barriers([writes_both, reads_a, reads_b]) == [False, True, False]


def test_copies_count_as_reads_and_writes() -> None:
    copy = Copy(A, B, "copy")
    assert plan_barriers([WRITE, copy, command(reads=[B]), copy]) == [False, True, True, True]


def test_no_commands() -> None:
    assert plan_barriers([]) == []


ranges = st.builds(
    lambda resource, start, length: Range(resource, start, start + length),
    st.sampled_from(["a", "b", MEMORY]),
    st.integers(0, 40),
    st.integers(0, 12),
)
commands = st.builds(command, st.lists(ranges, max_size=3), st.lists(ranges, max_size=3))


@settings(deadline=None, max_examples=300)
@given(st.lists(commands, max_size=14))
def test_no_hazard_is_left_and_no_barrier_is_idle(program: list[Command]) -> None:
    """The greedy plan guards every pair; each barrier stands where one is due, not before."""
    barriers = plan_barriers(program)
    assert len(barriers) == len(program)
    assert unguarded(program, barriers) == []
    for index in [i for i, barrier in enumerate(barriers) if barrier]:
        without = [*barriers]
        without[index] = False
        assert any(second == index for _, second in unguarded(program, without))


@pytest.fixture(scope="module", params=["moe_plain", "dense_tied", "moe_odd"])
def program(request: pytest.FixtureRequest) -> Iterator[Program]:
    """The program of a token of a real, tiny model."""
    with Engine(MODELS / f"{request.param}.gguf", EngineConfig(ctx_size=64)) as engine:
        yield engine.program()


def test_the_plan_of_a_model_is_sound(program: Program) -> None:
    assert unguarded(program.commands, plan_barriers(program.commands)) == []


def test_every_deleted_barrier_of_a_model_is_noticed(program: Program) -> None:
    """The independent checker complains about the command that lost its barrier."""
    barriers = plan_barriers(program.commands)
    planned = [index for index, barrier in enumerate(barriers) if barrier]
    assert len(planned) > len(program.dispatches()) // 2
    for index in planned:
        mutant = [*barriers]
        mutant[index] = False
        found = unguarded(program.commands, mutant)
        assert any(second == index for _, second in found), program.commands[index]


# With a shared expert; with latent attention and a dense layer; with windows and sinks.
KINDS_OF_MODELS = ["qwen2moe_plain", "deepseek2_v3", "gptoss_odd"]
KINDS_OF_BATCHES = [("decode", 1), ("decode", 2), ("decode", 8), ("prompt", 64)]


@pytest.fixture(scope="module", params=KINDS_OF_MODELS)
def recorder(request: pytest.FixtureRequest) -> Iterator[Any]:
    """What makes the recordings of a real, tiny model; experts may lie in slots and be gathered."""
    options: dict[str, Any] = {"expert_slots": 2, "miss": "gather", "promote_on_read": True}
    config = EngineConfig(ctx_size=64, parallel=8, ubatch_size=64, **options)
    with Engine(MODELS / f"{request.param}.gguf", config) as engine:
        yield engine._programs._recorder


@pytest.mark.parametrize("executor", ["fused", "stepped"])
@pytest.mark.parametrize("batch", KINDS_OF_BATCHES, ids=str)
def test_every_deleted_barrier_is_noticed_in_programs_of_all_sizes(
    recorder: Any, batch: tuple[Phase, int], executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In those of whole batches, and in each part that is submitted, with all that dresses it."""
    monkeypatch.setattr(Backend, "record", lambda *arguments, **options: None)
    phase, n_rows = batch
    kind = BatchKind(phase, n_rows, n_rows if phase == "decode" else 1)
    recorded = replace(recorder, executor=executor).record(kind)
    parts = [segment.program for segment in recorded.segments]
    assert len(parts) > 1 or (executor, phase) == ("fused", "decode")
    places = recorder.decoder.weights.brought_places
    brought = {r for item in recorded.program.dispatches() if item.variant == "bring_experts"
               for r in item.writes}  # fmt: skip
    halves = {places.half(1), places.half(2)} if phase == "prompt" else set()
    assert brought == halves, "experts are brought to both halves, in chunks"
    for program in (recorded.program, *parts):
        barriers = plan_barriers(program.commands)
        assert unguarded(program.commands, barriers) == [], program
        for index in [i for i, barrier in enumerate(barriers) if barrier]:
            mutant = [*barriers]
            mutant[index] = False
            found = unguarded(program.commands, mutant)
            assert any(second == index for _, second in found), program.commands[index]


def test_what_a_model_reaches_by_address_is_declared(program: Program) -> None:
    """Weights, caches and tables lie in ranges: the kernels that read them name some."""
    quiet = {"attention_combine", "candidates_partial", "candidates_merge"}
    for item in program.commands:
        if isinstance(item, Dispatch) and item.variant not in quiet:
            assert any(r.resource == MEMORY for r in item.reads) or item.variant == "finish"
    appends = [r for item in program.commands for r in item.writes if r.resource == MEMORY]
    assert appends, "the KV append is declared nowhere"


def test_independent_matrices_share_no_barrier() -> None:
    """q, k and v of different types take several dispatches, none of which waits for another."""
    from vkmoe.gpu.program import TensorRef
    from vkmoe.kernels.context import OpContext
    from vkmoe.kernels.matvec.operations import Matrix, matvec
    from vkmoe.kernels.tuning import Tuning

    made = Program("qkv")
    matrices = [
        Matrix(kind, 4096 * (index + 1), 8, 256, 1024)
        for index, kind in enumerate(("F32", "Q4_K", "Q6_K"))
    ]
    x, y = TensorRef("x", 256), TensorRef("y", 24)
    op = OpContext(made, Tuning("blocks", 8, 4, False), "qkv")
    matvec(op, matrices, x, y)
    assert len(made.commands) == 3
    assert plan_barriers(made.commands) == [False, False, False]
