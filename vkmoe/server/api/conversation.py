"""Says what a conversation is to a model: the prompt it becomes, what its reply may be, its parts.

All APIs that have conversations bring them into this form, which is that of OpenAI's chats.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.responses import Response

from vkmoe.errors import PromptError
from vkmoe.generate.constraint import Constraint
from vkmoe.generate.loop import Generation, Piece
from vkmoe.generate.tools import (
    ReplyEvent,
    ReplyParser,
    Thought,
    ToolFamily,
    reply_grammar,
)
from vkmoe.llm import LLM
from vkmoe.server.errors import ApiError
from vkmoe.server.fields import ReplyFields
from vkmoe.server.forms import Form
from vkmoe.server.replies import Reply
from vkmoe.server.service import Service
from vkmoe.server.sse import json_answer

_MARK = "\ue000here\ue000"  # where a prompt is cut off, in characters that no text has


@dataclass(frozen=True)
class Conversation:
    """Holds messages, further names for the template, and what the reply may be."""

    messages: list[dict[str, Any]]
    names: dict[str, Any] = field(default_factory=dict)  # further ones for the template
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str = "auto"  # "none", "auto", "required", or the name of a tool
    parallel_calls: bool = True
    form: Form | None = None  # of the answer
    opens_reply: bool = True  # the prompt ends where a new message of the model begins
    continues: bool = False  # the reply goes on with the last message, in place of a new one

    @property
    def offered(self) -> list[dict[str, Any]]:
        """List the tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools

    def prompt(self, service: Service, llm: LLM) -> str:
        """Write it as a prompt. Raises VkmoeError."""
        opens = self.opens_reply and not self.continues
        messages = [*self.messages[:-1], self._marked_last()] if self.continues else self.messages
        prompt = service.template(llm).render(
            messages, add_generation_prompt=opens, tools=self.offered or None, **self.names
        )
        if not self.continues:
            return prompt
        prompt, mark, _ = prompt.rpartition(_MARK)
        if not mark:
            raise _cannot_go_on("the chat template does not show the last message")
        return prompt

    def _marked_last(self) -> dict[str, Any]:
        """Return the last message with a mark behind its text. Raises PromptError."""
        last = self.messages[-1]
        text = "".join(_texts(last["content"]))
        if last["role"] != "assistant" or not text:
            raise _cannot_go_on("the last message is no text of the assistant")
        if last.get("tool_calls"):
            raise _cannot_go_on("the last message ends with a call")
        return {**last, "content": text + _MARK}

    async def tokens(self, service: Service, llm: LLM, prompt: str) -> list[int]:
        """Return the tokens of the prompt. Raises ApiError."""
        # A model without a template of its own has none that begins the text as it wants.
        return await service.encode(llm, prompt, add_special=not llm.has_chat_template)

    def check_length(self, service: Service, llm: LLM) -> None:
        """Refuse what cannot fit before the template is rendered. Raises ApiError.

        Thoughts of the model may be left out; the rest is in the prompt, but for blanks around it.
        """
        for message in self.messages:
            if message["role"] != "assistant":
                for text in _texts(message["content"]):
                    service.check_length(llm, text.strip())

    @property
    def must_call(self) -> bool:
        """Say whether the reply must be a call."""
        return self.tool_choice not in ("none", "auto")

    @property
    def has_form(self) -> bool:
        """Say whether `constraint` has something to do."""
        return self.form is not None or self.must_call

    def constraint(self, llm: LLM, family: ToolFamily, in_thought: bool) -> Constraint | None:
        """Return what keeps the reply to its form; None: nothing. Raises VkmoeError."""
        constraints, answer = llm.constraints, None
        if self.must_call:
            tools = self._demanded()
        elif self.form is None:
            return None
        else:
            tools = self.offered if family.name != "none" else []
            if not tools and family.thought is None and family.name != "harmony":
                return self.form.constraint(constraints)
            if tools:  # whose schemas are kept to as far as that can be; the answer's must be
                self.form.constraint(constraints)
            answer = self.form.in_lark(constraints, lenient=bool(tools))
        grammar = reply_grammar(
            family,
            partial(constraints.json_in_lark, lenient=bool(tools)),
            tools,
            answer,
            parallel=self.parallel_calls and self.tool_choice in ("auto", "required"),
            in_thought=in_thought,
        )
        return constraints.lark(grammar)

    def _demanded(self) -> list[dict[str, Any]]:
        """List the tools of which one must be called. Raises PromptError for a name of none."""
        if self.tool_choice == "required":
            return self.offered
        chosen = [each for each in self.offered if _name(each) == self.tool_choice]
        if not chosen:
            raise PromptError(
                f"tool_choice names {self.tool_choice!r}, which is no tool of this request",
                "name one of its tools",
            )
        return chosen


def _cannot_go_on(reason: str) -> PromptError:
    return PromptError(
        f"{reason}, so that a reply cannot go on with it", "leave continue_final_message out"
    )


def _texts(content: str | list[Any]) -> list[str]:
    """List the texts of a message's content, which may be a text, or parts that have one."""
    if isinstance(content, str):
        return [content]
    found = [part.get("text") if isinstance(part, dict) else part for part in content]
    return [text for text in found if isinstance(text, str)]


def _name(tool: dict[str, Any]) -> str:
    return str(tool.get("function", {}).get("name"))


class ReplyText:
    """Reads one reply: its answer, its thoughts, its calls."""

    def __init__(self, parser: ReplyParser, generation: Generation) -> None:
        self._parser, self._generation = parser, generation
        self.n_thought = 0  # tokens of its thoughts

    def feed(self, pieces: Iterable[Piece]) -> list[ReplyEvent]:
        """Return what is certain with these pieces. Mutates."""
        found: list[ReplyEvent] = []
        for piece in pieces:
            events = self._parser.feed(piece.text)
            self.n_thought += bool(events) and all(isinstance(each, Thought) for each in events)
            found += events
        return found

    def finish(self) -> list[ReplyEvent]:
        """Return what is left when the reply is over. Mutates."""
        ended = self._generation
        return self._parser.finish(ended.finish_reason == "length" or ended.stop_text is not None)


@dataclass(frozen=True)
class Begun:
    """Holds the replies to a conversation, and what reads each."""

    llm: LLM
    replies: list[Reply]
    texts: list[ReplyText]


async def begin(
    service: Service,
    asked: ReplyFields,
    conversation: Conversation,
    streams: bool,
    **more: Any,
) -> Begun:
    """Let the replies to a conversation begin. `more` are options of LLM.request.

    Raises ApiError where they cannot.
    """
    llm = service.engine.llm
    conversation.check_length(service, llm)
    text, family = await service.off_loop(
        lambda: (conversation.prompt(service, llm), service.family(llm))
    )
    prompt = service.fitting(llm, await conversation.tokens(service, llm, text))
    in_thought, constraint = family.begins_in_thought(text), None
    if conversation.has_form:
        constraint = await service.off_loop(
            partial(conversation.constraint, llm, family, in_thought), is_long=True
        )
    more |= {"constraint": constraint, "shown": family.shown}
    requests = service.requests(llm, [prompt], asked, **more)
    parser = partial(
        ReplyParser,
        family,
        conversation.offered,
        in_thought=in_thought,
        must_call=conversation.must_call,
        streams=streams,
        # A form knows its own blanks, and a text that goes on may begin with one.
        drops_blank=llm.tokenizer.adds_space and constraint is None and not conversation.continues,
    )
    replies = service.begin(requests)
    texts = [ReplyText(parser(), each.generation) for each in replies]
    return Begun(llm, replies, texts)


async def counted(service: Service, conversation: Conversation) -> Response:
    """Answer how many tokens a conversation has as a prompt. Raises ApiError."""
    llm = service.engine.llm
    conversation.check_length(service, llm)
    prompt = await service.off_loop(lambda: conversation.prompt(service, llm))
    ids = await conversation.tokens(service, llm, prompt)
    return json_answer({"object": "response.input_tokens", "input_tokens": len(ids)})


def checked_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Check tools in OpenAI's form. Raises ApiError."""
    found = []
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        parameters = function.get("parameters") if isinstance(function, dict) else None
        where = f"tools.{index}"
        if not isinstance(name, str) or not 0 < len(name) <= 128 or tool.get("type") != "function":
            raise ApiError(400, "a tool is a function with a name", param=where)
        if parameters is not None and not isinstance(parameters, dict):
            raise ApiError(400, "parameters are a JSON schema", param=f"{where}.function")
        found.append(tool)
    return found
