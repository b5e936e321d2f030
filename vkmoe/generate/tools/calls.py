"""This module reads tool calls in the form that a chat template writes them in (forms.py).

Blanks between the parts of a form may differ from the template's: small models write others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vkmoe.generate.tools.cursor import BLANKS, Cursor, Malformed, Steps
from vkmoe.generate.tools.elements import Elements
from vkmoe.generate.tools.forms import (
    ID,
    INDEX,
    KEY,
    NAME,
    SLOT,
    CallForm,
    PairForm,
    mark_of,
    parts,
)
from vkmoe.generate.tools.json_text import (
    Loose,
    in_string,
    json_of,
    read_call,
    read_value,
    unescaped,
)
from vkmoe.generate.tools.schemas import ParameterSchemas

_ID = re.compile(r"[^\s<>\"'\[\]{}]*")
_DIGITS = re.compile(r"[0-9]*")


class CallReader:
    """Reads calls of one form. `schemas` are the tools' parameters by name.

    One of `ends` may end the reply. Without a mark, a call of a tool that is not offered is none.
    """

    def __init__(
        self,
        cursor: Cursor,
        form: CallForm,
        schemas: Mapping[str, Mapping[str, Any]],
        ends: Sequence[str] = (),
    ) -> None:
        self._cursor, self._form, self._schemas, self._ends = cursor, form, schemas, ends
        others = re.escape("".join(sorted(set("".join(schemas)) - set(BLANKS))))
        self._name = re.compile(rf"[\w.:/{others}-]*")
        self._head, *self._rest = SLOT.split(form.open)
        self._is_inside = False  # the first mark of the call was left out
        inner = self._head[self._head.rfind("<") :] if "<" in self._head else ""
        starts = (form.tag + form.before + self._head, form.before + self._head, self._head, inner)
        self.starts = {text: mark for text in starts if (mark := mark_of(text))}

    def read(self, mark: str) -> Steps[None]:
        """Read the calls that begin with `mark`. Raises Malformed for anything else."""
        for text, first in self.starts.items():
            rest = text.lstrip().removeprefix(mark)
            if first == mark and (yield from self._cursor.literal(rest)):
                self._is_inside = bool(self._head) and len(parts(text)) < len(parts(self._head))
                yield from self._read_calls(only_known=not self._form.mark)
                return
        raise Malformed

    def read_bare(self, given: str) -> Steps[None]:
        """Read calls of known tools with which a reply begins, without the mark or what is `given`.

        Raises Malformed for anything else.
        """
        begin = (self._form.before + self._head).removeprefix(given)
        if not (yield from self._cursor.literal(begin)):
            raise Malformed
        yield from self._read_calls(only_known=True)

    def _read_calls(self, only_known: bool) -> Steps[None]:
        cursor, form = self._cursor, self._form
        while True:
            yield from self._call(only_known)
            if not form.mark and not (yield from self._ends_reply()):
                raise Malformed
            cursor.end_call()
            if not (form.before + form.between + form.after).strip():
                return
            if form.after.strip() and (yield from cursor.literal(form.after, may_end=True)):
                cursor.form()
                return
            following = form.between + self._head
            if following.strip():
                if not (yield from cursor.literal(following)):
                    return
            else:
                yield from cursor.blanks()
                if (yield from cursor.peek()) != "{":
                    return

    def _ends_reply(self) -> Steps[bool]:
        """Say whether a call without a mark ends the reply, up to another call."""
        cursor, form = self._cursor, self._form
        texts = (form.between + form.after, *self._ends)
        following = [part for text in texts for part in parts(text)[:1]]
        yield from cursor.blanks()
        place = cursor.place()
        if not (yield from cursor.peek()):
            return True
        found = bool(following) and (yield from cursor.one_of(following)) is not None
        cursor.back(place)
        return found

    def _call(self, only_known: bool) -> Steps[None]:
        form = self._form
        if form.object is not None:
            yield from read_call(self._cursor, form.object, only_known)
            yield from self._close(may_end=True)
            return
        name = yield from self._read_head()
        if only_known and name not in self._cursor.known:
            raise Malformed
        if form.pairs is not None:
            self._cursor.begin_call(name)
            schemas = ParameterSchemas(self._schemas.get(name, {}))
            yield from self._read_pairs(form.pairs, schemas)
        else:
            yield from self._read_object(name)
        yield from self._close(may_end=form.pairs is None)

    def _close(self, may_end: bool) -> Steps[None]:
        """Read what ends a call. A reply may end amid that, and before it if `may_end`."""
        cursor, marks = self._cursor, parts(self._form.close)
        if may_end and marks:
            yield from cursor.blanks()
            if not (yield from cursor.peek()):
                return
        found = yield from cursor.literal(self._form.close, may_end=True)
        if not found and self._is_inside and marks[1:] and not cursor.is_at_cut:
            found = yield from cursor.literal("".join(marks[:-1]))
        if not found:
            raise Malformed

    def _read_head(self) -> Steps[str]:
        """Read all up to the arguments and return the name."""
        cursor, name = self._cursor, ""
        for i, piece in enumerate(self._rest):
            if piece == NAME and not name:
                name = yield from self._read_name(self._rest[i + 1][:1])
            elif piece == NAME:
                if (yield from cursor.one_of((name,))) is None:
                    raise Malformed
            elif piece in (ID, INDEX):
                yield from cursor.run(_DIGITS if piece == INDEX else _ID)
            elif not (yield from cursor.literal(piece, is_tight=True)) and (
                cursor.is_at_cut or self._rest[i + 1 : i + 2] != [ID]  # an id may be left out
            ):
                raise Malformed
        return name

    def _read_name(self, following: str) -> Steps[str]:
        """Read a name, which ends before the character that follows it in the form."""
        cursor = self._cursor
        yield from cursor.blanks()
        place = cursor.place()
        name = yield from cursor.run(self._name)
        if cursor.is_at_cut:
            raise Malformed
        if following and self._name.fullmatch(following) and following in name:
            name = name[: name.rfind(following)]
            cursor.back(place + len(name))
        return name

    def _read_object(self, name: str) -> Steps[None]:
        """Read arguments that are one object."""
        cursor = self._cursor
        yield from cursor.blanks()
        if (yield from cursor.peek()) != "{":
            raise Malformed
        cursor.begin_call(name)
        loose = None if self._form.is_json else Loose(self._form.quotes)
        yield from read_value(cursor, cursor.argument, loose)

    def _read_pairs(self, pairs: PairForm, schemas: ParameterSchemas) -> Steps[None]:
        cursor = self._cursor
        before, seen = "{", set[str]()
        while (yield from self._has_pair(pairs, bool(seen))):
            key, announced = yield from self._read_key(pairs)
            if key in seen:
                raise Malformed
            seen.add(key)
            cursor.argument(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            types = schemas.parameter(key).types
            if "string" in announced or (announced and types == {"string"}):
                types = announced & {"string"} or announced
            yield from self._read_value(pairs, key, types, schemas)
            before = ", "
        cursor.argument("}" if seen else "{}")

    def _has_pair(self, pairs: PairForm, is_next: bool) -> Steps[bool]:
        """Read the beginning of an argument, if one follows."""
        cursor = self._cursor
        first = (pairs.between if is_next else "") + pairs.open
        last = parts(self._form.close)
        place = cursor.place()
        if not first.strip() or "".join(last).startswith("".join(parts(first))):
            last = last if first.strip() else last[:1]
            if (yield from cursor.literal("".join(last))):
                cursor.back(place)
                return False
        found = yield from cursor.literal(first)
        if not found and cursor.is_at_cut:
            raise Malformed
        return found

    def _read_key(self, pairs: PairForm) -> Steps[tuple[str, frozenset[str]]]:
        """Read a key and what stands behind it; returns also the types that this announces."""
        cursor = self._cursor
        firsts = tuple({parts(middle)[0] for middle, _ in pairs.middles})
        key, mark = yield from cursor.until((*firsts, "\n"))
        if mark is None or mark == "\n":
            raise Malformed
        place = cursor.place() - len(mark)
        for middle, types in pairs.middles:
            if cursor.is_at_cut:
                break
            cursor.back(place)
            if (yield from cursor.literal(middle.rstrip(BLANKS))):
                if blanks := middle[len(middle.rstrip(BLANKS)) :]:
                    yield from cursor.one_of((blanks,))
                return key.strip(BLANKS), types
        raise Malformed

    def _read_value(
        self, pairs: PairForm, key: str, types: frozenset[str], schemas: ParameterSchemas
    ) -> Steps[None]:
        """Read a value and give it as JSON; one that can only be a text comes while it arrives."""
        cursor, closed = self._cursor, replace(pairs, close=pairs.close.replace(KEY, key))
        if not pairs.is_raw:
            yield from self._read_quoted(closed)
            return
        if types == {"string"} and pairs.wrap is None:
            cursor.argument('"')
            yield from self._read_text(closed, lambda text: cursor.argument(in_string(text)))
            cursor.argument('"')
            return
        pieces: list[str] = []
        yield from self._read_text(closed, pieces.append)
        text = "".join(pieces)
        first, last = pairs.wrap or ("", "")
        if first and text.startswith(first) and text.endswith(last):
            text, types = text[len(first) : -len(last)], frozenset({"string"})
        if KEY in pairs.close:
            cursor.argument(Elements(pairs, schemas).json(text, schemas.properties.get(key)))
        else:
            cursor.argument(json_of(text, types))

    def _read_quoted(self, pairs: PairForm) -> Steps[None]:
        """Read a value that is a text in quotes, or anything else that is nearly JSON."""
        cursor = self._cursor
        yield from cursor.blanks()
        quote = yield from cursor.peek()
        if quote not in ("'", '"'):
            yield from read_value(cursor, cursor.argument, Loose())
            return
        cursor.skip(1)
        pieces: list[str] = []
        yield from self._read_until((quote,), pairs, pieces.append, pairs.has_escapes)
        text = "".join(pieces)
        plain = unescaped(text) if pairs.has_escapes else text
        cursor.argument(json.dumps(plain, ensure_ascii=False))

    def _read_text(self, pairs: PairForm, take: Callable[[str], None]) -> Steps[None]:
        """Read a value that stands there as it is, up to its end."""
        mark = (parts(pairs.close) or ("\n",))[0]
        blanks = pairs.close[: len(pairs.close) - len(pairs.close.lstrip(BLANKS))]
        ends = (blanks + mark, mark) if blanks and mark != "\n" else (mark,)
        yield from self._read_until(ends, pairs, take)

    def _read_until(
        self,
        ends: tuple[str, ...],
        pairs: PairForm,
        take: Callable[[str], None],
        has_escapes: bool = False,
    ) -> Steps[None]:
        """Read a value up to its end, which is an end only where the call goes on behind it."""
        cursor = self._cursor
        marks = (*ends, "\\") if has_escapes else ends
        while True:
            _, mark = yield from cursor.until(marks, take)
            if mark is None:
                raise Malformed
            if mark == "\\":
                take(mark + (yield from cursor.peek()))
                cursor.skip(bool((yield from cursor.peek())))
                continue
            place = cursor.place()
            rest = "".join(parts(pairs.close)[1:]) if pairs.is_raw else pairs.close
            if (yield from cursor.literal(rest)):
                inside = cursor.place()
                following = (pairs.between + pairs.open, self._form.close)
                for text in following:
                    yield from cursor.blanks()
                    if (yield from cursor.one_of(parts(text)[:1] or ("\n",))) is not None:
                        cursor.back(inside)
                        return
            if cursor.lacks_text:
                raise Malformed
            cursor.back(place)
            take(mark)
