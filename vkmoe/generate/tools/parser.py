"""This module sorts the text of a reply while it arrives: answer, thoughts and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vkmoe.generate.tools.calls import CallReader
from vkmoe.generate.tools.cursor import Cursor, Malformed, Steps
from vkmoe.generate.tools.events import ReplyEvent, random_call_id
from vkmoe.generate.tools.families import ToolFamily
from vkmoe.generate.tools.forms import PLAIN_CALL, mark_of
from vkmoe.generate.tools.harmony import read_harmony
from vkmoe.generate.tools.schemas import function_of, mapping


class ReplyParser:
    """Sorts the text of one reply. What comes out joined does not depend on how it was cut.

    What looks like a call and is not written as one is part of the answer, marks and all; what
    there is of a call that was cut is not. Blanks beside thoughts and calls belong to neither, nor
    to the answer.
    """

    def __init__(
        self,
        family: ToolFamily,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        in_thought: bool = False,
        must_call: bool = False,
        streams: bool = False,
        drops_blank: bool = False,
        make_id: Callable[[], str] = random_call_id,
    ) -> None:
        """Begin a reply to a prompt that offered `tools`, as OpenAI's API writes them.

        Without tools nothing is a call. `in_thought`: the template has opened a thought
        (`family.begins_in_thought`). `must_call`: the reply is kept to `reply_grammar`, so that a
        family without calls has one. A call comes out when it is whole. With `streams` it begins to
        come out with its first argument; then one that turns out malformed ends there, and what
        follows is part of the answer. `drops_blank`: one before the first word is no part of it.
        """
        functions = map(function_of, tools)
        self._schemas = {str(f.get("name")): mapping(f.get("parameters")) for f in functions}
        self._is_harmony, self._form = family.is_harmony, family.form
        call = family.form.call or (PLAIN_CALL if must_call else None)
        self._has_form = bool(family.thought or family.form.content[0] or (tools and call))
        trims = self._has_form and not self._is_harmony
        self._cursor = Cursor(frozenset(self._schemas), streams, trims, make_id)
        self._calls: CallReader | None = None
        if tools and call is not None:
            self._calls = CallReader(self._cursor, call, self._schemas, family.form.ends)
        self._may_be_bare = bool(self._calls and call and not call.mark)
        self._marks = tuple(dict.fromkeys(filter(None, map(mark_of, self._literals()))))
        self._steps = self._read(in_thought)
        self._is_running, self._drops_blank = True, drops_blank

    def _literals(self) -> list[str]:
        """List all that is form amid an answer, or after it."""
        starts = self._calls.starts if self._calls is not None else ()
        return [*self._form.content, *self._form.ends, *starts]

    def feed(self, text: str) -> list[ReplyEvent]:
        """Return what is certain with this text. Mutates."""
        self._cursor.add(text.removeprefix(" ") if self._drops_blank else text)
        self._drops_blank = self._drops_blank and not text
        self._run()
        return self._cursor.take_events()

    def finish(self, is_cut: bool = False) -> list[ReplyEvent]:
        """Return what is left when the reply is over. Mutates.

        `is_cut`: something else than the model has ended it, such as a limit of tokens.
        """
        self._cursor.is_over, self._cursor.is_cut = True, is_cut
        self._run()
        self._cursor.close()
        return self._cursor.take_events()

    def _run(self) -> None:
        """Let the reader go on with the text that is there. Mutates."""
        if self._is_running:
            self._is_running = next(self._steps, False) is None

    def _read(self, in_thought: bool) -> Steps[None]:
        cursor = self._cursor
        if self._is_harmony:
            yield from read_harmony(cursor, bool(self._schemas))
            return
        if in_thought:
            yield from self._read_thought()
        if self._has_form:
            yield from self._read_beginning()
        while True:
            _, mark = yield from cursor.until(self._marks, cursor.content)
            if mark is None:
                return
            yield from self._read_form(mark)

    def _read_beginning(self) -> Steps[None]:
        """Read what a reply, or the rest of it behind a thought, begins with.

        Only here and behind calls does a thought begin; elsewhere its mark is plain text. What the
        prompt has of the first mark already may be missing, and a thought may be over at once.
        """
        cursor, form, given = self._cursor, self._form, self._form.given
        first_answer, last = form.content[0], form.thought[1] if form.thought else ""
        while True:
            if (yield from self._opens_thought()):
                yield from self._read_thought()
                continue
            found = False
            for text in (last, first_answer, first_answer.removeprefix(given)):
                found = found or bool(text and (yield from cursor.literal(text)))
            if not found:
                break
            cursor.begin_answer()
        if cursor.lacks_text:
            cursor.form()
        cursor.back(0)
        if self._calls is not None and (given or self._may_be_bare):
            try:
                yield from self._calls.read_bare(given)
            except Malformed:
                cursor.refuse()

    def _ends_turn(self, end: str) -> Steps[bool]:
        """Say whether nothing follows an end, or a turn: calls may stand in their own."""
        header = self._form.header.removeprefix(end)
        yield from self._cursor.blanks()
        if not (yield from self._cursor.peek()):
            return True
        return bool(header) and (yield from self._cursor.literal(header))

    def _opens_thought(self) -> Steps[bool]:
        """Read the mark of a thought, if one begins here, and blanks before it."""
        first = self._form.thought[0] if self._form.thought else ""
        yield from self._cursor.blanks()
        for text in dict.fromkeys((first, first.removeprefix(self._form.given))):
            if text and (yield from self._cursor.literal(text)):
                return True
        return False

    def _read_thought(self) -> Steps[None]:
        """Read a thought up to its end, after which the answer begins."""
        assert self._form.thought is not None
        cursor, last = self._cursor, self._form.thought[1]
        ends = {mark_of(text) or text: text for text in (*self._form.ends, last)}
        cursor.begin_thought()
        while True:
            _, found = yield from cursor.until(tuple(ends), cursor.thought)
            if found is None:
                break
            place = cursor.place()
            is_end = yield from cursor.literal(ends[found].removeprefix(found))
            if is_end and (ends[found] == last or (yield from self._ends_turn(ends[found]))):
                break
            if cursor.is_at_cut:
                break
            cursor.back(place)
            cursor.thought(found)
        cursor.form()

    def _read_form(self, mark: str) -> Steps[None]:
        """Read what begins with a mark: form around an answer, or calls; else it is answer."""
        cursor, place = self._cursor, self._cursor.place()
        for text in self._form.content:
            is_mark = bool(text) and mark_of(text) == mark
            if is_mark and (yield from cursor.literal(text.removeprefix(mark))):
                cursor.begin_answer()
                return
        for text in self._form.ends:
            if mark_of(text) == mark:
                rest = text.removeprefix(mark)
                is_end = not rest or (yield from cursor.literal(rest, may_end=True))
                if is_end and (yield from self._ends_turn(text)):
                    cursor.begin_answer()
                    return
                cursor.back(place)
        if cursor.is_at_cut or self._calls is None or mark not in self._calls.starts.values():
            cursor.refuse()
            return
        try:
            yield from self._calls.read(mark)
        except Malformed:
            cursor.refuse()
            return
        if (yield from self._opens_thought()):
            yield from self._read_thought()
        elif cursor.lacks_text:
            cursor.form()
        else:
            cursor.back(0)
