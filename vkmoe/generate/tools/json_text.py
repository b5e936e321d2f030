"""This module reads JSON from a reply while it arrives, and calls that are written as JSON.

What it has read is always the beginning of a valid value, so it may be given out at once. Nesting
costs a character of memory a level and no stack.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple

from vkmoe.generate.tools.cursor import BLANKS, Cursor, Malformed, Steps
from vkmoe.generate.tools.events import random_call_id
from vkmoe.generate.tools.forms import ObjectForm
from vkmoe.generate.tools.schemas import kind_of

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # in a string
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?", re.ASCII)
_HEX = re.compile(r"[0-9a-fA-F]")
_CLOSES = {"{": "}", "[": "]"}
_CONSTANTS = ("true", "false", "null")
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}
_BARE_KEY = re.compile(r"[^\s:,'\"{}\[\]<>]*")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_PLAIN_IN = {"'": re.compile(r"[^'\\]*"), '"': re.compile(r'[^"\\]*')}
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0"}
_KEYS = ("arguments", "parameters")  # what models call arguments, whatever the template does
Give = Callable[[str], None]


class Loose(NamedTuple):
    """Allows values that are not quite JSON: Python's constants and texts, keys without quotes.

    `quotes` are marks around texts, which have no escapes then.
    """

    quotes: tuple[str, str] | None = None


class Found(NamedTuple):
    """Holds a value's JSON text, and where the text ends that it was read from."""

    json: str
    end: int


def read_value(cursor: Cursor, give: Give | None = None, loose: Loose | None = None) -> Steps[str]:
    """Read one JSON value and return its text; `give` gets it while it arrives.

    Raises Malformed where it is none. With `loose` what comes out is JSON as well.
    """
    reader = _ValueReader(cursor, give, loose)
    yield from reader.read()
    return "".join(reader.parts)


def json_at(
    text: str, at: int, quotes: tuple[str, str] | None = None, is_strict: bool = False
) -> Found | None:
    """Return the value that begins at this place, None where none does."""
    cursor = Cursor(frozenset(), streams=False, trims=False, make_id=random_call_id)
    cursor.add(text[at:])
    cursor.is_over = True
    reader = _ValueReader(cursor, None, None if is_strict else Loose(quotes))
    try:
        for _ in reader.read():
            pass
    except Malformed:
        return None
    return Found("".join(reader.parts), at + cursor.place())


def is_json(text: str) -> bool:
    """Say whether all of `text` is one JSON value."""
    found = json_at(text, 0, is_strict=True)
    return found is not None and found.end == len(text)


def json_of(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value: what its type says, and a text where it cannot be read so."""
    plain = text.strip(BLANKS)
    plain = _PYTHON_NAMES.get(plain, plain)
    if plain[:1] in ("{", "[") and not is_json(plain):
        found = json_at(plain, 0)
        plain = found.json if found is not None and found.end == len(plain) else plain
    if is_json(plain):
        may_be_text, kind = not types or "string" in types, kind_of(plain)
        if not may_be_text or (kind != "string" and kind in (types or {kind})):
            return plain  # a text in quotes stays one
    return json.dumps(text, ensure_ascii=False)


def in_string(text: str) -> str:
    """Return `text` as it stands in a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def unescaped(text: str) -> str:
    """Return what a text in quotes says, by the escapes of Python, which has those of JSON."""
    plain = _ESCAPE.sub(_unescape, text)
    return plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _unescape(found: re.Match[str]) -> str:
    code = found[1]
    if len(code) > 1:
        return chr(min(int(code[1:], 16), 0x10FFFF))
    return "" if code == "\n" else _LETTERS.get(code, code)


class _ValueReader:
    """Reads one value, and gives out what is certain of it."""

    def __init__(self, cursor: Cursor, give: Give | None, loose: Loose | None) -> None:
        self.parts: list[str] = []
        self._given = cursor.place()
        self._cursor, self._give, self._loose = cursor, give, loose
        self._open: list[str] = []  # what closes the brackets that are open
        self._quotes = ("'", '"') if loose else ('"',)
        if loose and loose.quotes:
            self._quotes = (loose.quotes[0], *self._quotes)

    def read(self) -> Steps[None]:
        """Read it, level by level."""
        cursor, goes_on = self._cursor, True
        while goes_on:
            char = yield from cursor.peek()
            if char in _CLOSES:
                self._open.append(_CLOSES[char])
                self._take()
                yield from self._blanks()
                if (yield from cursor.peek()) != self._open[-1]:
                    yield from self._key_if_object()
                    continue
            elif not (yield from self._text()):
                yield from self._constant()
            goes_on = yield from self._goes_on()

    def _constant(self) -> Steps[None]:
        """Read a number, or the name of a value."""
        place = self._cursor.place()
        text = yield from self._cursor.run(_SCALAR)
        text = _PYTHON_NAMES.get(text, text) if self._loose else text
        if text not in _CONSTANTS and not _NUMBER.fullmatch(text):
            self._cursor.back(place)
            raise Malformed
        self._report(text)

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
            if char != self._open[-1]:
                raise Malformed
            self._take()
            self._open.pop()
        return False

    def _key_if_object(self) -> Steps[None]:
        if self._open[-1] == "}":
            if not (yield from self._text()):
                key = (yield from self._cursor.run(_BARE_KEY)) if self._loose else ""
                if not key or self._cursor.is_at_cut:
                    raise Malformed
                self._report(json.dumps(key, ensure_ascii=False))
            yield from self._blanks()
            if (yield from self._cursor.peek()) != ":":
                raise Malformed
            self._take()
            yield from self._blanks()

    def _text(self) -> Steps[bool]:
        """Read a text in quotes; returns if there is one."""
        quote = yield from self._cursor.one_of(self._quotes)
        if quote is None:
            return False
        if not self._loose:
            self._report()
            yield from self._string()
        elif self._loose.quotes is not None and quote == self._loose.quotes[0]:
            text, mark = yield from self._cursor.until(self._loose.quotes[1:])
            if mark is None:
                raise Malformed
            self._report(json.dumps(text, ensure_ascii=False))
        else:
            yield from self._python_text(quote)
        return True

    def _python_text(self, quote: str) -> Steps[None]:
        plain, pieces = _PLAIN_IN[quote], list[str]()
        while (char := (yield from self._cursor.peek())) != quote:
            if char == "\\":
                self._cursor.skip(1)
                pieces.append(char + (yield from self._cursor.peek()))
                self._cursor.skip(1)
            elif text := self._cursor.some(plain):
                pieces.append(text)
            else:
                raise Malformed
        self._cursor.skip(1)
        self._report(json.dumps(unescaped("".join(pieces)), ensure_ascii=False))

    def _string(self) -> Steps[None]:
        cursor = self._cursor
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

    def _report(self, text: str | None = None) -> None:
        """Give out what was read since the last time, or `text` in its place."""
        found = self._cursor.raw(self._given) if text is None else text
        self._given = self._cursor.place()
        self.parts.append(found)
        if self._give is not None:
            self._give(found)


def read_call(cursor: Cursor, form: ObjectForm, only_known: bool = False) -> Steps[None]:
    """Read a call such as {"name": "add", "arguments": {...}}, all but its end.

    With `only_known` a call of another tool is none. Raises Malformed for anything else.
    """
    if not form.name_key:
        yield from _read_named_object(cursor)
        return
    name = arguments = None  # the arguments are "" where they came out already
    yield from cursor.expect("{")
    while True:
        key = yield from _read_key(cursor)
        if key == form.name_key and name is None:
            name = _text_of((yield from read_value(cursor)))
            if only_known and name not in cursor.known:
                raise Malformed
        elif key in (form.arguments_key, *_KEYS) and arguments is None:
            if name is not None and (yield from cursor.peek()) == "{":
                cursor.begin_call(name)
                yield from read_value(cursor, cursor.argument)
                arguments = ""
            else:
                arguments = object_of((yield from read_value(cursor)))
        elif key in form.others or key in ("id", "type"):
            yield from read_value(cursor)
        else:
            raise Malformed
        if (yield from cursor.expect(",", "}")) == "}":
            break
    if name is None or (only_known and arguments is None):
        raise Malformed
    if arguments != "":
        cursor.begin_call(name)
        cursor.argument(arguments or "{}")


def _read_named_object(cursor: Cursor) -> Steps[None]:
    """Read a call such as {"add": {...}}."""
    yield from cursor.expect("{")
    cursor.begin_call((yield from _read_key(cursor)))
    if (yield from cursor.peek()) != "{":
        raise Malformed
    yield from read_value(cursor, cursor.argument)
    yield from cursor.expect("}")


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


def object_of(value: str) -> str:
    """Return the JSON text of an object, which some models write as a string once more.

    Raises Malformed for another value.
    """
    inner = _text_of(value).strip() if value.startswith('"') else value
    if not inner.startswith("{") or not is_json(inner):
        raise Malformed
    return inner
