"""This module names the messages and tools of a chat, in the form of OpenAI's API, as types.

Plain dicts will do; the types let a type checker find wrong keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict


class TextPart(TypedDict):
    """Describes a part of a message's content."""

    type: Literal["text"]
    text: str


class CalledFunction(TypedDict):
    """Describes what a call calls; the arguments are a JSON object as a text."""

    name: str
    arguments: str


class MadeCall(TypedDict):
    """Describes a call of an earlier turn."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class SystemMessage(TypedDict):
    """Describes what the model is to hold to in the whole chat."""

    role: Literal["system", "developer"]
    content: str | list[TextPart]


class UserMessage(TypedDict):
    """Describes what the user says."""

    role: Literal["user"]
    content: str | list[TextPart]
    name: NotRequired[str]


class AssistantMessage(TypedDict):
    """Describes an earlier reply."""

    role: Literal["assistant"]
    content: NotRequired[str | list[TextPart] | None]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[MadeCall]]


class ToolMessage(TypedDict):
    """Describes the result of a call."""

    role: Literal["tool"]
    content: str | list[TextPart]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


class Function(TypedDict):
    """Describes a function to the model; `parameters` are a JSON schema of an object."""

    name: str
    description: NotRequired[str]
    parameters: NotRequired[dict[str, Any]]


class Tool(TypedDict):
    """Describes a tool that the model may call."""

    type: Literal["function"]
    function: Function


ChatMessage = SystemMessage | UserMessage | AssistantMessage | ToolMessage
Messages = Sequence[ChatMessage] | Sequence[Mapping[str, Any]]
