"""This module has the public class `AsyncLLM`: what `LLM` does, for programs with an event loop.

The model runs on a thread of its own (engine_thread.py). What takes long beside it, such as
encoding a text, is done on other threads.
"""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from vkmoe.choices import Pooling
from vkmoe.config import EngineConfig, SamplingConfig
from vkmoe.errors import UsageError, VkmoeError
from vkmoe.experts.records.report import ExpertReport
from vkmoe.facts import DeviceInfo, MemoryPlan, ModelSpec
from vkmoe.generate.checks import check_kind, check_path, check_prompts
from vkmoe.generate.constraint import Constraints
from vkmoe.generate.loop import Generation, Piece, Request
from vkmoe.generate.regions.state_files import StateCounts
from vkmoe.llm.chats import ChatCall, chat_call
from vkmoe.llm.embeddings import chosen_pooling, embedding_of, embedding_request
from vkmoe.llm.engine_thread import EngineThread
from vkmoe.llm.following import FollowedReply, call_soon, together
from vkmoe.llm.llm import LLM
from vkmoe.llm.messages import Messages
from vkmoe.llm.options import ChatOptions, RequestOptions, TemplateOptions
from vkmoe.llm.requests import Prompt, Prompts, is_list_of_prompts, with_options
from vkmoe.llm.results import ChatEnd, ChatEvent, ChatResult, GenerationResult, result_of
from vkmoe.llm.turns import model_closed
from vkmoe.weights.placer import Progress

Result = TypeVar("Result")

log = logging.getLogger("vkmoe")


class AsyncLLM:
    """Runs a language model for programs with an event loop, which is never held up.

        async with AsyncLLM("model.gguf", parallel=4) as llm:
            replies = await asyncio.gather(*(llm.generate(each) for each in prompts))

    Calls that are made while others wait run together with them, as many as `parallel` allows, and
    each reply is the one of a call made alone. Where a task is cancelled, its reply ends at the
    next step of the model. Its methods take, return and raise what those of `LLM` with their names
    do; only `progress` while a prompt is read is not among their options.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        config: EngineConfig | None = None,
        *,
        chat_template: str | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        """Check the options, which are those of `LLM`; `load`, or `async with`, loads the model.

        `progress(done, total)` is called on the event loop. Raises UsageError.
        """
        check_path("model", model)
        check_kind("chat_template", chat_template, str | None, "give a text")
        check_kind("progress", progress, Callable | None, "give a function of two numbers")
        self._config = with_options(EngineConfig, config, options)
        self._model, self._template, self._progress = model, chat_template, progress
        self._engine: EngineThread | None = None
        self._n_loading = 0  # calls of `load` that wait
        self._faults: list[Exception] = []  # what `progress` raised
        self._is_closed = False

    async def load(self) -> None:
        """Load the model; does nothing where that was done. Raises what `LLM` raises.

        Where it failed, or every task that waited for it was cancelled, it may be called again.
        """
        if self._is_closed:
            raise model_closed()
        loop, is_there = asyncio.get_running_loop(), asyncio.Event()
        if self._engine is None or self._engine.gave_up:
            self._engine = self._started(loop, self._engine)
            weakref.finalize(self, self._engine.end)
        engine, faults = self._engine, self._faults
        engine.first.add_done_callback(lambda _: call_soon(loop, is_there.set))
        self._n_loading += 1
        try:
            await is_there.wait()
        finally:
            self._n_loading -= 1
            if not (self._n_loading or engine.first.done()):
                engine.end()
        if self._is_closed:
            raise model_closed()
        if faults:
            raise faults[0]
        engine.first.result()

    def _started(
        self, loop: asyncio.AbstractEventLoop, before: EngineThread | None
    ) -> EngineThread:
        """Begin to load the model, by functions that do not keep this object alive.

        The thread `before`, which gave up, ends first: both would take memory.
        """
        model, config, template = self._model, self._config, self._template
        progress, faults = self._progress, list[Exception]()
        self._faults = faults

        def tell(done: int, total: int) -> None:
            if progress is None or faults:
                return
            try:
                progress(done, total)
            except Exception as error:
                faults.append(error)
                engine.end()

        def loaded(done: int, total: int) -> None:
            engine.loaded(done, total)
            call_soon(loop, tell, done, total)

        def load() -> LLM:
            if before is not None:
                before.join()
            return LLM(model, config, chat_template=template, progress=loaded)

        engine = EngineThread(load, max_queue=None, restarts=0, prepares_forms=False)
        engine.start()
        return engine

    async def close(self) -> None:
        """End all replies, write what options ask for, and free the device; waits for that.

        Replies that are not finished raise UsageError where they are waited for. May be called
        twice. Raises VkmoeError if a file cannot be written.
        """
        self._is_closed = True
        engine = self._engine
        if engine is None:
            return
        was_ready = engine.state == "ready"
        engine.end()
        engine.cancel_all()
        await asyncio.shield(asyncio.to_thread(engine.join))
        if was_ready and engine.error is not None:
            raise engine.error

    async def __aenter__(self) -> Self:
        await self.load()
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            await self.close()
        except VkmoeError as second:
            if error is None:
                raise
            log.warning("%s", second)

    # ----- facts -----

    @property
    def _llm(self) -> LLM:
        """Return the model. Raises UsageError before it is loaded, and once it is closed."""
        if self._is_closed:
            raise model_closed()
        engine = self._engine
        if engine is None or engine.state == "loading" or engine.gave_up:
            raise UsageError("the model is not loaded", "use `async with`, or await `load` first")
        return engine.llm

    @property
    def spec(self) -> ModelSpec:
        """Return what the model's file says of it: sizes, layers, experts."""
        return self._llm.spec

    @property
    def plan(self) -> MemoryPlan:
        """Return where everything lies, and how experts are served."""
        return self._llm.plan

    @property
    def device_info(self) -> DeviceInfo:
        """Return the name and the memory of the device."""
        return self._llm.device_info

    @property
    def constraints(self) -> Constraints:
        """Return the maker of constraints for this model."""
        return self._llm.constraints

    async def expert_statistics(self) -> ExpertReport:
        """Report how often device memory served the experts' uses since the model was loaded."""
        return await self._between(lambda llm: llm.expert_statistics)

    async def save_state(self, path: str | os.PathLike[str], region: int = 0) -> StateCounts:
        """Write the state of the conversation that was generated last to a file."""
        return await self._between(lambda llm: llm.save_state(path, region))

    async def restore_state(self, path: str | os.PathLike[str], region: int = 0) -> StateCounts:
        """Read a conversation's state from a file, so that prompts go on from there."""
        return await self._between(lambda llm: llm.restore_state(path, region))

    async def forget(self) -> None:
        """Empty the KV cache, so that nothing of earlier prompts is used again."""
        await self._between(lambda llm: llm.forget())

    # ----- generation -----

    @overload
    async def generate(
        self,
        prompt: Prompt | Request,
        sampling: SamplingConfig | None = None,
        **options: Unpack[RequestOptions],
    ) -> GenerationResult: ...

    @overload
    async def generate(
        self,
        prompt: Prompts,
        sampling: SamplingConfig | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[GenerationResult]: ...

    async def generate(
        self,
        prompt: Any,
        sampling: SamplingConfig | None = None,
        **options: Unpack[RequestOptions],
    ) -> GenerationResult | list[GenerationResult]:
        """Generate a whole reply, or those to a list of prompts together, in its order."""
        if not is_list_of_prompts(prompt):
            return await self._result(await self._request(prompt, sampling, options))
        check_prompts(prompt)
        requests = [await self._request(each, sampling, options) for each in prompt]
        return await together([self._result(request) for request in requests])

    async def stream(
        self,
        prompt: Prompt | Request,
        sampling: SamplingConfig | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[Piece, None]:
        """Generate token by token. Raises what is wrong with the first piece."""
        reply = self._begun(await self._request(prompt, sampling, options))
        async with aclosing(reply.news()) as news:
            async for each in news:
                for piece in each.pieces:
                    yield piece
        _check_whole(reply)

    async def chat(
        self,
        messages: Messages,
        sampling: SamplingConfig | None = None,
        **options: Unpack[ChatOptions],
    ) -> ChatResult:
        """Reply to a conversation, by the model's chat template."""
        call = await self._off_loop(lambda llm: chat_call(llm, messages, sampling, options))
        *_, end = [event async for event in self._chat_events(call, streams=False)]
        assert isinstance(end, ChatEnd)
        return end.result

    async def chat_stream(
        self,
        messages: Messages,
        sampling: SamplingConfig | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[ChatEvent, None]:
        """Reply to a conversation, event by event; the last one is a ChatEnd with all of it."""
        call = await self._off_loop(lambda llm: chat_call(llm, messages, sampling, options))
        async with aclosing(self._chat_events(call, streams=True)) as events:
            async for event in events:
                yield event

    # ----- embeddings -----

    @overload
    async def embed(
        self, texts: Prompt, *, pooling: Pooling | None = None, normalize: bool = True
    ) -> NDArray[np.float32]: ...

    @overload
    async def embed(
        self,
        texts: list[str] | list[list[int]],
        *,
        pooling: Pooling | None = None,
        normalize: bool = True,
    ) -> list[NDArray[np.float32]]: ...

    async def embed(
        self, texts: Any, *, pooling: Pooling | None = None, normalize: bool = True
    ) -> NDArray[np.float32] | list[NDArray[np.float32]]:
        """Compute the embedding of a text, float32 [width], or of each text of a list."""
        check_kind("normalize", normalize, bool, "use true or false")
        chosen = chosen_pooling(self._llm, pooling)
        given = texts if is_list_of_prompts(texts) else [texts]
        requests = await self._off_loop(
            lambda llm: [embedding_request(llm, text, chosen) for text in given]
        )
        found = await together([self._embedding(request, normalize) for request in requests])
        return found if given is texts else found[0]

    # ----- texts and tokens -----

    async def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Turn a text into token ids, as `generate` does."""
        options = {"add_special": add_special, "parse_special": parse_special}
        return await self._off_loop(lambda llm: llm.tokenize(text, **options))

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """Turn token ids into a text."""
        return await self._off_loop(lambda llm: llm.detokenize(tokens))

    async def apply_template(self, messages: Messages, **options: Unpack[TemplateOptions]) -> str:
        """Write a conversation as the text of a prompt, by the model's chat template."""
        return await self._off_loop(lambda llm: llm.apply_template(messages, **options))

    # ----- inside -----

    async def _request(
        self, prompt: Any, sampling: SamplingConfig | None, options: RequestOptions
    ) -> Request:
        if isinstance(prompt, Request):
            return prompt
        return await self._off_loop(lambda llm: llm.request(prompt, sampling, **options))

    async def _between(self, work: Callable[[LLM], Result]) -> Result:
        """Do what needs the engine, on its thread between two runs."""
        assert self._llm is not None and self._engine is not None
        return await asyncio.wrap_future(self._engine.between(work))

    async def _off_loop(self, work: Callable[[LLM], Result]) -> Result:
        """Do what may take long on another thread."""
        llm = self._llm
        try:
            return await asyncio.to_thread(work, llm)
        except UsageError:
            _ = self._llm  # says why, where the model was lost or closed meanwhile
            raise

    def _begun(self, request: Request) -> FollowedReply:
        assert self._llm is not None and self._engine is not None
        return FollowedReply(self._engine, request)

    async def _result(self, request: Request) -> GenerationResult:
        load_seconds = self._llm.load_seconds
        generation, pieces = await self._whole(request)
        return result_of(generation, pieces, load_seconds)

    async def _embedding(self, request: Request, normalize: bool) -> NDArray[np.float32]:
        generation, _ = await self._whole(request)
        return embedding_of(generation, normalize)

    async def _whole(self, request: Request) -> tuple[Generation, list[Piece]]:
        """Wait for a reply; return it with all its pieces."""
        reply = self._begun(request)
        pieces = [piece async for news in reply.news() for piece in news.pieces]
        _check_whole(reply)
        return reply.generation, pieces

    async def _chat_events(self, call: ChatCall, streams: bool) -> AsyncGenerator[ChatEvent, None]:
        reply = self._begun(call.request)
        reader, load_seconds = call.reader(reply.generation, streams), self._llm.load_seconds
        async with aclosing(reply.news()) as news:
            async for each in news:
                for event in reader.feed(each.pieces):
                    yield event
        _check_whole(reply)
        for event in reader.finish():
            yield event
        yield ChatEnd(reader.result(load_seconds))


def _check_whole(reply: FollowedReply) -> None:
    """Raise UsageError for a reply that ended because the model is being closed."""
    if reply.generation.finish_reason == "interrupt":
        raise model_closed()
