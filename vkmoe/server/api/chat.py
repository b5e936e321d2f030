"""Answers /v1/chat/completions: a conversation through the model's own template."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from vkmoe.errors import PromptError
from vkmoe.generate.chat.collected import Collected, collected
from vkmoe.generate.chat.conversation import (
    Conversation,
    goes_on,
    names_of_effort,
    taken_name,
)
from vkmoe.generate.chat.messages import given_message
from vkmoe.generate.loop import Piece
from vkmoe.generate.tools import (
    Content,
    ReplyEvent,
    Thought,
    ToolCallArguments,
    ToolCallBegin,
)
from vkmoe.llm.following import News
from vkmoe.server.api.begun import Begun, begin, checked_tools, counted
from vkmoe.server.api.choices import Choices
from vkmoe.server.api.figures import ReadingNews, token_figures
from vkmoe.server.api.shapes import ChatShape, InputTokensShape
from vkmoe.server.errors import ApiError
from vkmoe.server.fields import Body, ChoiceFields, Many, read_body
from vkmoe.server.forms import FormFields
from vkmoe.server.openapi import EVENTS, JSON, described
from vkmoe.server.service import Service
from vkmoe.server.transport.sse import answered


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
        return given_message(vars(self))


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
        if taken := taken_name(names):
            where = "chat_template_kwargs"
            raise ApiError(400, f"{where} must not set {taken!r}", param=where)
        return names_of_effort(self.reasoning_effort) | names

    def conversation(self, prefills: bool = False) -> Conversation:
        """Return the conversation that it is. Raises ApiError.

        With `prefills` the reply goes on with a last message of the assistant, unless it says
        otherwise.
        """
        choice = self.tool_choice or "auto"
        continues = self.continue_final_message
        if continues and self.add_generation_prompt:
            raise ApiError(
                400,
                "add_generation_prompt and continue_final_message contradict each other",
                param="continue_final_message",
            )
        messages = [message.given() for message in self.messages]
        if prefills and continues is None and self.add_generation_prompt is None:
            try:
                continues = goes_on(messages)
            except PromptError as error:
                raise ApiError(400, str(error), param="messages") from error
        return Conversation(
            messages,
            self.names(),
            checked_tools(self.tools or ()),
            choice if isinstance(choice, str) else choice.function.name,
            self.parallel_tool_calls is not False,
            self.form(),
            self.add_generation_prompt is not False,
            bool(continues),
        )


@described(ChatShape, body=ChatFields, media_types=(JSON, EVENTS), statuses=(500, 503))
async def answer_chat(service: Service, request: HttpRequest) -> Response:
    """Answer a request for a reply in a conversation."""
    asked = await read_body(request, ChatFields)
    streams = bool(asked.stream)
    routing = bool(asked.return_routed_experts)
    more: dict[str, Any] = {"n_logprobs": asked.n_logprobs, "with_routing": routing}
    conversation = asked.conversation(bool(service.settings.prefill_assistant))
    begun = await begin(service, asked, conversation, streams, **more)
    return await answered(request, _Answer(service, asked, begun), begun.replies, streams)


@described(InputTokensShape, body=ChatFields, statuses=(500, 503))
async def count_chat(service: Service, request: HttpRequest) -> Response:
    """Count the tokens of the prompt that a conversation becomes."""
    asked = await read_body(request, ChatFields)
    conversation = asked.conversation(bool(service.settings.prefill_assistant))
    return await counted(service, conversation)


def _choice(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


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


def _message(found: Collected) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": found.content}
    if found.thoughts:
        message |= {"reasoning_content": found.thoughts, "reasoning": found.thoughts}
    if found.calls:
        calls = [call.given for call in found.calls]
        message |= {"content": found.content or None, "tool_calls": calls}
    return message


class _Answer(Choices):
    id_kind, name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, asked: ChatFields, begun: Begun) -> None:
        super().__init__(service, begun.llm, asked, begun.replies, 1)
        self._n_logprobs, self._texts = asked.n_logprobs, begun.texts
        self._calls: set[int] = set()  # replies that call a tool
        self._reading = [ReadingNews(reply) for reply in begun.replies]

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a stream: roles first, reasons to end last."""
        for index in range(len(self._replies)):
            yield self._chunk([_choice(index, {"role": "assistant", "content": None})])
        async for data in super().events():
            yield data

    def _whole(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        text = self._texts[index]
        message = _message(collected([*text.feed(pieces), *text.finish()]))
        if "tool_calls" in message:
            self._calls.add(index)
        choice = {"index": index, "message": message, "finish_reason": self._reason(index)}
        return {**choice, "logprobs": self._logprobs(pieces)}

    def _more(self, index: int, news: News) -> Iterator[bytes]:
        if self._asked.return_progress:
            for progress in self._reading[index].more(news):
                yield self._chunk([_choice(index, {})], **progress)
        logprobs = self._logprobs(news.pieces)
        more = self._timings(index) if self._asked.timings_per_token else {}
        for delta in self._deltas(index, self._texts[index].feed(news.pieces)):
            yield self._chunk([_choice(index, delta, logprobs)], **more)
            logprobs = None
        if logprobs is not None and logprobs["content"]:  # of text that is held back
            yield self._chunk([_choice(index, {}, logprobs)], **more)

    def _rest(self, index: int) -> Iterator[dict[str, Any]]:
        for delta in self._deltas(index, self._texts[index].finish()):
            yield _choice(index, delta)
        yield {**_choice(index, {}), "finish_reason": self._reason(index)}

    def _usage(self) -> dict[str, Any]:
        n_thought = sum(text.n_thought for text in self._texts)
        details = {"completion_tokens_details": {"reasoning_tokens": n_thought}}
        return super()._usage() | details

    def _deltas(self, index: int, events: Iterable[ReplyEvent]) -> list[dict[str, Any]]:
        found = [delta for each in events if (delta := _delta(each)) is not None]
        if any("tool_calls" in delta for delta in found):
            self._calls.add(index)
        return found

    def _reason(self, index: int) -> str:
        reason = super()._reason(index)
        return "tool_calls" if reason == "stop" and index in self._calls else reason

    def _logprobs(self, pieces: Iterable[Piece]) -> dict[str, Any] | None:
        """Return the probabilities of these tokens; None where they were not asked for."""
        if self._n_logprobs is None:
            return None
        return {"content": token_figures(self._llm.tokenizer, pieces)}
