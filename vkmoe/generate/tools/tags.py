"""This module reads tool calls between tags, as Qwen's models write them.

    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    <tool_call><function=add><parameter=a>1</parameter></function></tool_call>

The first form is that of Hermes, which many models took over; the second that of Qwen3-Coder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from vkmoe.generate.tools.cursor import BLANKS, Cursor, Malformed, Steps
from vkmoe.generate.tools.json_text import is_json, read_call
from vkmoe.generate.tools.schemas import ParameterSchemas, kind_of

OPEN, CLOSE, FUNCTION = "<tool_call>", "</tool_call>", "<function="
_PARAMETER, _FUNCTION_END = "<parameter=", "</function>"
_VALUE_ENDS = ("\n</parameter>", "</parameter>")
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}  # templates write them


def read_tags(cursor: Cursor, mark: str, schemas: Mapping[str, Mapping[str, Any]]) -> Steps[None]:
    """Read the call behind `mark`, which is OPEN or FUNCTION: some models forget the former.

    `schemas` are the tools' parameters by name. Raises Malformed for anything else.
    """
    form = FUNCTION
    if mark == OPEN:
        yield from cursor.blanks()
        found = yield from cursor.one_of((FUNCTION,))
        form = found or OPEN
    if form == FUNCTION:
        yield from _read_function(cursor, schemas)
    else:
        yield from read_call(cursor, ("arguments", "parameters"))
    yield from cursor.blanks()
    is_closed = (yield from cursor.one_of((CLOSE,))) is not None
    if mark == OPEN and not is_closed and (yield from cursor.peek()):
        raise Malformed
    cursor.end_call()


def _read_function(cursor: Cursor, schemas: Mapping[str, Mapping[str, Any]]) -> Steps[None]:
    name = yield from _read_name(cursor)
    cursor.begin_call(name)
    parameters = ParameterSchemas(schemas.get(name, {}))
    before, seen = "{", set[str]()
    while (yield from cursor.expect(_PARAMETER, _FUNCTION_END)) == _PARAMETER:
        key = yield from _read_name(cursor)
        if key in seen:
            raise Malformed
        seen.add(key)
        cursor.argument(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        yield from _read_parameter(cursor, parameters.parameter(key).types)
        before = ", "
    cursor.argument("}" if seen else "{}")


def _read_name(cursor: Cursor) -> Steps[str]:
    """Read the rest of a tag that names a tool or a parameter."""
    name, end = yield from cursor.until((">", "\n"))
    if end != ">":
        raise Malformed
    return name


def _read_parameter(cursor: Cursor, types: frozenset[str]) -> Steps[None]:
    """Read a value and give it as JSON; one that can only be a text comes while it arrives."""
    yield from cursor.one_of(("\n",))
    if types == {"string"}:
        cursor.argument('"')
        yield from _read_text(cursor, lambda text: cursor.argument(_in_string(text)))
        cursor.argument('"')
    else:
        parts: list[str] = []
        yield from _read_text(cursor, parts.append)
        cursor.argument(_as_json("".join(parts), types))


def _read_text(cursor: Cursor, take: Callable[[str], None]) -> Steps[None]:
    """Read a value up to its end, which is an end only where another tag follows."""
    while True:
        _, mark = yield from cursor.until(_VALUE_ENDS, take)
        if mark is None:
            raise Malformed
        place = cursor.place()
        yield from cursor.blanks()
        if (yield from cursor.one_of((_PARAMETER, _FUNCTION_END))) is not None:
            cursor.back(place)
            return
        if cursor.lacks_text:
            raise Malformed
        cursor.back(place)
        take(mark)


def _in_string(text: str) -> str:
    """Return `text` as it stands in a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_json(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value: what its type says, and a text where it cannot be read so."""
    plain = text.strip(BLANKS)
    plain = _PYTHON_NAMES.get(plain, plain)
    if is_json(plain):
        may_be_text, kind = not types or "string" in types, kind_of(plain)
        if not may_be_text or (kind != "string" and kind in (types or {kind})):
            return plain  # a text in quotes stays one
    return json.dumps(text, ensure_ascii=False)
