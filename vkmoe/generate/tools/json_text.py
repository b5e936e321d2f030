"""This module reads JSON from a reply while it arrives, and calls that are written as JSON.

What it has read is always the beginning of a valid value, so it may be given out at once. Nesting
costs a character of memory a level and no stack.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from vkmoe.generate.tools.cursor import Cursor, Malformed, Steps
from vkmoe.generate.tools.events import random_call_id

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # in a string
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?", re.ASCII)
_HEX = re.compile(r"[0-9a-fA-F]")
_CLOSES = {"{": "}", "[": "]"}
Give = Callable[[str], None]


def _ignore(text: str) -> None:
    """Give out nothing."""


def read_value(cursor: Cursor, give: Give = _ignore) -> Steps[str]:
    """Read one JSON value and return its text; `give` gets it while it arrives.

    Raises Malformed where it is none.
    """
    reader = _ValueReader(cursor, give)
    yield from reader.read()
    return cursor.raw(reader.begin)


class _ValueReader:
    """Reads one value, and gives out what is certain of it."""

    def __init__(self, cursor: Cursor, give: Give) -> None:
        self.begin = self._given = cursor.place()
        self._cursor, self._give = cursor, give
        self._open: list[str] = []  # brackets that are not closed yet

    def read(self) -> Steps[None]:
        """Read it, level by level."""
        cursor = self._cursor
        while True:
            opened = yield from self._value()
            if opened:
                char = yield from cursor.peek()
                if char == _CLOSES[self._open[-1]]:
                    self._take()
                    self._open.pop()
                else:
                    yield from self._key_if_object()
                    continue
            if not (yield from self._goes_on()):
                return

    def _value(self) -> Steps[bool]:
        """Read a scalar, or the bracket that opens something else; returns if it did that."""
        cursor = self._cursor
        char = yield from cursor.peek()
        if char and char in _CLOSES:
            self._open.append(char)
            self._take()
            yield from self._blanks()
            return True
        if char == '"':
            yield from self._string()
        else:
            place = cursor.place()
            text = yield from cursor.run(_SCALAR)
            if text not in ("true", "false", "null") and not _NUMBER.fullmatch(text):
                cursor.back(place)
                raise Malformed
            self._report()
        return False

    def _goes_on(self) -> Steps[bool]:
        """Read what follows a value up to the next one; returns whether there is one."""
        while self._open:
            yield from self._blanks()
            char = yield from self._cursor.peek()
            if char == ",":
                self._take()
                yield from self._blanks()
                yield from self._key_if_object()
                return True
            if char != _CLOSES[self._open[-1]]:
                raise Malformed
            self._take()
            self._open.pop()
        return False

    def _key_if_object(self) -> Steps[None]:
        if self._open[-1] == "{":
            if (yield from self._cursor.peek()) != '"':
                raise Malformed
            yield from self._string()
            yield from self._blanks()
            if (yield from self._cursor.peek()) != ":":
                raise Malformed
            self._take()
            yield from self._blanks()

    def _string(self) -> Steps[None]:
        cursor = self._cursor
        self._take()
        while (char := (yield from cursor.peek())) != '"':
            if char == "\\":
                yield from self._escape()
            elif not cursor.some(_PLAIN):
                raise Malformed
            self._report()
        self._take()

    def _escape(self) -> Steps[None]:
        cursor, place = self._cursor, self._cursor.place()
        cursor.skip(1)
        char = yield from cursor.peek()
        is_valid = char != "" and char in '"\\/bfnrtu'
        if is_valid:
            cursor.skip(1)
        for _ in range(4 if char == "u" else 0):
            is_valid = is_valid and bool(_HEX.match((yield from cursor.peek())))
            cursor.skip(is_valid)
        if not is_valid:
            cursor.back(place)
            raise Malformed

    def _blanks(self) -> Steps[None]:
        yield from self._cursor.blanks()
        self._report()

    def _take(self) -> None:
        self._cursor.skip(1)
        self._report()

    def _report(self) -> None:
        self._give(self._cursor.raw(self._given))
        self._given = self._cursor.place()


def read_call(cursor: Cursor, keys: Sequence[str], only_known: bool = False) -> Steps[None]:
    """Read a call such as {"name": "add", "arguments": {...}}, all but its end.

    `keys` are the names that arguments may have; with `only_known` a call of another tool is none.
    Raises Malformed for anything else.
    """
    name = arguments = None
    is_given = False
    yield from cursor.expect("{")
    while True:
        key = yield from _read_key(cursor)
        if key == "name" and name is None:
            name = _text_of((yield from read_value(cursor)))
            if only_known and name not in cursor.known:
                raise Malformed
        elif key in keys and arguments is None and not is_given:
            if name is not None and (yield from cursor.peek()) == "{":
                cursor.begin_call(name)
                yield from read_value(cursor, cursor.argument)
                is_given = True
            else:
                arguments = _object_of((yield from read_value(cursor)))
        elif key in ("id", "type"):
            yield from read_value(cursor)
        else:
            raise Malformed
        if (yield from cursor.expect(",", "}")) == "}":
            break
    if name is None or (only_known and arguments is None and not is_given):
        raise Malformed
    if not is_given:
        cursor.begin_call(name)
        cursor.argument(arguments or "{}")


def _read_key(cursor: Cursor) -> Steps[str]:
    """Read a key of an object, the colon and the blanks behind it."""
    yield from cursor.blanks()
    key = _text_of((yield from read_value(cursor)))
    yield from cursor.expect(":")
    yield from cursor.blanks()
    return key


def _text_of(value: str) -> str:
    """Return the text of a JSON string; raises Malformed for another value."""
    if not value.startswith('"'):
        raise Malformed
    return str(json.loads(value))


def _object_of(value: str) -> str:
    """Return the JSON text of an object, which some models write as a string once more.

    Raises Malformed for another value.
    """
    inner = _text_of(value).strip() if value.startswith('"') else value
    if not inner.startswith("{") or not is_json(inner):
        raise Malformed
    return inner


def is_json(text: str) -> bool:
    """Say whether all of `text` is one JSON value."""
    cursor = Cursor(frozenset(), streams=False, trims=False, make_id=random_call_id)
    cursor.add(text)
    cursor.is_over = True
    try:
        for _ in read_value(cursor):
            pass
    except Malformed:
        return False
    return cursor.raw(0) == text
