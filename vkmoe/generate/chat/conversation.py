"""This module says what a conversation is to a model: its prompt, and what its reply may be.

The form is that of OpenAI's chats. It owns neither how a template is rendered (template.py) nor how
the text of a reply is sorted (../tools).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vkmoe.errors import PromptError
from vkmoe.generate.chat.format import ChatFormat
from vkmoe.generate.chat.messages import RESERVED
from vkmoe.generate.constraint import Constraint, Constraints
from vkmoe.generate.form import Form
from vkmoe.generate.loop import Generation, Piece
from vkmoe.generate.text.tokenizer import Tokenizer
from vkmoe.generate.tools import (
    ReplyEvent,
    ReplyParser,
    Thought,
    reply_grammar,
)

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

    def prompt(self, format: ChatFormat) -> ChatPrompt:
        """Write it as a model's prompt. Raises VkmoeError."""
        opens = self.opens_reply and not self.continues
        messages = [*self.messages[:-1], self._marked_last()] if self.continues else self.messages
        text = format.template.render(
            messages, add_generation_prompt=opens, tools=self.offered or None, **self.names
        )
        if self.continues:
            text, mark, _ = text.rpartition(_MARK)
            if not mark:
                raise _cannot_go_on("the chat template does not show the last message")
        elif opens and self.names.get("enable_thinking") is False:
            text += self._no_thought(format, text)
        return ChatPrompt(self, format, text)

    def _no_thought(self, format: ChatFormat, text: str) -> str:
        """Return what ends a thought before it begins, where a template does not say so itself."""
        thought = format.family.thought
        if thought is None:
            return ""
        if format.family.begins_in_thought(text):
            return thought[1]
        with_thought = format.template.render(
            self.messages,
            tools=self.offered or None,
            **self.names | {"enable_thinking": True},
        )
        return "".join(thought) if text == with_thought else ""

    def _marked_last(self) -> dict[str, Any]:
        """Return the last message with a mark behind its text. Raises PromptError."""
        last = self.messages[-1]
        text = "\n".join(_texts(last["content"]))
        if last["role"] != "assistant" or not text:
            raise _cannot_go_on("the last message is no text of the assistant")
        if last.get("tool_calls"):
            raise _cannot_go_on("the last message ends with a call")
        return {**last, "content": text + _MARK}

    def certain_texts(self) -> Iterator[str]:
        """Yield texts that the prompt has whatever the template is, but for blanks around them.

        Thoughts of the model may be left out.
        """
        for message in self.messages:
            if message["role"] != "assistant":
                yield from _texts(message["content"])

    @property
    def must_call(self) -> bool:
        """Say whether the reply must be a call."""
        return self.tool_choice not in ("none", "auto")

    @property
    def has_form(self) -> bool:
        """Say whether the reply is kept to a form."""
        return self.form is not None or self.must_call

    def demanded(self) -> list[dict[str, Any]]:
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


def _name(tool: Mapping[str, Any]) -> str:
    return str(tool.get("function", {}).get("name"))


@dataclass(frozen=True)
class ChatPrompt:
    """Holds the prompt that a conversation is to one model, and knows how its reply is read."""

    conversation: Conversation
    format: ChatFormat
    text: str

    @property
    def wants_special(self) -> bool:
        """Say whether tokens that begin every text belong before it.

        A model without a template of its own has none that begins the text with them.
        """
        return not self.format.is_own

    @property
    def in_thought(self) -> bool:
        """Say whether it ends inside a thought."""
        return self.format.family.begins_in_thought(self.text)

    def constraint(self, constraints: Constraints) -> Constraint | None:
        """Return what keeps the reply to its form; None: nothing. Raises VkmoeError."""
        asked, family, answer = self.conversation, self.format.family, None
        if asked.must_call:
            tools = asked.demanded()
        elif asked.form is None:
            return None
        else:
            tools = asked.offered if family.has_calls else []
            if not tools and not family.has_thoughts:
                return asked.form.constraint(constraints)
            if tools:  # whose schemas are kept to as far as that can be; the answer's must be
                asked.form.constraint(constraints)
            answer = asked.form.in_lark(constraints, lenient=bool(tools))
        grammar = reply_grammar(
            family,
            partial(constraints.json_in_lark, lenient=bool(tools)),
            tools,
            answer,
            parallel=asked.parallel_calls and asked.tool_choice in ("auto", "required"),
            in_thought=self.in_thought,
        )
        return constraints.lark(grammar)

    def parser(
        self, tokenizer: Tokenizer, constraint: Constraint | None, streams: bool
    ) -> ReplyParser:
        """Make what reads one reply that is kept to `constraint`; see ReplyParser for `streams`."""
        asked = self.conversation
        return ReplyParser(
            self.format.family,
            asked.offered,
            in_thought=self.in_thought,
            must_call=asked.must_call,
            streams=streams,
            # A form knows its own blanks, and a text that goes on may begin with one.
            drops_blank=tokenizer.adds_space and constraint is None and not asked.continues,
        )


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


# ----- what a request says -----


def goes_on(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Say whether a reply goes on with the last message, where nothing else is asked.

    It does with a text of the assistant. Raises PromptError where two of those come last.
    """
    last = messages[-1]
    if [message["role"] for message in messages[-2:]] == ["assistant", "assistant"]:
        raise PromptError("the last two messages are both the assistant's", "join them")
    return last["role"] == "assistant" and bool(last["content"]) and not last.get("tool_calls")


def taken_name(names: Mapping[str, Any]) -> str | None:
    """Return one of these names for the template that it has already; None: it has none."""
    return min(names.keys() & {*RESERVED, "tools"}, default=None)


def names_of_effort(effort: str | None) -> dict[str, Any]:
    """Return names by which templates learn how much a model is to think; none for None."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def fault_of_tools(tools: Sequence[Any]) -> tuple[str, str] | None:
    """Return where tools are not in OpenAI's form and what is wrong there; None: nowhere."""
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        parameters = function.get("parameters") if isinstance(function, dict) else None
        where = f"tools.{index}"
        if not isinstance(name, str) or not 0 < len(name) <= 128 or tool.get("type") != "function":
            return where, "a tool is a function with a name"
        if parameters is not None and not isinstance(parameters, dict):
            return f"{where}.function", "parameters are a JSON schema"
    return None
