"""Answers /v1/chat/completions: a conversation through the model's own template."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from vkmoe.generate.loop import Piece
from vkmoe.generate.prompts import RESERVED
from vkmoe.generate.tools import (
    Content,
    ReplyEvent,
    Thought,
    ToolCallArguments,
    ToolCallBegin,
)
from vkmoe.server.api.conversation import Begun, Conversation, begin, checked_tools
from vkmoe.server.api.shapes import ChatShape
from vkmoe.server.errors import ApiError
from vkmoe.server.fields import Body, ChoiceFields, Many, read_body
from vkmoe.server.forms import FormFields
from vkmoe.server.openapi import EVENTS, JSON, described
from vkmoe.server.replies import News, Reply, merged, until_gone
from vkmoe.server.service import (
    PATIENCE,
    Service,
    finish_reason,
    new_id,
    routed_experts,
    timings,
    usage,
)
from vkmoe.server.sse import COMMENT, EventStream, event, json_bytes

__all__ = ["ChatFields", "Message", "answer_chat", "names_of_effort"]


class Message(Body):
    """Describes a message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[str | dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same by another name
    tool_calls: Many[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    def given(self) -> dict[str, Any]:
        """Return what a template is given."""
        role = "system" if self.role == "developer" else self.role
        more = {
            "name": self.name,
            "reasoning_content": self.reasoning_content or self.reasoning,
            "tool_calls": self.tool_calls,
            "tool_call_id": self.tool_call_id,
        }
        found = {"role": role, "content": self.content if self.content is not None else ""}
        return found | {name: value for name, value in more.items() if value}


class _Named(Body):
    name: str


class NamedTool(Body):
    """Names the one tool that is to be called."""

    type: Literal["function"]
    function: _Named


class ChatFields(FormFields, ChoiceFields):
    """Describes the body of a request for a reply in a conversation."""

    api = "chat"
    lengths = ("max_completion_tokens", *ChoiceFields.lengths)
    messages: Annotated[Many[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=-1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Many[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @property
    def n_logprobs(self) -> int | None:
        """Return how many likeliest tokens are wanted beside each; None: no figures."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def names(self) -> dict[str, Any]:
        """Return further names for the template. Raises ApiError for those it has already."""
        names = dict(self.chat_template_kwargs or {})
        if taken := names.keys() & {*RESERVED, "tools"}:
            where = "chat_template_kwargs"
            raise ApiError(400, f"{where} must not set {min(taken)!r}", param=where)
        return names_of_effort(self.reasoning_effort) | names

    def conversation(self) -> Conversation:
        """Return the conversation that it is. Raises ApiError."""
        choice, continues = self.tool_choice or "auto", bool(self.continue_final_message)
        if continues and self.add_generation_prompt:
            raise ApiError(
                400,
                "add_generation_prompt and continue_final_message contradict each other",
                param="continue_final_message",
            )
        return Conversation(
            [message.given() for message in self.messages],
            self.names(),
            checked_tools(self.tools or ()),
            choice if isinstance(choice, str) else choice.function.name,
            self.parallel_tool_calls is not False,
            self.form(),
            self.add_generation_prompt is not False,
            continues,
        )


@described(ChatShape, body=ChatFields, media_types=(JSON, EVENTS), statuses=(500, 503))
async def answer_chat(service: Service, request: HttpRequest) -> Response:
    """Answer a request for a reply in a conversation."""
    asked = await read_body(request, ChatFields)
    streams = bool(asked.stream)
    with_routing = bool(asked.return_routed_experts)
    conversation = asked.conversation()
    begun = await begin(service, asked, conversation, streams, asked.n_logprobs, with_routing)
    answer = _Answer(service, asked, begun)
    if streams:
        return EventStream(answer.events(), begun.replies)
    body = await until_gone(request, answer.whole(), begun.replies)
    return Response(json_bytes(body), media_type="application/json")


def names_of_effort(effort: str | None) -> dict[str, Any]:
    """Return names by which templates learn how much a model is to think; none for None."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def _delta(found: ReplyEvent) -> dict[str, Any] | None:
    """Return how a stream says what is new; None: not at all."""
    if isinstance(found, Content):
        return {"content": found.text}
    if isinstance(found, Thought):
        return {"reasoning_content": found.text, "reasoning": found.text}
    if isinstance(found, ToolCallBegin):
        function = {"name": found.name, "arguments": ""}
        call = {"index": found.index, "id": found.id, "type": "function", "function": function}
        return {"tool_calls": [call]}
    if isinstance(found, ToolCallArguments):
        return {"tool_calls": [{"index": found.index, "function": {"arguments": found.text}}]}
    return None


def _message(events: Sequence[ReplyEvent]) -> dict[str, Any]:
    """Return the message that a whole reply is."""
    content = "".join(each.text for each in events if isinstance(each, Content))
    thought = "".join(each.text for each in events if isinstance(each, Thought))
    calls: dict[int, dict[str, Any]] = {}
    for each in events:
        if isinstance(each, ToolCallBegin):
            function = {"name": each.name, "arguments": ""}
            calls[each.index] = {"id": each.id, "type": "function", "function": function}
        elif isinstance(each, ToolCallArguments):
            calls[each.index]["function"]["arguments"] += each.text
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thought:
        message |= {"reasoning_content": thought, "reasoning": thought}
    if calls:
        message |= {"content": content or None, "tool_calls": list(calls.values())}
    return message


class _Answer:
    """Makes the answer of `n` replies to a conversation, at once or as a stream."""

    def __init__(self, service: Service, asked: ChatFields, begun: Begun) -> None:
        self._llm, self._asked = begun.llm, asked
        self._replies, self._texts = begun.replies, begun.texts
        self._calls: set[int] = set()  # replies that call a tool
        self._base = {
            "id": new_id("chatcmpl"),
            "created": int(time.time()),
            "model": service.alias,
        }

    async def whole(self) -> dict[str, Any]:
        """Wait for all replies, and return the answer."""
        events: list[list[ReplyEvent]] = [[] for _ in self._replies]
        pieces: list[list[Piece]] = [[] for _ in self._replies]
        async for index, news in merged(self._replies, None):
            pieces[index] += news.pieces
            events[index] += self._texts[index].feed(news.pieces)
        choices = []
        for index, reply in enumerate(self._replies):
            message = _message(events[index] + self._texts[index].finish())
            if "tool_calls" in message:
                self._calls.add(index)
            reason, logprobs = self._reason(index, reply), self._logprobs(pieces[index])
            choice = {"index": index, "message": message, "finish_reason": reason}
            choices.append({**choice, "logprobs": logprobs, **routed_experts(self._llm, reply)})
        end = {"usage": self._usage(), **self._timings(-1)}
        return {**self._base, "object": "chat.completion", "choices": choices, **end}

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a stream: roles first, reasons to end last."""
        for index in range(len(self._replies)):
            yield self._chunk(index, {"role": "assistant", "content": ""})
        n_read = dict.fromkeys(range(len(self._replies)), -1)
        async for index, news in merged(self._replies, PATIENCE):
            if news.is_silent:
                yield COMMENT
            if self._asked.return_progress and news.n_read != n_read[index]:
                n_read[index] = news.n_read
                yield self._progress(index, news)
            logprobs = self._logprobs(news.pieces)
            more = self._timings(index) if self._asked.timings_per_token else {}
            for delta in self._deltas(index, self._texts[index].feed(news.pieces)):
                yield self._chunk(index, delta, logprobs, **more)
                logprobs = None
            if logprobs is not None and logprobs["content"]:  # of text that is held back
                yield self._chunk(index, {}, logprobs, **more)
        for index, reply in enumerate(self._replies):
            for delta in self._deltas(index, self._texts[index].finish()):
                yield self._chunk(index, delta)
            is_last = index + 1 == len(self._replies) and not self._asked.with_usage
            choice = {"index": index, "delta": {}, "logprobs": None}
            choice |= {"finish_reason": self._reason(index, reply)}
            choice |= routed_experts(self._llm, reply)
            more = self._timings(-1) if is_last else {}
            yield event({**self._head, "choices": [choice], **more})
        if self._asked.with_usage:
            end = {"usage": self._usage(), **self._timings(-1)}
            yield event({**self._head, "choices": [], **end})
        yield event("[DONE]")

    def _usage(self) -> dict[str, Any]:
        n_thought = sum(text.n_thought for text in self._texts)
        details = {"completion_tokens_details": {"reasoning_tokens": n_thought}}
        return usage(self._replies) | details

    def _timings(self, index: int) -> dict[str, Any]:
        return {"timings": timings(self._replies[index].statistics)}

    def _deltas(self, index: int, events: Iterable[ReplyEvent]) -> list[dict[str, Any]]:
        found = [delta for each in events if (delta := _delta(each)) is not None]
        if any("tool_calls" in delta for delta in found):
            self._calls.add(index)
        return found

    def _reason(self, index: int, reply: Reply) -> str:
        """Say why a reply ended."""
        reason = finish_reason(reply)
        return "tool_calls" if reason == "stop" and index in self._calls else reason

    @property
    def _head(self) -> dict[str, Any]:
        return {**self._base, "object": "chat.completion.chunk"}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        **more: Any,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
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
        text = data.decode("utf-8", "replace")
        return {"id": token_id, "token": text, "logprob": logprob, "bytes": list(data)}
