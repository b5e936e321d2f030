"""This module writes tool calls as texts, for templates that offer tools and write no calls.

It owns the forms of such models: those of LFM2 and of Granite 3, and that of Hermes, which others
name in their instructions. A template that writes calls by itself has its own form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Calls = Sequence[Mapping[str, Any]]  # functions: names and arguments, which are objects


def writer_of(source: str) -> Callable[[Calls], str] | None:
    """Return what writes calls for a template, None for one that says nothing about them."""
    for marks, write in _WRITERS.items():
        if any(mark in source for mark in marks):
            return write
    return None


def _as_keywords(calls: Calls) -> str:
    written = []
    for call in calls:
        arguments = ", ".join(f"{key}={value!r}" for key, value in call["arguments"].items())
        written.append(f"{call['name']}({arguments})")
    return f"<|tool_call_start|>[{', '.join(written)}]<|tool_call_end|>"


def _as_list(calls: Calls) -> str:
    return f"<|tool_call|>[{', '.join(map(_object, calls))}]"


def _as_tags(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{_object(call)}\n</tool_call>" for call in calls)


def _object(call: Mapping[str, Any]) -> str:
    wanted = {"name": call["name"], "arguments": call["arguments"]}
    return json.dumps(wanted, ensure_ascii=False)


_WRITERS: dict[tuple[str, ...], Callable[[Calls], str]] = {
    ("<|tool_list_start|>", "List of tools: ["): _as_keywords,
    ("<|tool_call|>",): _as_list,
    ("<tool_call>",): _as_tags,
}
