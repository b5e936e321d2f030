"""This module reads replies in OpenAI's harmony format, which gpt-oss writes.

A reply is messages, each with a header that names a channel, and a recipient if it is a call:

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...
    <|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>

The channel "final" is the answer. Calls are those to functions; all else is a thought, also what
commentary tells before a call.
"""

from __future__ import annotations

import re

from vkmoe.generate.tools.cursor import Cursor, Malformed, Steps
from vkmoe.generate.tools.json_text import read_value

CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
HARMONY_MARKS = (
    "<|start|>",
    CHANNEL,
    "<|constrain|>",
    MESSAGE,
    "<|end|>",
    "<|call|>",
    "<|return|>",
)
_CHANNEL = re.compile(r"<\|channel\|>\s*([^\s<]+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


def read_harmony(cursor: Cursor, has_tools: bool) -> Steps[None]:
    """Read a whole reply; without tools a call is a thought."""
    mark: str | None = None
    # What the template wrote last was the beginning of a header, which the reply may continue.
    if (yield from cursor.one_of((" to=", "to="))) is not None:
        cursor.back(0)
        mark = "<|start|>"
    else:
        _, mark = yield from cursor.until(HARMONY_MARKS, cursor.content)
    while mark is not None:
        mark = yield from _read_message(cursor, mark, has_tools)


def _read_message(cursor: Cursor, mark: str, has_tools: bool) -> Steps[str | None]:
    """Read a message from its first mark on; returns the mark behind it."""
    header = ""
    found: str | None = mark
    while found is not None and found != MESSAGE:
        header = header + found if found in (CHANNEL, "<|constrain|>") else ""
        text, found = yield from cursor.until(HARMONY_MARKS)
        header += text
    if found is None:
        cursor.form()
        return None
    name = _called(header, cursor) if has_tools else None
    if name is not None:
        try:
            return (yield from _read_call(cursor, name))
        except Malformed:
            cursor.refuse()
            _, found = yield from cursor.until(HARMONY_MARKS, cursor.content)
            return found
    cursor.form()
    channel = _CHANNEL.search(header)
    is_answer = channel is None or channel[1] == "final"
    take = cursor.content if is_answer else cursor.thought
    _, found = yield from cursor.until(HARMONY_MARKS, take)
    return found


def _called(header: str, cursor: Cursor) -> str | None:
    """Return the name of the tool that a message calls, if it does."""
    recipient = _RECIPIENT.search(header)
    if recipient is None:
        return None
    name = recipient[1]
    if name.startswith("functions."):
        return name.removeprefix("functions.")
    return name if name in cursor.known else None


def _read_call(cursor: Cursor, name: str) -> Steps[str | None]:
    """Read the arguments of a call and the mark behind them, which is returned."""
    yield from cursor.blanks()
    if (yield from cursor.peek()) != "{":
        raise Malformed
    cursor.begin_call(name)
    yield from read_value(cursor, cursor.argument)
    yield from cursor.blanks()
    place = cursor.place()
    is_closed = (yield from cursor.one_of(HARMONY_MARKS)) is not None
    if not is_closed and (yield from cursor.peek()):
        raise Malformed
    cursor.back(place)  # the mark belongs to what follows
    cursor.end_call()
    return (yield from cursor.one_of(HARMONY_MARKS))
