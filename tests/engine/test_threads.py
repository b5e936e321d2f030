"""One `LLM` on several threads: replies are those of calls made alone, nobody waits for ever."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.tiny import model_path
from vkmoe.errors import UsageError, VkmoeError
from vkmoe.generate.loop import Generation, Piece
from vkmoe.llm import LLM

pytestmark = pytest.mark.usefixtures("one_device")

N_THREADS = 8
TINY = model_path("moe_plain")
OPTIONS: dict[str, Any] = {"max_tokens": 3, "temp": 0.9, "ignore_eos": True}
PATIENCE = 120.0  # seconds after which a test fails that hangs


@pytest.fixture(params=["cpu", "vulkan"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(TINY, device=request.param, ctx_size=64) as opened:
        yield opened


def together(n: int, work: Callable[[int], None]) -> list[BaseException]:
    """Call `work(0)` to `work(n - 1)`, each on a thread of its own; return what they raised."""
    errors: list[BaseException] = []

    def guarded(index: int) -> None:
        try:
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"
    return errors


def prompt_of(index: int) -> list[int]:
    return [1 + index, 2, 3 + index % 3]


@pytest.mark.parametrize("n_calls", [25, pytest.param(200, marks=pytest.mark.full)])
@pytest.mark.sample(1)
def test_replies_of_threads_are_those_of_calls_made_alone(llm: LLM, n_calls: int) -> None:
    def reply(thread: int, call: int) -> list[int]:
        return llm.generate(prompt_of(thread), seed=call % 5, **OPTIONS).token_ids

    alone = [[reply(thread, call) for call in range(5)] for thread in range(N_THREADS)]
    found: list[list[list[int]]] = [[] for _ in range(N_THREADS)]

    def work(thread: int) -> None:
        for call in range(n_calls):
            found[thread].append(reply(thread, call))

    assert together(N_THREADS, work) == []
    assert found == [[each[call % 5] for call in range(n_calls)] for each in alone]


def test_logits_and_streams_of_threads_do_not_mix(llm: LLM) -> None:
    wanted = llm.logits([4, 5, 6])
    alone = llm.generate([7, 8], seed=1, **OPTIONS).token_ids

    def work(thread: int) -> None:
        for _ in range(10):
            if thread % 2:
                assert (llm.logits([4, 5, 6]) == wanted).all()
            else:
                pieces = llm.stream([7, 8], seed=1, **OPTIONS)
                assert [piece.token_id for piece in pieces if piece.token_id >= 0] == alone
            assert llm.expert_statistics.setup is not None

    assert together(4, work) == []


@pytest.mark.parametrize("is_dropped", [True, False])
def test_a_stream_that_nobody_reads_holds_up_no_other_thread(llm: LLM, is_dropped: bool) -> None:
    """Its reply goes on to its end, or ends where the stream is collected."""
    alone = llm.generate([7, 8], seed=1, **OPTIONS).token_ids
    stream: Any = llm.stream([1, 2], seed=2, ignore_eos=True, max_tokens=20)
    pieces = [next(stream)]
    if is_dropped:
        cycle: list[Any] = [stream]
        cycle.append(cycle)  # so that it is collected late
        del stream, cycle

    def work(thread: int) -> None:
        assert llm.generate([7, 8], seed=1, **OPTIONS).token_ids == alone

    assert together(2, work) == []
    if is_dropped:
        gc.collect()
        llm.generate([7, 8], max_tokens=1)
    else:
        pieces += list(stream)
        assert len(pieces) == 20, "what came without being read is kept"
    assert not llm.scheduler.has_work


def test_a_stream_collected_amid_a_run_of_the_same_thread_waits_for_nothing(llm: LLM) -> None:
    """Python may collect it anywhere, also where this thread has the engine."""
    streams = [llm.stream([1, 2], max_tokens=20, ignore_eos=True)]
    next(streams[0])
    llm.scheduler.after_run = lambda *_: streams.clear()
    alone = llm.generate([7, 8], seed=1, **OPTIONS).token_ids
    llm.scheduler.after_run = None
    assert not streams
    assert llm.generate([7, 8], seed=1, **OPTIONS).token_ids == alone
    assert not llm.scheduler.has_work and llm.scheduler.regions.n_free == 1


def test_a_stream_that_is_dropped_amid_a_call_that_runs_nothing_leaves_its_place(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [llm.stream([1, 2], max_tokens=20, ignore_eos=True)]
    next(streams[0])
    with monkeypatch.context() as patched:
        patched.setattr(LLM, "_report", lambda _: streams.clear())
        assert llm.expert_statistics is None
    assert not streams and not llm.scheduler.has_work
    assert llm.save_state(tmp_path / "a").n_tokens == 2


@pytest.mark.parametrize("device", ["cpu", "vulkan"])
def test_closing_ends_what_other_threads_generate_with_one_line(device: str) -> None:
    llm = LLM(TINY, device=device, ctx_size=64)
    alone = llm.generate([1, 2], seed=1, **OPTIONS).token_ids
    has_begun = threading.Barrier(N_THREADS + 1)

    def work(thread: int) -> None:
        if thread == N_THREADS:
            has_begun.wait(PATIENCE)
            llm.close()
            return
        has_begun.wait(PATIENCE)
        while True:
            assert llm.generate([1, 2], seed=1, **OPTIONS).token_ids == alone

    errors = together(N_THREADS + 1, work)
    assert len(errors) == N_THREADS
    assert all(isinstance(error, UsageError) for error in errors), errors
    assert {str(error) for error in errors} == {"the model is closed"}
    llm.close()


def test_a_closed_model_says_so(llm: LLM) -> None:
    stream = llm.stream([1, 2], max_tokens=20, ignore_eos=True)
    request = llm.request([1, 2])
    next(stream)
    llm.close()
    calls: list[Callable[[], object]] = [
        lambda: next(stream),
        lambda: llm.generate([1, 2]),
        lambda: llm.generate(request),
        lambda: next(llm.stream([1, 2])),
        lambda: llm.logits([1, 2]),
        lambda: llm.expert_statistics,
        lambda: llm.forget(),
    ]
    for call in calls:
        with pytest.raises(VkmoeError, match=r"^the model is closed$"):
            call()


def test_a_reply_that_another_call_ends_while_it_is_read_comes_out_once_and_whole(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = llm.generate([1, 2], seed=1, **OPTIONS)
    take_pieces = Generation.take_pieces

    def take_amid_another_call(generation: Generation) -> list[Piece]:
        pieces = take_pieces(generation)
        while llm.scheduler.has_work:
            llm.scheduler.step()
        return pieces

    monkeypatch.setattr(Generation, "take_pieces", take_amid_another_call)
    found = llm.generate([1, 2], seed=1, **OPTIONS)
    assert (found.token_ids, found.text) == (alone.token_ids, alone.text)
