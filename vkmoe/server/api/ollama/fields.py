"""Describes the bodies of requests for replies in Ollama's API, and what they are in others."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from starlette.requests import Request as HttpRequest

from vkmoe.generate.chat.conversation import Conversation, goes_on, names_of_effort
from vkmoe.generate.chat.messages import given_message
from vkmoe.generate.form import Form
from vkmoe.server.api.begun import checked_tools
from vkmoe.server.errors import ApiError
from vkmoe.server.fields import Body, Many, Number, ReplyFields, Tokens
from vkmoe.server.known_fields import Api

Object = dict[str, Any]
_MOST_TEMPLATE = 1 << 14  # characters
_MOST_SHOWN = 4  # how often a template may show each value, on average
_ACTION = re.compile(r"(?:(?<!\s)\s*\{\{-|\{\{)([^{}]*?)(?:-\}\}\s*|\}\})")


_DURATION = re.compile(r"[+-]?(?:[0-9.]+(?:ns|us|µs|ms|s|m|h))+|[+-]?0")  # Go's form
_STEP = re.compile(r"([0-9.]+)(ns|us|µs|ms|s|m|h)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


class KeptBody(Body):
    """Describes what all requests for a model's work have in common."""

    api: ClassVar[Api] = "ollama"
    model: Annotated[str, Field(min_length=1)]
    keep_alive: Number | str | None = None

    def keep_model(self, request: HttpRequest) -> bool:
        """Set how long the model stays loaded after this request. Return whether it stays at all.

        Raises ApiError for a text that is no duration.
        """
        if self.keep_alive is None:
            return True
        seconds = _seconds(self.keep_alive)
        for hosted in request.state.lent:
            hosted.keep_seconds = math.inf if seconds < 0 else seconds
        return seconds != 0


def _seconds(duration: float | str) -> float:
    """Return a duration in seconds: a number of these, or a text such as 1h30m. Raises ApiError."""
    if not isinstance(duration, str):
        return duration
    try:
        if _DURATION.fullmatch(duration):
            steps = (float(number) * _SECONDS[unit] for number, unit in _STEP.findall(duration))
            return sum(steps) * (-1 if duration.startswith("-") else 1)
    except ValueError:  # a number with two points
        pass
    raise ApiError(400, f"time: invalid duration {duration!r}", param="keep_alive")


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


class Asked(KeptBody):
    """Describes what requests for replies have in common."""

    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: _Options | None = None
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


class ChatFields(Asked):
    """Describes the body of a request for a reply in a conversation."""

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
            continues=prefills and goes_on(messages[-1:]),  # whatever comes before, as in Ollama
        )


class TextFields(Asked):
    """Describes the body of a request for a reply to a prompt."""

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


def rendered(template: str, values: Mapping[str, str]) -> str:
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
