"""This module puts the events of a reply together: what it consists of when it is over."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from vkmoe.generate.tools import (
    Content,
    ReplyEvent,
    Thought,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)


@dataclass(frozen=True)
class ToolCall:
    """Holds a whole call of a tool."""

    id: str  # by which the tool's result names it
    name: str
    arguments: str  # a JSON object

    @property
    def parsed(self) -> dict[str, Any]:
        """Return the arguments as a dict."""
        found: dict[str, Any] = json.loads(self.arguments or "{}")
        return found

    @property
    def given(self) -> dict[str, Any]:
        """Return it in the form of OpenAI's chats."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class Collected(NamedTuple):
    """Holds the parts of a reply."""

    content: str
    thoughts: str
    calls: list[ToolCall]  # without those that were cut off


def collected(events: Iterable[ReplyEvent]) -> Collected:
    """Put all events of one reply together."""
    content, thoughts = [], []
    begun: dict[int, ToolCallBegin] = {}
    arguments: dict[int, list[str]] = {}
    calls: list[ToolCall] = []
    for each in events:
        if isinstance(each, Content):
            content.append(each.text)
        elif isinstance(each, Thought):
            thoughts.append(each.text)
        elif isinstance(each, ToolCallBegin):
            begun[each.index], arguments[each.index] = each, []
        elif isinstance(each, ToolCallArguments):
            arguments[each.index].append(each.text)
        elif isinstance(each, ToolCallEnd) and each.is_whole:
            call = begun[each.index]
            calls.append(ToolCall(call.id, call.name, "".join(arguments[each.index])))
    return Collected("".join(content), "".join(thoughts), calls)
