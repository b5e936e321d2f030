"""Answers /v1/responses, in the form of OpenAI's newer API; it keeps nothing between requests."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from vkmoe.generate.chat.conversation import Conversation, names_of_effort
from vkmoe.generate.form import Form
from vkmoe.server.api.begun import Begun, begin, checked_tools, counted
from vkmoe.server.api.blocks import Block, BlockEvent, Blocks, followed
from vkmoe.server.api.shapes import InputTokensShape, ResponseShape
from vkmoe.server.errors import ApiError
from vkmoe.server.fields import Body, Many, ReplyFields, read_body
from vkmoe.server.openapi import EVENTS, JSON, described
from vkmoe.server.service import PATIENCE, Service, new_id
from vkmoe.server.transport.sse import COMMENT, answered, event


class _Format(Body):
    type: Literal["text", "json_object", "json_schema"]
    form: dict[str, Any] | None = Field(default=None, alias="schema")
    # Only the answer has these again: a schema always holds.
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class _TextFields(Body):
    format: _Format | None = None


class _Reasoning(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class _Named(Body):
    type: Literal["function"]
    name: str


class _ResponseFields(ReplyFields):
    api = "responses"
    lengths = ("max_output_tokens", *ReplyFields.lengths)
    input: str | Many[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: _TextFields | None = None
    reasoning: _Reasoning | None = None
    tools: Many[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | _Named | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Any] | None = None

    def conversation(self) -> Conversation:
        """Return the conversation that it is. Raises ApiError."""
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            messages += _messages(self.input)
        if not messages:
            raise ApiError(400, "the input is empty", param="input")
        choice, form = self.tool_choice or "auto", self.text.format if self.text else None
        wanted = None
        if form is not None and form.type != "text":
            wanted = Form("json", form.form or {"type": "object"})
        return Conversation(
            messages,
            names_of_effort(self.reasoning.effort if self.reasoning else None),
            checked_tools(_functions(self.tools or ())),
            choice if isinstance(choice, str) else choice.name,
            self.parallel_tool_calls is not False,
            wanted,
        )


def _functions(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools that are functions, in the form that chats have.

    Clients offer others besides, such as a search of OpenAI's own, which a model need not call:
    they are left out of the answer's `tools` too.
    """
    names = ("name", "description", "parameters")
    return [
        {"type": "function", "function": {n: tool[n] for n in names if tool.get(n) is not None}}
        for tool in tools
        if tool.get("type") == "function"
    ]


def _messages(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items of an input as messages. Raises ApiError for those that cannot be."""
    found: list[dict[str, Any]] = []
    thought = ""
    for index, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "message":
            role = "system" if item.get("role") == "developer" else item.get("role")
            if role not in ("system", "user", "assistant"):
                raise ApiError(400, f"there is no role {role!r}", param=f"input.{index}.role")
            found.append({"role": role, "content": _text(item.get("content"), index)})
        elif kind == "function_call":
            function = {"name": str(item.get("name")), "arguments": item.get("arguments") or "{}"}
            call = {"id": str(item.get("call_id")), "type": "function", "function": function}
            if not (found and found[-1]["role"] == "assistant"):
                found.append({"role": "assistant", "content": ""})
            found[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output, call_id = _text(item.get("output"), index), str(item.get("call_id"))
            found.append({"role": "tool", "tool_call_id": call_id, "content": output})
        elif kind == "reasoning":
            thought = _text(item.get("content") or "", index)
            continue
        else:
            raise ApiError(400, f"an item of type {kind!r} cannot be read", param=f"input.{index}")
        if thought and found[-1]["role"] == "assistant":
            found[-1]["reasoning_content"] = thought
        thought = ""
    return found


def _text(content: Any, index: int) -> str:
    """Return the text of a content: a text, or parts that have one. Raises ApiError."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ApiError(400, "content may be text alone", param=f"input.{index}.content")
    return "".join(map(str, texts))


@described(ResponseShape, body=_ResponseFields, media_types=(JSON, EVENTS), statuses=(500, 503))
async def answer_response(service: Service, request: HttpRequest) -> Response:
    """Answer a request for a response."""
    asked = await read_body(request, _ResponseFields)
    streams = bool(asked.stream)
    begun = await begin(service, asked, asked.conversation(), streams)
    answer = _Answer(service, asked, begun)
    return await answered(request, answer, begun.replies, streams, named_errors=True)


@described(InputTokensShape, body=_ResponseFields, statuses=(500, 503))
async def count_response(service: Service, request: HttpRequest) -> Response:
    """Count the tokens of the prompt that an input becomes."""
    asked = await read_body(request, _ResponseFields)
    return await counted(service, asked.conversation())


class _Answer:
    def __init__(self, service: Service, asked: _ResponseFields, begun: Begun) -> None:
        (self._reply,), (self._text,), self._begun = begun.replies, begun.texts, begun
        self._blocks, self._ids = Blocks(), dict[int, str]()
        self._n_events = 0
        form = asked.text.format if asked.text else None
        sampling = asked.sampling(service.sampling)
        self._base = {
            "id": new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": service.alias,
            "error": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": asked.reasoning.effort if asked.reasoning else None},
            "store": False,
            "temperature": sampling.temp,
            "top_p": sampling.top_p,
            "text": {"format": _given(form) if form else {"type": "text"}},
            "tools": [tool for tool in asked.tools or [] if tool.get("type") == "function"],
            "tool_choice": _plain(asked.tool_choice),
            "truncation": "disabled",
        }

    async def whole(self) -> dict[str, Any]:
        """Wait for the reply, and return the answer."""
        async for _ in followed(self._begun, self._blocks):
            pass
        return self._response(is_over=True)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a stream."""
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=self._response(is_over=False))
        async for each in followed(self._begun, self._blocks, PATIENCE):
            for data in [COMMENT] if each is None else self._block_events(each):
                yield data
        response = self._response(is_over=True)
        yield self._event(f"response.{response['status']}", response=response)

    def _event(self, name: str, /, **data: Any) -> bytes:
        self._n_events += 1
        return event({"type": name, "sequence_number": self._n_events - 1, **data}, name)

    def _block_events(self, found: BlockEvent) -> Iterator[bytes]:
        block, index = found.block, found.block.index
        place = {"item_id": self._id(block), "output_index": index}
        part = {**place, "content_index": 0}
        name, _ = _NAMES[block.kind]
        more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        if found.what == "begin":
            item = {**self._item(block), "status": "in_progress"}
            if block.kind != "call":
                item["content"] = []
            yield self._event("response.output_item.added", output_index=index, item=item)
            if block.kind != "call":
                yield self._event("response.content_part.added", **part, part=_part(block))
        elif found.what == "more":
            where = place if block.kind == "call" else part
            yield self._event(f"response.{name}.delta", **where, delta=found.text, **more)
        else:
            if block.kind == "call":
                done = {"arguments": block.text, "name": block.name}
                yield self._event(f"response.{name}.done", **place, **done)
            else:
                yield self._event(f"response.{name}.done", **part, text=block.text, **more)
                yield self._event("response.content_part.done", **part, part=_part(block))
            item = self._item(block)
            yield self._event("response.output_item.done", output_index=index, item=item)

    def _id(self, block: Block) -> str:
        return self._ids.setdefault(block.index, new_id(_NAMES[block.kind][1]))

    def _item(self, block: Block) -> dict[str, Any]:
        """Return a block that has ended as an item of the output."""
        status = "completed" if block.is_whole else "incomplete"
        item: dict[str, Any] = {"id": self._id(block), "status": status}
        if block.kind == "call":
            named = {"call_id": block.id, "name": block.name, "arguments": block.text}
            return {**item, "type": "function_call", **named}
        if block.kind == "thought":
            return {**item, "type": "reasoning", "summary": [], "content": [_part(block)]}
        return {**item, "type": "message", "role": "assistant", "content": [_part(block)]}

    def _response(self, is_over: bool) -> dict[str, Any]:
        generation = self._reply.generation
        status, details, usage = "in_progress", None, None
        if is_over:
            is_cut = generation.finish_reason == "length"
            status = "incomplete" if is_cut else "completed"
            details = {"reason": "max_output_tokens"} if is_cut else None
            usage = {
                "input_tokens": generation.n_prompt,
                "input_tokens_details": {"cached_tokens": generation.n_reused},
                "output_tokens": generation.n_generated,
                "output_tokens_details": {"reasoning_tokens": self._text.n_thought},
                "total_tokens": generation.n_prompt + generation.n_generated,
            }
        output = [self._item(block) for block in self._blocks.all] if is_over else []
        state = {"status": status, "incomplete_details": details, "output": output, "usage": usage}
        return {**self._base, **state}


# Of each kind of block: what its events are called, and how its name begins.
_NAMES = {
    "text": ("output_text", "msg"),
    "thought": ("reasoning_text", "rs"),
    "call": ("function_call_arguments", "fc"),
}


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "thought":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _given(form: _Format) -> dict[str, Any]:
    return form.model_dump(by_alias=True, exclude_none=True)


def _plain(choice: str | _Named | None) -> Any:
    return choice.model_dump() if isinstance(choice, _Named) else choice or "auto"
