"""Answers /api/chat and /api/generate: replies in the form of Ollama's API.

Streams are lines of JSON. A request for nothing is answered as one that only loads a model.
"""

from __future__ import annotations

import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, model_validator
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from vkmoe.generate.chat.conversation import Conversation, goes_on, names_of_effort
from vkmoe.generate.chat.messages import given_message
from vkmoe.generate.form import Form
from vkmoe.generate.loop import Piece
from vkmoe.llm import LLM
from vkmoe.server.api.begun import Begun, begin, begin_text, checked_tools, joined
from vkmoe.server.api.blocks import BlockEvent, Blocks
from vkmoe.server.api.figures import token_figures
from vkmoe.server.api.ollama.models import capabilities, now
from vkmoe.server.api.shapes import OllamaChatShape, OllamaTextShape
from vkmoe.server.errors import ApiError
from vkmoe.server.fields import Body, Many, Number, ReplyFields, Tokens, read_body
from vkmoe.server.known_fields import Api
from vkmoe.server.openapi import JSON, LINES, described
from vkmoe.server.replies import until_gone
from vkmoe.server.service import PATIENCE, Service
from vkmoe.server.sse import LineStream, json_answer, line

Object = dict[str, Any]
_MOST_TEMPLATE = 1 << 14  # characters
_MOST_SHOWN = 4  # how often a template may show each value, on average
_ACTION = re.compile(r"(?:(?<!\s)\s*\{\{-|\{\{)([^{}]*?)(?:-\}\}\s*|\}\})")


class _Options(ReplyFields):
    """Says how tokens are chosen; other names of Ollama's options are how a model is loaded."""

    num_predict: Annotated[int, Field(ge=-2)] | None = None  # -1, -2: until the context is full
    lengths = ("num_predict",)

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers(cls, value: Any) -> Any:
        """Take 40.0 for 40: Ollama does."""
        if not isinstance(value, dict):
            return value
        whole = {k: int(v) for k, v in value.items() if isinstance(v, float) and v.is_integer()}
        return value | whole

    def most_tokens(self, default: int) -> int | None:
        """Return the most tokens of a reply; None: until the context is full."""
        number = super().most_tokens(default)
        return None if number is not None and number < 0 else number


class _Asked(Body):
    """Describes what requests for replies have in common."""

    api: ClassVar[Api] = "ollama"
    model: Annotated[str, Field(min_length=1)]
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: _Options | None = None
    keep_alive: Number | str | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def streams(self) -> bool:
        """Say whether the reply comes as a stream, which it does unasked."""
        return self.stream is not False

    @property
    def form(self) -> Form | None:
        """Return the form of the reply; None: it may have any."""
        if isinstance(self.format, dict):
            return Form("json", self.format)
        return Form("json", {"type": "object"}) if self.format else None

    @property
    def names(self) -> Object:
        """Return names by which a template learns how much the model is to think."""
        if isinstance(self.think, str):
            return names_of_effort(self.think)
        return {} if self.think is None else {"enable_thinking": self.think}

    @property
    def more(self) -> Object:
        """Return further options of LLM.request."""
        return {"n_logprobs": (self.top_logprobs or 0) if self.logprobs else None}

    @property
    def reply(self) -> _Options:
        """Return how tokens are chosen."""
        return self.options or _Options()


class _Function(Body):
    name: str
    arguments: dict[str, Any] | None = None


class _Call(Body):
    id: str | None = None
    function: _Function


class _Message(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Many[_Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class _ChatFields(_Asked):
    messages: Many[_Message] | None = None  # none: load the model
    tools: Many[dict[str, Any]] | None = None

    def conversation(self, prefills: bool) -> Conversation:
        """Return the conversation that it is. Raises ApiError, and PromptError.

        With `prefills` the reply goes on with a last message of the assistant.
        """
        messages = list(_given(self.messages or ()))
        return Conversation(
            messages,
            self.names,
            checked_tools(self.tools or ()),
            form=self.form,
            continues=prefills and goes_on(messages),
        )


class _TextFields(_Asked):
    prompt: str | None = None  # none, and no suffix: load the model
    suffix: str | None = None
    system: str | None = None
    template: Annotated[str, Field(max_length=_MOST_TEMPLATE)] | None = None
    context: Tokens | None = None
    raw: bool | None = None

    def conversation(self) -> Conversation:
        """Return the conversation that a prompt is."""
        given = {"system": self.system, "user": self.prompt}
        messages = [{"role": role, "content": text} for role, text in given.items() if text]
        return Conversation(messages, self.names, form=self.form)


def _given(messages: Iterable[_Message]) -> Iterator[Object]:
    """Yield messages in OpenAI's form, where calls and results have ids.

    A result without one is that of the first call of its name, or else of the first call, that
    has none.
    """
    waiting: list[tuple[str, str]] = []  # ids and names of calls without a result
    n_calls = 0
    for message in messages:
        calls = []
        for call in message.tool_calls or ():
            n_calls += 1
            waiting.append((call.id or f"call_{n_calls}", call.function.name))
            function = {"name": call.function.name, "arguments": call.function.arguments or {}}
            calls.append({"id": waiting[-1][0], "type": "function", "function": function})
        found = {
            "role": message.role,
            "content": message.content,
            "reasoning_content": message.thinking,
            "tool_calls": calls,
            "tool_call_id": message.tool_call_id,
        }
        if message.role == "tool":
            found["name"] = message.tool_name
            same = [each for each in waiting if message.tool_call_id == each[0]]
            same = same or [each for each in waiting if message.tool_name == each[1]] or waiting[:1]
            if same:
                waiting.remove(same[0])
                found["tool_call_id"] = message.tool_call_id or same[0][0]
        yield given_message(found)


# ----- answers -----


class _Clock(NamedTuple):
    """Holds when a request came, and when its model was there; seconds."""

    began: float
    loaded: float


@described(OllamaChatShape, body=_ChatFields, media_types=(JSON, LINES), statuses=(500, 503))
async def chat(service: Service, request: HttpRequest) -> Response:
    """Answer a request for a reply in a conversation, in Ollama's form."""
    began = time.perf_counter()
    asked = await read_body(request, _ChatFields)
    llm = service.engine.llm
    clock = _Clock(began, time.perf_counter())
    if not asked.messages:
        return _nothing(asked, _ChatAnswer.part({}))
    await _check_able(service, llm, asked, {"tools": bool(asked.tools)})
    conversation = asked.conversation(bool(service.settings.prefill_assistant))
    # Calls come whole, so that nothing of one streams before that is certain.
    begun = await begin(service, asked.reply, conversation, False, **asked.more)
    return await _answered(request, _ChatAnswer(asked, begun, clock))


@described(OllamaTextShape, body=_TextFields, media_types=(JSON, LINES), statuses=(500, 503))
async def generate(service: Service, request: HttpRequest) -> Response:
    """Answer a request for a reply to a prompt, or for a text that goes on, in Ollama's form."""
    began = time.perf_counter()
    asked = await read_body(request, _TextFields)
    llm = service.engine.llm
    clock = _Clock(began, time.perf_counter())
    if not asked.prompt and not asked.suffix:
        return _nothing(asked, _TextAnswer.part({}))
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


async def _check_able(
    service: Service, llm: LLM, asked: _Asked, needed: Mapping[str, bool]
) -> None:
    """Refuse what the model cannot do, in Ollama's words. Raises ApiError."""
    wanted = [name for name, is_needed in needed.items() if is_needed]
    wanted += ["thinking"] if asked.think else []
    able = await service.off_loop(lambda: capabilities(llm)) if wanted else ()
    for name in wanted:
        if name not in able:
            raise ApiError(400, f'"{asked.model}" does not support {name}', param=name)


async def _text(service: Service, llm: LLM, asked: _TextFields) -> Sequence[int]:
    """Return the tokens of a prompt that no template of the model is put around."""
    prompt, gaps = asked.prompt or "", llm.tokenizer.gaps
    if asked.suffix and {"fim_pre", "fim_suf", "fim_mid"} <= gaps.keys():
        texts = [await service.encode(llm, text, False) for text in (prompt, asked.suffix)]
        first = [*llm.tokenizer.added_first, gaps["fim_pre"]]
        return [*first, *texts[0], gaps["fim_suf"], *texts[1], gaps["fim_mid"]]
    if asked.template:
        prompt = _rendered(asked.template, {"System": asked.system or "", "Prompt": prompt})
    return await service.encode(llm, prompt)


def _rendered(template: str, values: Mapping[str, str]) -> str:
    """Write a template of Go's text/template, up to .Response. Raises ApiError.

    It may show values such as {{ .Prompt }}, between {{ if .System }}, {{ else }} and {{ end }}.
    """
    found: list[str] = []
    shows = [True]  # by each `if` around this place
    for index, part in enumerate(_ACTION.split(template)):
        words = part.split() if index % 2 else []
        name = words[-1].removeprefix(".") if words and words[-1].startswith(".") else ""
        if index % 2 == 0:
            found += [part] if all(shows) else []
        elif words == [".Response"] and all(shows):
            break
        elif words == [".Response"]:
            continue
        elif len(words) == 1 and name in values:
            found += [values[name]] if all(shows) else []
        elif words[:1] == ["if"] and len(words) == 2 and name in (*values, "Response"):
            shows.append(bool(values.get(name)))
        elif words == ["else"] and len(shows) > 1:
            shows[-1] = not shows[-1]
        elif words == ["end"] and len(shows) > 1:
            shows.pop()
        else:
            message = f"template: {part.strip()[:40]!r} is not supported; use /api/chat, or raw"
            raise ApiError(400, message, param="template")
    if sum(map(len, found)) > len(template) + _MOST_SHOWN * sum(map(len, values.values())):
        raise ApiError(400, "template: it shows the prompt too often", param="template")
    return "".join(found)


def _nothing(asked: _Asked, empty: Object) -> Response:
    """Answer a request for nothing, which asks to load the model, or to unload it."""
    text = str(asked.keep_alive)
    unloads = "0" in text and re.search("[1-9]", text) is None
    reason = "unload" if unloads else "load"
    head = {"model": asked.model, "created_at": now()}
    return json_answer({**head, **empty, "done": True, "done_reason": reason})


async def _answered(request: HttpRequest, answer: _Answer) -> Response:
    """Send the answer of a reply, as a stream or when it is whole. Raises ApiError."""
    replies = answer.begun.replies
    if answer.asked.streams:
        return LineStream(answer.lines(), replies)
    return json_answer(await until_gone(request, answer.whole(), replies))


class _Answer(ABC):
    """Makes the answer of a reply. Its parts are texts and thoughts, or lists of whole calls."""

    def __init__(self, asked: _Asked, begun: Begun, clock: _Clock) -> None:
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
        is_raw = isinstance(self.asked, _TextFields) and self.asked.raw
        return super()._end() | ({} if is_raw else {"context": self._reply.generation.tokens})


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)
