"""This module turns the messages and options of a chat into a request, and its reply into events.

The words are those of OpenAI's API, and replies are those that `vkmoe serve` gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from vkmoe.config import SamplingConfig
from vkmoe.errors import PromptError, UsageError
from vkmoe.generate.chat.collected import collected
from vkmoe.generate.chat.conversation import (
    ChatPrompt,
    Conversation,
    ReplyText,
    fault_of_tools,
    goes_on,
    names_of_effort,
    taken_name,
)
from vkmoe.generate.chat.messages import check_messages, given_message
from vkmoe.generate.checks import check_kind, check_names, shortened
from vkmoe.generate.constraint import Constraint
from vkmoe.generate.form import Form
from vkmoe.generate.loop import Generation, Piece, Request
from vkmoe.generate.text.tokenizer import Tokenizer
from vkmoe.generate.tools import ReplyEvent
from vkmoe.llm.options import ChatOptions, Effort, ReplyOptions, TemplateOptions
from vkmoe.llm.results import ChatResult, logprobs_of

if TYPE_CHECKING:
    from vkmoe.llm.llm import LLM

_FORMS = ("response_format", "json_schema", "regex", "grammar", "choice")
_ENDS_OF_PROMPT = ("add_generation_prompt", "continue_final_message")
_SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}  # an example


@dataclass(frozen=True)
class ChatCall:
    """Holds what is asked of a model in a chat."""

    request: Request
    prompt: ChatPrompt
    tokenizer: Tokenizer

    def reader(self, generation: Generation, streams: bool) -> ChatReader:
        """Make what reads the reply; with `streams` calls come out before they are whole."""
        constraint = self.request.constraint
        parser = self.prompt.parser(self.tokenizer, constraint, streams)
        return ChatReader(generation, ReplyText(parser, generation))


class ChatReader:
    """Turns the pieces of one reply into events, and keeps them for the result."""

    def __init__(self, generation: Generation, text: ReplyText) -> None:
        self._generation, self._text = generation, text
        self._pieces: list[Piece] = []
        self._events: list[ReplyEvent] = []

    def feed(self, pieces: Sequence[Piece]) -> list[ReplyEvent]:
        """Return what is certain with these pieces. Mutates."""
        self._pieces += pieces
        events = self._text.feed(pieces)
        self._events += events
        return events

    def finish(self) -> list[ReplyEvent]:
        """Return what is left when the reply is over. Mutates."""
        events = self._text.finish()
        self._events += events
        return events

    def result(self, load_seconds: float) -> ChatResult:
        """Return the whole reply. Must hold: it is finished."""
        found = collected(self._events)
        statistics = self._generation.statistics(load_seconds)
        reason = statistics.finish_reason
        return ChatResult(
            found.content,
            found.thoughts,
            found.calls,
            "tool_calls" if reason == "stop" and found.calls else reason,
            statistics,
            logprobs_of(self._pieces),
        )


def chat_call(
    llm: LLM, messages: object, sampling: SamplingConfig | None, options: ChatOptions
) -> ChatCall:
    """Check a chat, and write it as a request. Raises PromptError, UsageError, VkmoeError."""
    check_names(options, ChatOptions.__optional_keys__)
    conversation = _conversation(messages, options)
    prompt = conversation.prompt(llm.chat_format)
    tokens = llm.tokenizer.encode(prompt.text, prompt.wants_special)
    constraint: Constraint | None = None
    if conversation.has_form:
        constraint = prompt.constraint(llm.constraints)
    own = ChatOptions.__optional_keys__ - ReplyOptions.__optional_keys__
    more: Any = {name: value for name, value in options.items() if name not in own}
    more |= {"constraint": constraint, "shown": prompt.format.family.shown}
    return ChatCall(llm.request(tokens, sampling, **more), prompt, llm.tokenizer)


def template_text(llm: LLM, messages: object, options: TemplateOptions) -> str:
    """Write a chat as the text of a prompt. Raises PromptError, UsageError."""
    check_names(options, TemplateOptions.__optional_keys__)
    return _conversation(messages, options).prompt(llm.chat_format).text


def _conversation(messages: object, options: Mapping[str, Any]) -> Conversation:
    """Check messages and the options that concern their prompt or the reply's form."""
    check_messages(messages)
    assert isinstance(messages, list | tuple)
    if not messages:
        raise PromptError("messages is an empty list", "give one that a reply may follow")
    for message in messages:
        if not isinstance(message.get("content", ""), str | list | None):
            raise PromptError(
                f"the content of a message is {shortened(message['content'])}", "give a text"
            )
    for name in ("parallel_tool_calls", *_ENDS_OF_PROMPT):
        check_kind(name, options.get(name), bool | None, "use True or False")
    given = [given_message(message) for message in messages]
    return Conversation(
        given,
        _names(options),
        _tools(options.get("tools")),
        _tool_choice(options.get("tool_choice")),
        options.get("parallel_tool_calls") is not False,
        _form(options),
        options.get("add_generation_prompt") is not False,
        _continues(given, options),
    )


def _continues(messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> bool:
    """Say whether the reply goes on with the last message."""
    opens, continues = (options.get(name) for name in _ENDS_OF_PROMPT)
    if opens and continues:
        raise UsageError(
            f"{' and '.join(_ENDS_OF_PROMPT)} contradict each other", "leave one of them out"
        )
    if opens is None and continues is None:
        return goes_on(messages)
    return bool(continues)


def _names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return further names for the template."""
    given, effort = options.get("chat_template_kwargs"), options.get("reasoning_effort")
    check_kind("chat_template_kwargs", given, Mapping | None, "give a dict of names")
    check_kind("reasoning_effort", effort, str | None, f"use {' or '.join(get_args(Effort))}")
    names = dict(given or {})
    for name in names:
        check_kind("a name of chat_template_kwargs", name, str, "give a text")
    if taken := taken_name(names):
        raise UsageError(f"chat_template_kwargs must not set {taken!r}", "use another name")
    return names_of_effort(effort) | names


def _tools(tools: object) -> list[dict[str, Any]]:
    check_kind("tools", tools, list | tuple | None, "give a list of tools, as OpenAI's API has it")
    given = list(tools) if isinstance(tools, list | tuple) else []
    if (fault := fault_of_tools(given)) is not None:
        where, message = fault
        raise UsageError(
            f"{where}: {message}", 'it is such as {"type": "function", "function": {"name": "f"}}'
        )
    return given


def _tool_choice(choice: object) -> str:
    """Return one of the words for a choice, or the name of a tool."""
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else choice
    if not isinstance(name, str | None):
        raise UsageError(
            f"tool_choice is {shortened(choice)}", "use auto, none, required or a tool's name"
        )
    return name or "auto"


def _form(options: Mapping[str, Any]) -> Form | None:
    """Return the form of the answer; None: it may have any."""
    found = [name for name in _FORMS if options.get(name) is not None]
    if len(found) > 1:
        raise UsageError(f"{found[0]} and {found[1]} are two forms of one reply", "leave one out")
    if not found:
        return None
    (name,) = found
    value = options[name]
    if name == "response_format":
        return _form_of_format(value)
    if name == "json_schema":
        check_kind(name, value, Mapping | bool, "give a schema as a dict, or True for any JSON")
        return Form("json", value)
    if name == "choice":
        are_texts = isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)
        if not value or not are_texts:
            raise UsageError(f"choice is {shortened(value)}", "give a list of texts")
        return Form("choice", value)
    check_kind(name, value, str, "give a text")
    return Form("regex" if name == "regex" else "grammar", value)


def _form_of_format(value: object) -> Form | None:
    """Read a form as OpenAI's API writes it."""
    given = value if isinstance(value, Mapping) else {}
    kind, schema = given.get("type"), given.get("json_schema")
    if kind == "text":
        return None
    if kind == "json_object":
        return Form("json", given.get("schema") or {"type": "object"})
    if kind == "json_schema" and isinstance(schema, Mapping):
        return Form("json", schema.get("schema", True))
    raise UsageError(f"response_format is {shortened(value)}", f"it is such as {_SCHEMA}")
