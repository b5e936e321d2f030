"""This module names what a reply consists of: answer, thoughts and tool calls, in order."""

from __future__ import annotations

import secrets
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Holds a part of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Holds a part of what the model thinks aloud."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """Begins a call of the tool `name`; `index` counts the calls of a reply from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """Holds a part of a call's arguments; the parts joined are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """Ends a call: no more arguments follow; `is_whole`: they are a JSON object."""

    index: int
    is_whole: bool = True


ReplyEvent = Content | Thought | ToolCallBegin | ToolCallArguments | ToolCallEnd


def random_call_id() -> str:
    """Return an id for a call that no other has."""
    return f"call_{secrets.token_hex(12)}"
