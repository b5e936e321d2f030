"""`AsyncLLM`: concurrent calls run together, replies are those of calls made alone, all ends."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.tiny import model_path
from tests.server.calls import TOOL
from tests.server.conftest import run_async
from vkmoe import AsyncLLM, ChatEnd, Content, ToolCallArguments
from vkmoe.batch import RunResult, TokenBatch
from vkmoe.errors import DeviceLostError, ModelFileError, PromptError, UsageError, VkmoeError
from vkmoe.llm import LLM
from vkmoe.llm.engine_thread import EngineThread

PROMPTS = ["def f(", "import ", "class A:", "x = ["]
OPTIONS: Any = {"max_tokens": 24, "seed": 1, "ignore_eos": True}
ENDLESS: Any = {"ignore_eos": True}
ASK: Any = [{"role": "user", "content": "def main():"}]
SIZES: Any = {"ctx_size": 1024, "parallel": 4}


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(**SIZES) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(plain: LLM) -> list[str]:
    return [plain.generate(prompt, **OPTIONS).text for prompt in PROMPTS]


class Together:
    """Counts the replies of each batch that decodes."""

    def __init__(self, llm: LLM) -> None:
        self.sizes: list[int] = []
        self.has_run = threading.Event()
        llm.scheduler.after_run = self._note

    def _note(self, batch: TokenBatch, result: RunResult) -> None:
        self.has_run.set()
        if batch.phase == "decode":
            self.sizes.append(len(set(batch.sequences)))


def model_of(llm: AsyncLLM) -> LLM:
    return llm._llm


def running(work: Callable[[AsyncLLM], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run a test with the demo model, for at most a minute."""

    async def main() -> None:
        async with asyncio.timeout(60), AsyncLLM(**{**SIZES, **options}) as llm:
            await work(llm)

    run_async(main())


def test_calls_of_tasks_run_together_and_give_what_each_gives_alone(alone: list[str]) -> None:
    async def work(llm: AsyncLLM) -> None:
        together = Together(model_of(llm))
        found = await asyncio.gather(*(llm.generate(prompt, **OPTIONS) for prompt in PROMPTS))
        assert [each.text for each in found] == alone
        assert max(together.sizes) == 4 and len(together.sizes) < 2 * 24
        listed = await llm.generate(PROMPTS, **OPTIONS)
        assert [each.text for each in listed] == alone

    running(work)


def test_calls_of_threads_run_together_too(plain: LLM, alone: list[str]) -> None:
    """Those of a plain `LLM`: a run brings on the replies of all threads."""
    together, begin = Together(plain), threading.Barrier(4)

    def reply(prompt: str) -> str:
        begin.wait(60)
        return plain.generate(prompt, **OPTIONS).text

    try:
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(reply, PROMPTS)) == alone
    finally:
        plain.scheduler.after_run = None
    assert max(together.sizes) == 4 and len(together.sizes) < 2 * 24


def test_streams_and_chats_are_those_of_the_plain_class(plain: LLM, alone: list[str]) -> None:
    tools: Any = {"tools": [TOOL], "tool_choice": "required", "seed": 1, "max_tokens": 200}
    chatted, called = plain.chat(ASK, **OPTIONS), plain.chat(ASK, **tools)

    async def work(llm: AsyncLLM) -> None:
        texts = [piece.text async for piece in llm.stream(PROMPTS[0], **OPTIONS)]
        assert "".join(texts) == alone[0] and len(texts) > 20
        assert (await llm.chat(ASK, **OPTIONS)).content == chatted.content
        events = [event async for event in llm.chat_stream(ASK, **OPTIONS)]
        assert isinstance(events[-1], ChatEnd)
        content = "".join(each.text for each in events if isinstance(each, Content))
        assert content == events[-1].result.content == chatted.content
        events = [event async for event in llm.chat_stream(ASK, **tools)]
        arguments = [each.text for each in events if isinstance(each, ToolCallArguments)]
        assert "".join(arguments) == called.tool_calls[0].arguments and len(arguments) > 1
        ids = await llm.tokenize(PROMPTS[0])
        assert ids == plain.tokenize(PROMPTS[0])
        assert await llm.detokenize(ids) == plain.detokenize(ids)
        assert await llm.apply_template(ASK) == plain.apply_template(ASK)
        request = plain.request(PROMPTS[0], **OPTIONS)
        assert (await llm.generate(request)).text == alone[0]
        assert (await llm.expert_statistics()).setup is not None
        assert llm.spec.n_vocab == plain.spec.n_vocab

    running(work)


def test_a_conversation_is_saved_and_goes_on(tmp_path: Path, alone: list[str]) -> None:
    async def work(llm: AsyncLLM) -> None:
        await llm.generate(PROMPTS[0], **OPTIONS)
        saved = await llm.save_state(tmp_path / "state")
        await llm.forget()
        with pytest.raises(VkmoeError):
            await llm.save_state(tmp_path / "none")
        assert await llm.restore_state(tmp_path / "state") == saved
        found = await llm.generate(PROMPTS[0], **OPTIONS)
        assert found.text == alone[0] and found.statistics.n_reused_tokens > 0

    running(work)


def test_a_template_in_place_of_the_models_is_used() -> None:
    async def work(llm: AsyncLLM) -> None:
        assert await llm.apply_template(ASK) == "def main():!"

    running(work, chat_template="{{ messages[0].content }}!")


def test_embeddings_are_those_of_the_plain_class_beside_replies(
    plain: LLM, alone: list[str]
) -> None:
    wanted = plain.embed(PROMPTS, pooling="mean"), plain.embed(PROMPTS)

    async def work(llm: AsyncLLM) -> None:
        reply = asyncio.ensure_future(llm.generate(PROMPTS[0], **OPTIONS))
        found = await asyncio.gather(llm.embed(PROMPTS, pooling="mean"), llm.embed(PROMPTS))
        np.testing.assert_array_equal(found, wanted)
        assert (await reply).text == alone[0]
        one = await llm.embed(PROMPTS[1], pooling="none", normalize=False)
        np.testing.assert_array_equal(one, plain.embed(PROMPTS[1], pooling="none", normalize=False))
        with pytest.raises(PromptError):
            await llm.embed(["a", ""])

    running(work)


def test_the_loop_is_free_while_the_model_runs() -> None:
    async def work(llm: AsyncLLM) -> None:
        model_of(llm).scheduler.after_run = lambda *_: time.sleep(0.02)
        task = asyncio.ensure_future(llm.generate("a", max_tokens=10, **ENDLESS))
        n_turns = 0
        while not task.done():
            await asyncio.sleep(0.001)
            n_turns += 1
        assert n_turns > 10  # of some 150 that fit between ten runs; held up, it had one or two

    running(work)


@pytest.mark.parametrize("form", ["task", "stream", "list", "chat"])
def test_a_task_that_is_cancelled_ends_its_replies_at_the_next_step(form: str) -> None:
    async def work(llm: AsyncLLM) -> None:
        together, scheduler = Together(model_of(llm)), model_of(llm).scheduler

        async def first_piece() -> None:
            async with aclosing(llm.stream("a", **ENDLESS)) as pieces:
                async for _ in pieces:
                    break

        works: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
            "task": lambda: llm.generate("a", **ENDLESS),
            "list": lambda: llm.generate(["a", "b", "c"], **ENDLESS),
            "chat": lambda: llm.chat(ASK, **ENDLESS),
            "stream": first_piece,
        }
        task = asyncio.ensure_future(works[form]())
        await asyncio.to_thread(together.has_run.wait, 60)
        if form != "stream":
            task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() == (form != "stream")
        n_before = len(together.sizes)
        while scheduler.has_work:
            await asyncio.sleep(0.001)
        assert len(together.sizes) <= n_before + 2
        assert model_of(llm).scheduler.regions.n_free == 4

    running(work)


def test_a_wrong_call_is_named_and_ends_no_other() -> None:
    async def work(llm: AsyncLLM) -> None:
        unknown: Any = {"tempo": 1}
        calls: list[tuple[Coroutine[Any, Any, Any], str]] = [
            (llm.generate(""), "the prompt is empty"),
            (llm.generate("a", **unknown), "unknown option tempo"),
            (llm.generate([PROMPTS[0], ""]), "the prompt is empty"),
            (llm.chat([]), "empty list"),
            (anext(llm.stream("a " * 5000)), "the context holds 1024"),
            (llm.apply_template(ASK, **unknown), "unknown option tempo"),
        ]
        other = asyncio.ensure_future(llm.generate("a", **OPTIONS))
        for call, words in calls:
            with pytest.raises((PromptError, UsageError), match=words):
                await call
        assert (await other).statistics.n_generated_tokens == 24

    running(work)


def test_closing_ends_replies_with_one_line_and_waits() -> None:
    async def main() -> None:
        llm = AsyncLLM(**SIZES)
        with pytest.raises(UsageError, match="is not loaded"):
            await llm.generate("a")
        await asyncio.gather(llm.load(), llm.load())
        together, thread = Together(model_of(llm)), llm._engine
        tasks = [asyncio.ensure_future(llm.generate("a", **ENDLESS)) for _ in range(6)]
        await asyncio.to_thread(together.has_run.wait, 60)
        await asyncio.gather(llm.close(), llm.close())
        assert thread is not None and thread.state == "ended" and not thread._thread.is_alive()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert {str(each) for each in found} == {"the model is closed"}
        assert all(isinstance(each, UsageError) for each in found)
        for call in (llm.generate("a"), llm.load(), llm.chat(ASK)):
            with pytest.raises(UsageError, match=r"^the model is closed$"):
                await call

    run_async(main())


def test_a_model_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(100))

    async def main() -> None:
        for _ in range(2):
            llm = AsyncLLM(tmp_path / "x.gguf")
            with pytest.raises(ModelFileError):
                async with llm:
                    raise AssertionError("there is no model")
            await llm.close()
        wrong: Any = ({"context": 5}, {"ctx_size": 0}, {"progress": 5}, {"chat_template": 5})
        for options in wrong:
            with pytest.raises(UsageError):
                AsyncLLM(**options)

    run_async(main())


def test_loading_by_name_tells_its_progress_on_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / ".lmstudio/models/some-one/Tiny-MoE-GGUF"
    folder.mkdir(parents=True)
    shutil.copy(model_path("moe_plain"), folder / "Tiny-MoE-Q8_0.gguf")
    seen: list[tuple[int, int]] = []
    threads: set[int] = set()

    def progress(done: int, total: int) -> None:
        seen.append((done, total))
        threads.add(threading.get_ident())

    async def main() -> None:
        name = "some-one/Tiny-MoE-GGUF:Q8_0"
        async with AsyncLLM(name, ctx_size=32, progress=progress) as llm:
            assert Path(model_of(llm).engine.model.file.path).is_relative_to(folder)
            assert threads == {threading.get_ident()}
        assert len(seen) > 1 and seen[-1][0] == seen[-1][1] > 0

    run_async(main())


def test_loading_that_is_cancelled_ends_the_thread() -> None:
    async def main() -> None:
        is_loading, goes_on = asyncio.Event(), threading.Event()

        def progress(done: int, total: int) -> None:
            is_loading.set()

        llm = AsyncLLM(ctx_size=64, progress=progress)
        task = asyncio.ensure_future(llm.load())
        await asyncio.sleep(0)
        assert llm._engine is not None
        loaded = llm._engine.loaded

        def slowly(done: int, total: int) -> None:
            goes_on.wait(60)
            loaded(done, total)

        llm._engine.loaded = slowly  # type: ignore[method-assign]
        task.cancel()
        await asyncio.wait([task])
        goes_on.set()
        await asyncio.to_thread(llm._engine.join)
        assert task.cancelled() and llm._engine.state == "ended"
        await llm.close()

    run_async(main())


def test_a_call_of_load_that_is_cancelled_disturbs_no_other() -> None:
    """Where none is left, the loading ends; the next call begins anew."""

    async def main() -> None:
        llm = AsyncLLM(ctx_size=64)

        async def cancelled() -> None:
            task = asyncio.ensure_future(llm.load())
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()

        await cancelled()
        with pytest.raises(UsageError, match="is not loaded"):
            await llm.generate("a")
        await asyncio.gather(llm.load(), cancelled())
        await cancelled()
        assert (await llm.generate("a", max_tokens=2)).finish_reason == "length"
        await llm.close()

    run_async(main())


def test_an_error_of_progress_ends_the_loading_and_is_raised() -> None:
    calls: list[int] = []

    def progress(done: int, total: int) -> None:
        calls.append(done)
        raise ValueError("of the program")

    async def main() -> None:
        llm = AsyncLLM(ctx_size=64, progress=progress)
        for n_calls in (1, 2):
            with pytest.raises(ValueError, match="of the program"):
                await llm.load()
            assert len(calls) == n_calls
        loading = asyncio.ensure_future(llm.load())
        await asyncio.sleep(0)
        await llm.close()
        with pytest.raises(UsageError, match=r"^the model is closed$"):
            await loading
        assert llm._engine is not None and llm._engine.state == "ended"

    run_async(main())


def test_a_lost_device_is_told_to_every_call_that_waits() -> None:
    """Though one of them was cancelled."""
    engine = EngineThread(lambda: LLM(ctx_size=64), None, restarts=0, prepares_forms=False)
    engine.start()
    engine.first.result(60)
    goes_on = threading.Event()

    def lose(llm: LLM) -> None:
        goes_on.wait(60)
        raise DeviceLostError("the device was lost", "")

    calls = [engine.between(lose), *(engine.between(lambda _: None) for _ in range(2))]
    calls[1].cancel()
    goes_on.set()
    engine.join()
    assert [str(each.exception()) for each in (calls[0], calls[2])] == ["the device was lost"] * 2
    assert isinstance(engine.error, DeviceLostError)


def test_a_lost_device_ends_replies_and_later_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(llm: AsyncLLM) -> None:
        def lost(batch: TokenBatch) -> None:
            raise DeviceLostError("the device was lost", "try again")

        monkeypatch.setattr(model_of(llm).engine, "run", lost)
        found = await asyncio.gather(
            *(llm.generate("a", **ENDLESS) for _ in range(6)), return_exceptions=True
        )
        assert all(isinstance(each, VkmoeError) for each in found)
        assert all("the device was lost" in str(each) for each in found)
        with pytest.raises(VkmoeError, match="the device was lost"):
            await llm.generate("a")

    running(work)


def test_records_are_written_when_it_is_closed(tmp_path: Path) -> None:
    """Where they cannot be, closing says so, unless an error is on its way already."""
    stats = tmp_path / "folder" / "stats.json"

    async def main(is_gone: bool, fails: bool) -> None:
        stats.parent.mkdir(exist_ok=True)
        async with AsyncLLM(expert_stats=str(stats), **SIZES) as llm:
            await llm.generate("a", max_tokens=2)
            if is_gone:
                shutil.rmtree(stats.parent)
            if fails:
                raise KeyError

    run_async(main(is_gone=False, fails=False))
    assert stats.stat().st_size > 100
    with pytest.raises(VkmoeError, match=r"stats\.json"):
        run_async(main(is_gone=True, fails=False))
    with pytest.raises(KeyError):
        run_async(main(is_gone=True, fails=True))


@pytest.mark.parametrize("ends", ["sys.exit()", "raise SystemExit", "del llm; gc.collect()"])
@pytest.mark.sample(1)
def test_a_program_ends_that_never_closes_its_model(ends: str) -> None:
    code = (
        "import asyncio, gc, sys\nfrom vkmoe import AsyncLLM\nllm = AsyncLLM(ctx_size=64)\n"
        "async def main():\n    await llm.load()\n    await llm.generate('a', max_tokens=2)\n"
        f"asyncio.run(main())\n{ends}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr.replace(
        "no GPU found: running on the CPU\n", ""
    )
