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
from vkmoe.generate.tools.grammar import call_grammar, form_grammar
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
    "call_grammar",
    "family_of",
    "form_grammar",
]
