"""What fails while the CPU computes experts beside a GPU stays one clear error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.test_cpu_experts import WAYS
from tests.engine.test_faults import without_frames
from tests.engine.tiny import model_path
from vkmoe.batch import BatchKind
from vkmoe.errors import DeviceLostError, GpuError, ModelFileError, OutOfMemoryError
from vkmoe.gpu import _native as native
from vkmoe.llm import LLM
from vkmoe.weights import span_reader

pytestmark = pytest.mark.usefixtures("one_device", "cpu_native")
TEXT = [3, 7, 1, 9, 4, 2, 8, 5, 1, 1, 6]


@pytest.fixture(params=["all", "misses"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(model_path("moe_plain"), ctx_size=64, **WAYS[request.param]) as opened:
        yield opened


def reply(llm: LLM) -> list[int]:
    found = llm.generate(TEXT, max_tokens=8, temp=0, ignore_eos=True).token_ids
    llm.forget()
    return found


class Stumbling:
    """Stands for a program of the CPU; of the runs of all of these, one ends with an error."""

    def __init__(self, program: Any, turns: list[BaseException | None]) -> None:
        self.program, self.turns = program, turns

    def run(self, pool: Any) -> None:
        if self.turns and (error := self.turns.pop(0)) is not None:
            raise error
        self.program.run(pool)


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("n_sound", [0, 5])
def test_work_of_the_cpu_that_fails_is_one_error(
    llm: LLM, kind: type[BaseException], n_sound: int
) -> None:
    """In the middle of a chain, which ends; afterwards the text is right."""
    wanted = reply(llm)
    worker = llm.engine._programs._worker
    assert worker is not None
    turns: list[BaseException | None] = [*[None] * n_sound, kind("a thread died")]
    for recorded in worker._recorded.values():
        for layer, program in recorded.items():
            recorded[layer] = Stumbling(program, turns)
    with pytest.raises((GpuError, KeyboardInterrupt), match="a thread died") as caught:
        reply(llm)
    assert isinstance(without_frames(caught.value), GpuError) == (kind is not KeyboardInterrupt)
    llm.forget()
    assert not turns
    found = reply(llm)
    assert len(found) == len(wanted)
    if llm.engine.cache is None:  # else other experts may have slots by now
        assert found == wanted


def test_a_part_of_a_chain_that_did_not_run_is_noticed(llm: LLM) -> None:
    """It counts as over all the same: so do drivers that reset a GPU."""
    reply(llm)
    programs = llm.engine._programs
    kind = BatchKind("decode", 1, 1)
    whole = programs.recorded[kind]
    empty = llm.engine.device.native.recorder().finish()
    n_parts = len(whole.segments)
    assert n_parts >= 3
    for index in range(n_parts):
        segments = [*whole.segments]
        segments[index] = replace(segments[index], recording=empty)
        programs.recorded[kind] = replace(whole, segments=tuple(segments))
        with pytest.raises(DeviceLostError, match="log was not written"):
            reply(llm)
        llm.forget()
    programs.recorded[kind] = whole
    assert len(reply(llm)) == 8


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("call", ["vkQueueSubmit", "vkWaitForFences"])
@pytest.mark.parametrize("result", ["VK_ERROR_OUT_OF_HOST_MEMORY", "VK_ERROR_DEVICE_LOST"])
@pytest.mark.parametrize("after", [0, 2])  # of the links of a chain
@pytest.mark.sample(4)
def test_a_call_of_the_chain_that_fails_is_one_error(call: str, result: str, after: int) -> None:
    with LLM(model_path("moe_plain"), ctx_size=64, **WAYS["all"]) as llm:
        reply(llm)
        native.inject_failure(call, after, result)
        lost = result == "VK_ERROR_DEVICE_LOST"
        with pytest.raises(DeviceLostError if lost else OutOfMemoryError):
            reply(llm)
        native.clear_injections()
        if not lost:
            llm.forget()
            assert len(reply(llm)) == 8


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("step", [17, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("way", ["all", "misses"])
def test_memory_that_is_refused_is_one_error(way: str, step: int) -> None:
    """What goes between both included."""
    for after in range(0, 400, step):
        native.inject_failure("vkAllocateMemory", after)
        try:
            with LLM(model_path("moe_plain"), ctx_size=64, gpu_layers=99, **WAYS[way]):
                pass
        except OutOfMemoryError:
            continue
        finally:
            native.clear_injections()
        assert after > 10
        break
    else:
        raise AssertionError("it is never loaded")


def test_a_copy_that_fails_beside_a_chain_is_one_error() -> None:
    """The thread that copies waits for its own submit, and lets no chain go."""
    n_failed = 0
    with LLM(
        model_path("moe_plain"), ctx_size=64, expert_copies="overlap", **WAYS["misses"]
    ) as llm:
        wanted = reply(llm)
        for _ in range(12):
            native.inject_failure("vkWaitForFences", 0, "VK_ERROR_OUT_OF_HOST_MEMORY")
            try:
                reply(llm)
            except OutOfMemoryError:
                n_failed += 1
            native.clear_injections()
            llm.forget()
        assert n_failed and len(reply(llm)) == len(wanted)


def test_memory_that_is_lacking_for_a_copy_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(ctx_size=128, expert_mode="hybrid", expert_slots=12, expert_copies="wait") as llm:

        def broken(*_: Any) -> None:
            raise MemoryError

        monkeypatch.setattr(span_reader.SpanReader, "read", broken)
        with pytest.raises(OutOfMemoryError, match="copying experts failed"):
            llm.generate(list(range(40, 80)), max_tokens=30, temp=0, ignore_eos=True)


@pytest.mark.parametrize("copies", ["wait", "overlap"])
def test_slots_that_cannot_be_filled_at_the_start_are_one_error(
    monkeypatch: pytest.MonkeyPatch, copies: str
) -> None:
    """Else which experts are the GPU's would depend on a disk's moods."""
    read, n_reads = span_reader.SpanReader.read, []

    def stumbling(*given: Any) -> None:
        n_reads.append(given[1])
        if len(n_reads) == 3:
            raise ModelFileError("the disk stumbles")
        read(*given)

    monkeypatch.setattr(span_reader.SpanReader, "read", stumbling)
    with pytest.raises(ModelFileError, match="the disk stumbles"):
        LLM(ctx_size=128, expert_mode="hybrid", expert_slots=12, expert_copies=copies)


def test_ctrl_c_while_the_cpus_programs_are_recorded_spoils_nothing(llm: LLM) -> None:
    wanted = reply(llm)
    worker = llm.engine._programs._worker
    assert worker is not None
    llm.engine._programs.recorded.clear()
    worker._recorded.clear()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    worker.record = interrupted  # type: ignore[assignment, method-assign]
    with pytest.raises(KeyboardInterrupt):
        reply(llm)
    del worker.record
    llm.forget()
    assert len(reply(llm)) == len(wanted)


def test_an_expert_that_cannot_be_read_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text would be another without it: the CPU rounds otherwise."""
    with LLM(ctx_size=128, expert_mode="hybrid", expert_slots=12) as llm:
        reply(llm)

        def broken(*_: Any) -> None:
            raise ModelFileError("the disk is gone")

        monkeypatch.setattr(span_reader.SpanReader, "read", broken)
        with pytest.raises(ModelFileError, match="the disk is gone"):
            llm.generate(list(range(40, 80)), max_tokens=30, temp=0, ignore_eos=True)
