"""This module sorts the text of a reply while it arrives: answer, thoughts and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vkmoe.generate.tools.cursor import Cursor, Malformed, Steps
from vkmoe.generate.tools.events import ReplyEvent, random_call_id
from vkmoe.generate.tools.families import ToolFamily
from vkmoe.generate.tools.harmony import read_harmony
from vkmoe.generate.tools.marked import (
    DEEPSEEK,
    MISTRAL,
    PYTHON_TAG,
    read_deepseek,
    read_llama,
    read_mistral,
)
from vkmoe.generate.tools.tags import read_tags


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
        functions = [function_of(tool) for tool in tools]
        self._schemas = {
            str(function.get("name")): parameters
            for function in functions
            if isinstance(parameters := function.get("parameters") or {}, Mapping)
        }
        self._family = family
        self._marks = family.call_marks if tools else ()
        has_bare_calls = family.name == "llama" or (must_call and family.name == "none")
        self._may_be_bare = bool(tools) and has_bare_calls
        trims = family.name != "harmony" and bool(self._marks or family.thought)
        self._cursor = Cursor(frozenset(self._schemas), streams, trims, make_id)
        self._steps = self._read(in_thought)
        self._is_running, self._drops_blank = True, drops_blank

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
        cursor, family = self._cursor, self._family
        if family.name == "harmony":
            yield from read_harmony(cursor, bool(self._schemas))
            return
        if in_thought or (yield from self._opens_thought()):
            yield from self._read_thought()
        if self._may_be_bare:
            yield from self._read_bare_call()
        while True:
            _, mark = yield from cursor.until(self._marks, cursor.content)
            if mark is None:
                return
            try:
                yield from self._read_calls(mark)
            except Malformed:
                cursor.refuse()

    def _opens_thought(self) -> Steps[bool]:
        """Say whether the reply begins with a thought; elsewhere the mark is plain text."""
        if self._family.thought is None:
            return False
        yield from self._cursor.blanks()
        if (yield from self._cursor.one_of(self._family.thought[:1])) is not None:
            return True
        if self._cursor.lacks_text:
            self._cursor.form()
        self._cursor.back(0)
        return False

    def _read_thought(self) -> Steps[None]:
        """Read a thought up to its end, after which the answer begins."""
        assert self._family.thought is not None
        self._cursor.begin_thought()
        yield from self._cursor.until(self._family.thought[1:], self._cursor.thought)
        self._cursor.form()

    def _read_calls(self, mark: str) -> Steps[None]:
        """Read the calls behind a mark; raises Malformed for anything else."""
        cursor = self._cursor
        if mark == MISTRAL.calls:
            yield from read_mistral(cursor)
        elif mark == DEEPSEEK.calls:
            yield from read_deepseek(cursor)
        elif mark == PYTHON_TAG:
            yield from read_llama(cursor)
        else:
            yield from read_tags(cursor, mark, self._schemas)

    def _read_bare_call(self) -> Steps[None]:
        """Read a call without a mark, with which a reply may begin."""
        cursor = self._cursor
        yield from cursor.blanks()
        if (yield from cursor.peek()) != "{":
            cursor.back(0)
            return
        try:
            yield from read_llama(cursor)
        except Malformed:
            cursor.refuse()


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the function that a tool in the form of OpenAI's API describes."""
    function = tool.get("function", tool)
    return function if isinstance(function, Mapping) else {}
