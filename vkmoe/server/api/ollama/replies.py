"""Answers /api/chat and /api/generate: replies in the form of Ollama's API.

Streams are lines of JSON. A request for nothing is answered as one that only loads a model.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from vkmoe.generate.loop import Piece
from vkmoe.llm import LLM
from vkmoe.server.api.begun import Begun, begin, begin_text, joined
from vkmoe.server.api.blocks import BlockEvent, Blocks
from vkmoe.server.api.figures import token_figures
from vkmoe.server.api.ollama.fields import Asked, ChatFields, TextFields, rendered
from vkmoe.server.api.ollama.models import capabilities, now
from vkmoe.server.api.shapes import OllamaChatShape, OllamaTextShape
from vkmoe.server.errors import ApiError
from vkmoe.server.fields import read_body
from vkmoe.server.openapi import JSON, LINES, described
from vkmoe.server.replies import until_gone
from vkmoe.server.service import PATIENCE, Service
from vkmoe.server.transport.sse import LineStream, json_answer, line

Object = dict[str, Any]


class _Clock(NamedTuple):
    """Holds when a request came, and when its model was there; seconds."""

    began: float
    loaded: float


@described(OllamaChatShape, body=ChatFields, media_types=(JSON, LINES), statuses=(500, 503))
async def chat(service: Service, request: HttpRequest) -> Response:
    """Answer a request for a reply in a conversation, in Ollama's form."""
    asked = await read_body(request, ChatFields)
    stays, llm = asked.keep_model(request), service.engine.llm
    clock = _Clock(request.state.began, time.perf_counter())
    if not asked.messages:
        return _nothing(asked, _ChatAnswer.part({}), stays)
    await _check_able(service, llm, asked, {"tools": bool(asked.tools)})
    conversation = asked.conversation(bool(service.settings.prefill_assistant))
    # Calls come whole, so that nothing of one streams before that is certain.
    begun = await begin(service, asked.reply, conversation, False, **asked.more)
    return await _answered(request, _ChatAnswer(asked, begun, clock))


@described(OllamaTextShape, body=TextFields, media_types=(JSON, LINES), statuses=(500, 503))
async def generate(service: Service, request: HttpRequest) -> Response:
    """Answer a request for a reply to a prompt, or for a text that goes on, in Ollama's form."""
    asked = await read_body(request, TextFields)
    stays, llm = asked.keep_model(request), service.engine.llm
    clock = _Clock(request.state.began, time.perf_counter())
    if not asked.prompt and not asked.suffix:
        return _nothing(asked, _TextAnswer.part({}), stays)
    if asked.raw and (asked.system or asked.template or asked.context):
        raise ApiError(400, "raw mode does not support template, system, or context", param="raw")
    await _check_able(service, llm, asked, {"insert": bool(asked.suffix)})
    before = asked.context or ()
    if not (asked.raw or asked.suffix or asked.template):
        conversation = asked.conversation()
        begun = await begin(service, asked.reply, conversation, False, before, **asked.more)
    else:
        tokens = joined(llm, before, await _text(service, llm, asked))
        begun = await begin_text(service, llm, tokens, asked.reply, asked.form, **asked.more)
    return await _answered(request, _TextAnswer(asked, begun, clock))


async def _check_able(service: Service, llm: LLM, asked: Asked, needed: Mapping[str, bool]) -> None:
    """Refuse what the model cannot do, in Ollama's words. Raises ApiError."""
    wanted = [name for name, is_needed in needed.items() if is_needed]
    wanted += ["thinking"] if asked.think else []
    able = await service.off_loop(lambda: capabilities(llm)) if wanted else ()
    for name in wanted:
        if name not in able:
            raise ApiError(400, f'"{asked.model}" does not support {name}', param=name)


async def _text(service: Service, llm: LLM, asked: TextFields) -> Sequence[int]:
    """Return the tokens of a prompt that no template of the model is put around."""
    prompt, gaps = asked.prompt or "", llm.tokenizer.gaps
    if asked.suffix:
        before, after = [await service.encode(llm, x, False) for x in (prompt, asked.suffix)]
        first = [*llm.tokenizer.added_first, gaps["fim_pre"]]
        return [*first, *before, gaps["fim_suf"], *after, gaps["fim_mid"]]
    if asked.template:
        prompt = rendered(asked.template, {"System": asked.system or "", "Prompt": prompt})
    return await service.encode(llm, prompt)


def _nothing(asked: Asked, empty: Object, stays: bool) -> Response:
    """Answer a request for nothing, which asks to load the model, or to unload it."""
    head = {"model": asked.model, "created_at": now()}
    return json_answer(
        {**head, **empty, "done": True, "done_reason": "load" if stays else "unload"}
    )


async def _answered(request: HttpRequest, answer: _Answer) -> Response:
    """Send the answer of a reply, as a stream or when it is whole. Raises ApiError."""
    replies = answer.begun.replies
    if answer.asked.streams:
        return LineStream(answer.lines(), replies)
    return json_answer(await until_gone(request, answer.whole(), replies))


class _Answer(ABC):
    """Makes the answer of a reply. Its parts are texts and thoughts, or lists of whole calls."""

    def __init__(self, asked: Asked, begun: Begun, clock: _Clock) -> None:
        self.asked, self.begun, self._clock = asked, begun, clock
        (self._reply,), (self._text,) = begun.replies, begun.texts
        self._blocks = Blocks()
        self._n_calls = 0

    @staticmethod
    @abstractmethod
    def part(found: Object) -> Object:
        """Return how an answer says a part of the reply."""

    async def whole(self) -> Object:
        """Wait for the reply, and return the answer."""
        found: dict[str, list[Any]] = {}
        async for part in self._parts(None):
            for name, value in part.items():
                found.setdefault(name, []).append(value)
        whole = {
            name: "".join(each) if isinstance(each[0], str) else [x for some in each for x in some]
            for name, each in found.items()
        }
        return self._line(whole) | self._end()

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield the lines of a stream; the last says what the reply took."""
        async for part in self._parts(PATIENCE):
            yield line(self._line(part))
        yield line(self._line({}) | self._end())

    async def _parts(self, patience: float | None) -> AsyncIterator[Object]:
        """Yield what is new of the reply; an empty part after `patience` seconds without any."""
        async for news in self._reply.news(patience):
            parts = list(self._of(self._blocks.feed(self._text.feed(news.pieces))))
            figures = self._figures(news.pieces)
            if figures or (news.is_silent and not parts):
                parts = [{**(parts[0] if parts else {}), **figures}, *parts[1:]]
            for part in parts:
                yield part
        for part in self._of(self._blocks.feed(self._text.finish())):
            yield part

    def _of(self, events: Iterable[BlockEvent]) -> Iterator[Object]:
        """Yield the parts of these events. Mutates."""
        for what, block, text in events:
            if block.kind != "call" and text:
                yield {"content" if block.kind == "text" else "thinking": text}
            elif block.kind == "call" and what == "end" and block.is_whole:
                arguments = json.loads(block.text or "{}")
                call = {"index": self._n_calls, "name": block.name, "arguments": arguments}
                yield {"tool_calls": [{"id": block.id, "function": call}]}
                self._n_calls += 1

    def _figures(self, pieces: Sequence[Piece]) -> Object:
        if not (self.asked.logprobs and pieces):
            return {}
        return {"logprobs": token_figures(self.begun.llm.tokenizer, pieces)}

    def _line(self, found: Object) -> Object:
        head = {"model": self.asked.model, "created_at": now()}
        figures = {"logprobs": found["logprobs"]} if "logprobs" in found else {}
        return {**head, **self.part(found), **figures, "done": False}

    def _end(self) -> Object:
        """Say why the reply ended and what it took, in nanoseconds."""
        found, (began, loaded) = self._reply.statistics, self._clock
        return {
            "done": True,
            "done_reason": "length" if found.finish_reason == "length" else "stop",
            "total_duration": _ns(time.perf_counter() - began),
            "load_duration": _ns(loaded - began),
            "prompt_eval_count": found.n_prompt_tokens,
            "prompt_eval_duration": _ns(found.prompt_seconds),
            "eval_count": found.n_generated_tokens,
            "eval_duration": _ns(found.decode_seconds),
        }


class _ChatAnswer(_Answer):
    @staticmethod
    def part(found: Object) -> Object:
        more = {name: found[name] for name in ("thinking", "tool_calls") if name in found}
        return {"message": {"role": "assistant", "content": found.get("content", ""), **more}}


class _TextAnswer(_Answer):
    @staticmethod
    def part(found: Object) -> Object:
        more = {name: found[name] for name in ("thinking",) if name in found}
        return {"response": found.get("content", ""), **more}

    def _end(self) -> Object:
        """Give back all tokens too, so that a later request may go on behind them."""
        is_raw = isinstance(self.asked, TextFields) and self.asked.raw
        return super()._end() | ({} if is_raw else {"context": self._reply.generation.tokens})


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)
