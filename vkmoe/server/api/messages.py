"""Answers /v1/messages and /v1/messages/count_tokens, in the form of Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from vkmoe.generate.chat.conversation import Conversation, names_of_effort
from vkmoe.generate.form import Form
from vkmoe.server.api.begun import Begun, begin, checked_tools, counted
from vkmoe.server.api.blocks import Block, BlockEvent, Blocks, followed
from vkmoe.server.api.shapes import InputTokensShape, MessageShape
from vkmoe.server.errors import ApiError
from vkmoe.server.fields import Body, Many, ReplyFields, read_body
from vkmoe.server.known_fields import Api
from vkmoe.server.openapi import EVENTS, JSON, described
from vkmoe.server.service import PATIENCE, Service, new_id
from vkmoe.server.transport.sse import answered, event


class _Message(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Many[dict[str, Any]]


class _Tool(Body):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None

    def given(self) -> dict[str, Any]:
        """Return it in OpenAI's form."""
        function: dict[str, Any] = {"name": self.name, "parameters": self.input_schema or {}}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


class _Choice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]


class _OutputFormat(Body):
    type: Literal["json_schema"]
    form: dict[str, Any] = Field(alias="schema")


class _OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: _OutputFormat | None = None


class _CountFields(Body):
    api: ClassVar[Api] = "count_tokens"
    messages: Annotated[Many[_Message], Field(min_length=1)]
    system: str | Many[dict[str, Any]] | None = None
    tools: Many[_Tool] | None = None
    tool_choice: _Choice | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None

    def conversation(self) -> Conversation:
        """Return the conversation that it is. Raises ApiError."""
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": _text(self.system, "system")})
        for message in self.messages:
            messages += _given(message)
        output = self.output_config or _OutputConfig()
        names = names_of_effort(output.effort)
        if self.thinking is not None:
            names["enable_thinking"] = self.thinking.type != "disabled"
        last = messages[-1]
        choice, kind = self.tool_choice, self.tool_choice.type if self.tool_choice else "auto"
        if kind == "tool" and (choice is None or not choice.name):
            raise ApiError(400, "a tool_choice of type tool has a name", param="tool_choice.name")
        named = {"any": "required", "tool": choice.name or "" if choice else ""}
        return Conversation(
            messages,
            names,
            checked_tools([tool.given() for tool in self.tools or ()]),
            named.get(kind, kind),
            not (choice and choice.disable_parallel_tool_use),
            Form("json", output.format.form) if output.format else None,
            continues=last["role"] == "assistant"
            and bool(last["content"])
            and "tool_calls" not in last,
        )


class _MessageFields(_CountFields, ReplyFields):
    api = "messages"
    max_tokens: Annotated[int, Field(ge=1)]
    stop: str | Many[str] | None = Field(default=None, alias="stop_sequences")


def _text(content: Any, param: str = "messages") -> str:
    """Return the text of a content: a text, or blocks of text. Raises ApiError."""
    if isinstance(content, str):
        return content
    texts = []
    for block in content if isinstance(content, list) else [content]:
        text = block.get("text") if isinstance(block, dict) else None
        if not isinstance(text, str):
            kind = block.get("type") if isinstance(block, dict) else type(block).__name__
            raise ApiError(400, f"content may be text, not {kind}", param=param)
        texts.append(text)
    return "\n".join(texts)


def _given(message: _Message) -> list[dict[str, Any]]:
    """Return a message in OpenAI's form; results of tools are messages of their own there."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in message.content:
        kind = block.get("type")
        if kind == "tool_result":
            content = _text(block.get("content") or "")
            call_id = str(block.get("tool_use_id"))
            results.append({"role": "tool", "tool_call_id": call_id, "content": content})
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {})
            function = {"name": str(block.get("name")), "arguments": arguments}
            calls.append({"id": str(block.get("id")), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind != "redacted_thinking":
            texts.append(block)
    found: dict[str, Any] = {"role": message.role, "content": _text(texts)}
    found |= {"tool_calls": calls} if calls else {}
    found |= {"reasoning_content": "\n".join(thoughts)} if any(thoughts) else {}
    is_empty = not (texts or calls or thoughts)
    return results + ([] if is_empty and results else [found])


@described(InputTokensShape, body=_CountFields)
async def count_tokens(service: Service, request: HttpRequest) -> Response:
    """Count the tokens that a conversation has as a prompt."""
    asked = await read_body(request, _CountFields)
    return await counted(service, asked.conversation())


@described(MessageShape, body=_MessageFields, media_types=(JSON, EVENTS), statuses=(500, 503))
async def answer_message(service: Service, request: HttpRequest) -> Response:
    """Answer a request for a message."""
    asked = await read_body(request, _MessageFields)
    streams = bool(asked.stream)
    begun = await begin(service, asked, asked.conversation(), streams)
    answer = _Answer(service, begun)
    return await answered(request, answer, begun.replies, streams, named_errors=True)


class _Answer:
    def __init__(self, service: Service, begun: Begun) -> None:
        (self._reply,), self._begun = begun.replies, begun
        self._blocks = Blocks()
        self._base = {
            "id": new_id("msg"),
            "type": "message",
            "role": "assistant",
            "model": service.alias,
        }

    async def whole(self) -> dict[str, Any]:
        """Wait for the reply, and return the answer."""
        async for _ in followed(self._begun, self._blocks):
            pass
        content = [_whole(block) for block in self._blocks.all]
        return {**self._base, "content": content, **self._end(), "usage": self._usage()}

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a stream."""
        usage = {**self._usage(), "output_tokens": 0}
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        yield _event("message_start", message={**self._base, **empty, "usage": usage})
        async for each in followed(self._begun, self._blocks, PATIENCE):
            yield _event("ping") if each is None else _block_event(each)
        yield _event("message_delta", delta=self._end(), usage=self._usage())
        yield _event("message_stop")

    def _end(self) -> dict[str, Any]:
        generation = self._reply.generation
        reason, stop = "end_turn", generation.stop_text
        if generation.finish_reason == "length":
            reason = "max_tokens"
        elif stop is not None:
            reason = "stop_sequence"
        elif any(block.kind == "call" for block in self._blocks.all):
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": stop}

    def _usage(self) -> dict[str, int]:
        generation = self._reply.generation
        return {
            "input_tokens": generation.n_prompt - generation.n_reused,
            "cache_read_input_tokens": generation.n_reused,
            "cache_creation_input_tokens": 0,
            "output_tokens": generation.n_generated,
        }


def _event(name: str, **data: Any) -> bytes:
    return event({"type": name, **data}, name)


def _block_event(found: BlockEvent) -> bytes:
    """Return the event of a stream for what happens to a block."""
    index, block = found.block.index, found.block
    if found.what == "begin":
        return _event("content_block_start", index=index, content_block=_empty(block))
    if found.what == "end":
        return _event("content_block_stop", index=index)
    name = {"thought": "thinking", "text": "text", "call": "partial_json"}[block.kind]
    kind = "input_json" if block.kind == "call" else name
    delta = {"type": f"{kind}_delta", name: found.text}
    return _event("content_block_delta", index=index, delta=delta)


def _empty(block: Block) -> dict[str, Any]:
    if block.kind == "call":
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}
    if block.kind == "thought":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _whole(block: Block) -> dict[str, Any]:
    if block.kind == "call":
        return {**_empty(block), "input": json.loads(block.text or "{}")}
    name = "thinking" if block.kind == "thought" else "text"
    return {**_empty(block), name: block.text}
