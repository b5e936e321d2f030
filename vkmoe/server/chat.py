"""Answers /v1/chat/completions: a conversation through the model's own template."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from vkmoe.generate.constraint import Constraint
from vkmoe.generate.loop import Piece
from vkmoe.generate.prompts import RESERVED
from vkmoe.generate.reply import FINAL, ReplyChannels
from vkmoe.llm import LLM
from vkmoe.server.errors import ApiError
from vkmoe.server.fields import Body, ReplyFields, read_body
from vkmoe.server.replies import News, Reply, merged, until_gone
from vkmoe.server.service import PATIENCE, Service, finish_reason, new_id, timings, usage
from vkmoe.server.sse import COMMENT, EventStream, event, json_bytes

__all__ = ["ChatFields", "Message", "answer_chat", "chat_prompt"]


class Message(Body):
    """Describes a message of a conversation."""

    role: str
    content: Any = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same by another name

    def names(self) -> dict[str, Any]:
        """Return what a template is given. Raises ApiError for content that is no text."""
        found: dict[str, Any] = {"role": self.role, "content": _text_of(self.content)}
        if thought := self.reasoning_content or self.reasoning:
            found["reasoning_content"] = thought
        if self.name is not None:
            found["name"] = self.name
        return found


class _Schema(Body):
    name: str | None = None
    form: dict[str, Any] | bool = Field(default=True, alias="schema")


class ResponseFormat(Body):
    """Says what form a reply is to have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _Schema | None = None
    form: dict[str, Any] | None = Field(default=None, alias="schema")  # as llama-server has it

    def constraint(self, llm: LLM) -> Constraint | None:
        """Return what keeps a reply to this form. Raises VkmoeError for one that cannot be."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return llm.constraints.json_schema(self.form or {"type": "object"})
        if self.json_schema is None:
            raise ApiError(400, "a json_schema is missing", param="response_format.json_schema")
        return llm.constraints.json_schema(self.json_schema.form)


class ChatFields(ReplyFields):
    """Describes the body of a request for a reply in a conversation."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=-1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None

    @property
    def most_tokens(self) -> int | None:
        asked = (
            self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        )
        return None if asked in (None, -1) else asked

    @property
    def n_logprobs(self) -> int | None:
        """Return how many likeliest tokens are wanted beside each; None: no figures."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def names(self) -> dict[str, Any]:
        """Return further names for the template. Raises ApiError for those it has already."""
        names = dict(self.chat_template_kwargs or {})
        if taken := RESERVED.intersection(names):
            where = "chat_template_kwargs"
            raise ApiError(400, f"{where} must not set {min(taken)!r}", param=where)
        if self.reasoning_effort is not None:
            names.setdefault("reasoning_effort", self.reasoning_effort)
            names.setdefault("enable_thinking", self.reasoning_effort != "none")
        return names


def _text_of(content: Any) -> str:
    """Return the text of a message's content: a text, or a list of parts of that type."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            raise ApiError(
                400, f"content may be text, not {kind or type(part).__name__}", param="messages"
            )
        texts.append(text)
    return "".join(texts)


def chat_prompt(
    service: Service, llm: LLM, messages: list[dict[str, Any]], names: dict[str, Any]
) -> list[int]:
    """Return the tokens of a conversation. Raises VkmoeError."""
    text = service.template(llm).render(messages, **names)
    return llm.tokenizer.encode(text, add_special=not llm.has_chat_template)


async def answer_chat(service: Service, request: HttpRequest) -> Response:
    """Answer a request for a reply in a conversation."""
    asked = await read_body(request, ChatFields)
    llm = service.engine.llm
    messages, names = [each.names() for each in asked.messages], asked.names()
    prompt = await service.prompt(llm, lambda: chat_prompt(service, llm, messages, names))
    constraint = None
    if (form := asked.response_format) is not None:
        constraint = await service.off_loop(lambda: form.constraint(llm))
    more = {"n_logprobs": asked.n_logprobs, "constraint": constraint}
    requests = service.requests(llm, [prompt], asked, **more)
    answer = _Answer(service, llm, asked, service.begin(requests))
    if asked.stream:
        return EventStream(answer.events())
    body = await until_gone(request, answer.whole())
    return Response(json_bytes(body), media_type="application/json")


class _Text:
    """Parts the text of one reply into what a client is shown as thoughts and as the answer."""

    def __init__(self, llm: LLM) -> None:
        self._channels = ReplyChannels(llm.tokenizer.has_channels)
        self._has_blank = llm.tokenizer.adds_space  # before the first word, not to be shown

    def deltas(self, pieces: Iterable[Piece]) -> list[dict[str, str]]:
        """Return what is certain with these pieces."""
        found: list[dict[str, str]] = []
        for piece in pieces:
            text = piece.text.removeprefix(" ") if self._has_blank else piece.text
            self._has_blank = self._has_blank and not piece.text
            found += map(_delta, self._channels.feed(text))
        return found

    def rest(self) -> list[dict[str, str]]:
        """Return what is left when the reply is over."""
        return list(map(_delta, self._channels.finish()))


def _delta(part: tuple[str, str]) -> dict[str, str]:
    channel, text = part
    return {"content": text} if channel == FINAL else {"reasoning_content": text, "reasoning": text}


class _Answer:
    """Makes the answer of `n` replies to a conversation, at once or as a stream."""

    def __init__(self, service: Service, llm: LLM, asked: ChatFields, replies: list[Reply]) -> None:
        self._service, self._llm, self._asked, self._replies = service, llm, asked, replies
        self._texts = [_Text(llm) for _ in replies]
        self._base = {
            "id": new_id("chatcmpl"),
            "created": int(time.time()),
            "model": service.alias,
        }

    async def whole(self) -> dict[str, Any]:
        """Wait for all replies, and return the answer."""
        deltas: list[list[dict[str, str]]] = [[] for _ in self._replies]
        pieces: list[list[Piece]] = [[] for _ in self._replies]
        async for index, news in merged(self._replies, None):
            pieces[index] += news.pieces
            deltas[index] += self._texts[index].deltas(news.pieces)
        choices = []
        for index, reply in enumerate(self._replies):
            found = deltas[index] + self._texts[index].rest()
            message: dict[str, Any] = {"role": "assistant", "content": _joined(found, "content")}
            if thought := _joined(found, "reasoning_content"):
                message |= {"reasoning_content": thought, "reasoning": thought}
            choice = {"index": index, "message": message, "finish_reason": finish_reason(reply)}
            choices.append({**choice, "logprobs": self._logprobs(pieces[index])})
        end = {"usage": usage(self._replies), "timings": timings(self._replies[-1].statistics)}
        return {**self._base, "object": "chat.completion", "choices": choices, **end}

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a stream: roles first, reasons to end last."""
        for index in range(len(self._replies)):
            yield self._chunk(index, {"role": "assistant", "content": ""})
        async for index, news in merged(self._replies, PATIENCE):
            if news.is_silent:
                yield COMMENT
            if self._asked.return_progress and not news.pieces:
                yield self._progress(index, news)
            logprobs = self._logprobs(news.pieces)
            for delta in self._texts[index].deltas(news.pieces):
                yield self._chunk(index, delta, logprobs)
                logprobs = None
        for index, reply in enumerate(self._replies):
            for delta in self._texts[index].rest():
                yield self._chunk(index, delta)
            is_last = index + 1 == len(self._replies)
            more = {"timings": timings(reply.statistics)} if is_last else {}
            yield self._chunk(index, {}, reason=finish_reason(reply), **more)
        if self._asked.with_usage:
            yield event({**self._head, "choices": [], "usage": usage(self._replies)})
        yield event("[DONE]")

    @property
    def _head(self) -> dict[str, Any]:
        return {**self._base, "object": "chat.completion.chunk"}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
        **more: Any,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return event({**self._head, "choices": [choice], **more})

    def _progress(self, index: int, news: News) -> bytes:
        """Say how much of a prompt is read, as llama-server does."""
        found = self._replies[index].statistics
        progress = {
            "total": found.n_prompt_tokens,
            "cache": found.n_reused_tokens,
            "processed": news.n_read,
            "time_ms": 1e3 * found.prompt_seconds,
        }
        choice = {"index": index, "delta": {}, "logprobs": None, "finish_reason": None}
        return event({**self._head, "choices": [choice], "prompt_progress": progress})

    def _logprobs(self, pieces: Iterable[Piece]) -> dict[str, Any] | None:
        """Return the probabilities of these tokens; None where they were not asked for."""
        if self._asked.n_logprobs is None:
            return None
        return {
            "content": [
                {
                    **self._token(piece.token_id, piece.logprob or 0.0),
                    "top_logprobs": [self._token(*each) for each in piece.top_logprobs],
                }
                for piece in pieces
                if piece.token_id >= 0
            ]
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._llm.tokenizer.token_bytes(token_id, after_special=False)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}


def _joined(deltas: Iterable[dict[str, str]], name: str) -> str:
    return "".join(delta.get(name, "") for delta in deltas)
