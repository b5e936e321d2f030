"""What the tests of replies share: families, tools, and what becomes of a reply cut into pieces."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from vkmoe.generate.tools import (
    Content,
    ReplyEvent,
    ReplyParser,
    Thought,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    ToolFamily,
)
from vkmoe.generate.tools.families import FamilyName


def tool(name: str, required: Sequence[str] = (), **properties: Any) -> dict[str, Any]:
    """A tool as OpenAI's API has it."""
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {
        "type": "function",
        "function": {"name": name, "description": "", "parameters": schema},
    }


ADD = tool("add", a={"type": "number"}, b={"type": "number"}, note={"type": "string"})
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [ADD, NOW]
THINK = ("<think>", "</think>")
FAMILIES: dict[FamilyName, ToolFamily] = {
    "hermes": ToolFamily("hermes", THINK),
    "qwen-coder": ToolFamily("qwen-coder", THINK),
    "harmony": ToolFamily("harmony"),
    "mistral": ToolFamily("mistral"),
    "mistral-args": ToolFamily("mistral-args", ("[THINK]", "[/THINK]")),
    "deepseek-v3": ToolFamily("deepseek-v3", THINK),
    "deepseek-v3.1": ToolFamily("deepseek-v3.1", THINK),
    "llama": ToolFamily("llama"),
    "none": ToolFamily("none"),
}


class Call(NamedTuple):
    """A whole call."""

    id: str
    name: str
    arguments: str
    has_ended: bool


class Reply(NamedTuple):
    """A reply, joined."""

    content: str
    thought: str
    calls: list[Call]


def events_of(
    pieces: Iterable[str], family: ToolFamily, is_cut: bool = False, **options: Any
) -> list[ReplyEvent]:
    """The events of a reply that comes in `pieces`; ids count."""
    ids = itertools.count()
    options = {"tools": TOOLS, **options}
    parser = ReplyParser(family, **options, make_id=lambda: f"id{next(ids)}")
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + parser.finish(is_cut)


def joined(events: Iterable[ReplyEvent]) -> Reply:
    """The reply that events make; calls must begin, go on and end in order."""
    content = thought = ""
    calls: list[Call] = []
    for event in events:
        match event:
            case Content(text):
                content += text
            case Thought(text):
                thought += text
            case ToolCallBegin(index, call_id, name):
                assert index == len(calls)
                assert not calls or calls[-1].has_ended
                calls.append(Call(call_id, name, "", False))
            case ToolCallArguments(index, text):
                assert index == len(calls) - 1 and not calls[-1].has_ended
                calls[-1] = calls[-1]._replace(arguments=calls[-1].arguments + text)
            case ToolCallEnd(index):
                assert index == len(calls) - 1 and not calls[-1].has_ended
                calls[-1] = calls[-1]._replace(has_ended=True)
    assert all(call.has_ended for call in calls)
    return Reply(content, thought, calls)


def in_pieces(text: str, cuts: Iterable[int]) -> list[str]:
    """`text`, cut at these places modulo its length."""
    places = sorted({cut % (len(text) + 1) for cut in cuts})
    return [text[i:j] for i, j in itertools.pairwise([0, *places, len(text)])]
