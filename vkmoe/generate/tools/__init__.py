"""This package turns the text of a reply into an answer, thoughts and tool calls."""

from __future__ import annotations

from vkmoe.generate.tools.events import (
    Content,
    ReplyEvent,
    Thought,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from vkmoe.generate.tools.families import ToolFamily, family_of
from vkmoe.generate.tools.grammar import reply_grammar
from vkmoe.generate.tools.parser import ReplyParser

__all__ = [
    "Content",
    "ReplyEvent",
    "ReplyParser",
    "Thought",
    "ToolCallArguments",
    "ToolCallBegin",
    "ToolCallEnd",
    "ToolFamily",
    "family_of",
    "reply_grammar",
]
