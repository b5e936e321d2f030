"""This module reads a reply that is still arriving, and collects the events it makes of it.

It owns the text that is not given out yet, which blanks belong to the form and not to the answer,
and what becomes of a call that turns out to be none. It does not own how a call is written: readers
such as those of calls.py are generators that take text from a `Cursor`, and stop at a bare `yield`
until more has arrived.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import TypeVar

from vkmoe.generate.reply import find_mark, possible_length
from vkmoe.generate.tools.events import (
    Content,
    ReplyEvent,
    Thought,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from vkmoe.generate.tools.forms import parts

BLANKS = " \t\n\r"  # as in JSON
_NAME = re.compile(r"[\w.:/-]{1,256}")

Result = TypeVar("Result")
Steps = Generator[None, None, Result]


class Malformed(Exception):
    """Ends the reading of a call that is not written as calls are."""


class _Run:
    """Holds the blanks at the end of a run of text back: they may belong to the mark behind it."""

    def __init__(self, after_mark: bool) -> None:
        self.after_mark = after_mark  # then blanks at its beginning do not belong to it
        self._blanks = ""

    def feed(self, text: str) -> str:
        """Return what is certain with this text. Mutates."""
        text = self._blanks + text
        if self.after_mark:
            text = text.lstrip(BLANKS)
        body = text.rstrip(BLANKS)
        self._blanks = text[len(body) :]
        self.after_mark = self.after_mark and not body
        return body

    def finish(self) -> str:
        """Return the blanks at the end of the reply. Mutates."""
        blanks, self._blanks = self._blanks, ""
        return blanks


class Cursor:
    """Gives a reader the text of one reply, and takes the events from it.

    With `streams`, arguments of calls come out while they arrive; else a call comes out when it is
    whole. `known` are the names of the tools, `trims` drops blanks beside thoughts and calls.
    """

    def __init__(
        self, known: frozenset[str], streams: bool, trims: bool, make_id: Callable[[], str]
    ) -> None:
        self.known = known
        self.events: list[ReplyEvent] = []
        self.is_over = False  # no more text follows
        self.is_cut = False  # and something else than the model ended it
        self._ran_out = False  # a reader wanted more than there is
        self._streams, self._trims, self._make_id = streams, trims, make_id
        self._text = ""
        self._start = 0  # what comes before it was given out
        self._at = 0  # what comes before it was read
        self._answer = _Run(after_mark=False)
        self._thought = _Run(after_mark=True)
        self._n_calls = 0
        self._call: list[ReplyEvent] = []  # events of a call that is not whole yet
        self._in_call = False

    # ----- what the parser does -----

    def add(self, text: str) -> None:
        """Take more text of the reply. Mutates."""
        self._text += text

    def take_events(self) -> list[ReplyEvent]:
        """Return the events since the last call. Mutates."""
        events, self.events = self.events, []
        return _joined(events)

    def close(self) -> None:
        """Give out the blanks at the end of the answer. Mutates."""
        if rest := self._answer.finish():
            self.events.append(Content(rest))

    # ----- what readers ask for -----

    @property
    def lacks_text(self) -> bool:
        """Say whether a reader lacked text that the reply would have had if it had not been cut."""
        return self.is_cut and self._ran_out

    @property
    def is_at_cut(self) -> bool:
        """Say whether all was read of a reply that was cut."""
        return self.is_cut and self._at == len(self._text)

    def peek(self) -> Steps[str]:
        """Return the next character, "" at the end."""
        while self._at == len(self._text):
            if self.is_over:
                self._ran_out = True
                break
            yield
        return self._text[self._at : self._at + 1]

    def skip(self, n_chars: int) -> None:
        """Read `n_chars` that are there."""
        self._at += n_chars

    def some(self, pattern: re.Pattern[str]) -> str:
        """Read what is there already of the characters that `pattern` repeats, at least none."""
        found = pattern.match(self._text, self._at)
        text = found[0] if found else ""
        self._at += len(text)
        return text

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read all characters that follow of those that `pattern` repeats."""
        pieces = []
        while (yield from self.peek()) and (text := self.some(pattern)):
            pieces.append(text)
        return "".join(pieces)

    def blanks(self) -> Steps[None]:
        """Read blanks, if there are some."""
        while (char := (yield from self.peek())) and char in BLANKS:
            self._at += 1

    def one_of(self, texts: Sequence[str]) -> Steps[str | None]:
        """Read the one of `texts` that follows; None, and nothing is read, where none does.

        None of them may begin another. The beginning of one at the end of a reply that was cut is
        read too.
        """
        longest = max(map(len, texts))
        while True:
            ahead = self._text[self._at : self._at + longest]
            for text in texts:
                if ahead.startswith(text):
                    self._at += len(text)
                    return text
            if not any(text.startswith(ahead) for text in texts):
                return None
            if self.is_over:
                self._ran_out = True
                self._at += len(ahead) if self.is_cut else 0
                return None
            yield

    def literal(self, text: str, is_tight: bool = False, may_end: bool = False) -> Steps[bool]:
        """Read a text of a form, however it is spaced; where it does not follow, nothing is read.

        Its beginning at the end of a reply that was cut is read too.
        `is_tight`: no blanks stand before it unless it begins with one. With `may_end` the reply
        may end amid it.
        """
        place = self._at
        for i, part in enumerate(parts(text)):
            if i or not is_tight or text[0] in BLANKS:
                yield from self.blanks()
            if i and may_end and not (yield from self.peek()):
                return True
            if (yield from self.one_of((part,))) is None:
                if not self.is_at_cut:
                    self._at = place
                return False
        return True

    def expect(self, *texts: str) -> Steps[str]:
        """Read blanks and one of `texts`; raises Malformed where none follows."""
        yield from self.blanks()
        found = yield from self.one_of(texts)
        if found is None:
            raise Malformed
        return found

    def until(
        self, marks: Sequence[str], take: Callable[[str], None] | None = None
    ) -> Steps[tuple[str, str | None]]:
        """Read up to a mark and the mark itself; None as the mark is the end of the reply.

        Where the reply was cut, the beginning of a mark at the end is neither text nor mark.
        Returns the text before it, which `take` gets instead while it arrives.
        """
        pieces: list[str] = []
        take = take or pieces.append
        while True:
            found = find_mark(self._text, marks, self._at)
            if found is not None:
                start, end = found
            else:
                end = start = len(self._text)
                if self.is_cut or not self.is_over:
                    end = start = start - possible_length(self._text, marks, self._at)
            text, mark = self._text[self._at : start], self._text[start:end]
            self._at = start
            take(text)  # may let go of all that was read
            self._at += len(mark)
            if mark:
                return "".join(pieces), mark
            if self.is_over:
                if self._at < len(self._text):  # a mark that was cut: blanks before it are its
                    self._answer = _Run(after_mark=True)
                self._ran_out, self._at = True, len(self._text)
                return "".join(pieces), None
            yield

    def place(self) -> int:
        """Return how far was read, for `raw` and `back`; good until text is given out."""
        return self._at

    def back(self, place: int) -> None:
        """Unread what was read since `place`."""
        self._at = place

    def raw(self, place: int) -> str:
        """Return what was read since `place`."""
        return self._text[place : self._at]

    # ----- what readers give out -----

    def content(self, text: str) -> None:
        """Give out a part of the answer; what was read is done with. Mutates."""
        if self._trims:
            text = self._answer.feed(text)
        if text:
            self.events.append(Content(text))
        self.form()

    def thought(self, text: str) -> None:
        """Give out a part of a thought; what was read is done with. Mutates."""
        if self._trims:
            text = self._thought.feed(text)
        if text:
            self.events.append(Thought(text))
        self.form()

    def begin_thought(self) -> None:
        """Let what follows be a thought. Mutates."""
        self._answer, self._thought = _Run(after_mark=True), _Run(after_mark=True)
        self.form()

    def begin_answer(self) -> None:
        """Let what follows be the answer; blanks at its beginning are none. Mutates."""
        self._answer = _Run(after_mark=True)
        self.form()

    def form(self) -> None:
        """Let go of what was read, for instance form: no place in it is good any more. Mutates."""
        self._text = self._text[self._at :]
        self._start = self._at = 0

    def begin_call(self, name: str) -> None:
        """Begin a call, whose arguments follow. Raises Malformed for what is no name. Mutates."""
        if name not in self.known and not _NAME.fullmatch(name):
            raise Malformed
        self._in_call = True
        self._give(ToolCallBegin(self._n_calls, self._make_id(), name))

    def argument(self, text: str) -> None:
        """Give out a part of the arguments. Mutates."""
        if text:
            self._give(ToolCallArguments(self._n_calls, text))

    def end_call(self) -> None:
        """End the call: it is well-formed. Mutates."""
        self._give(ToolCallEnd(self._n_calls))
        self.events += self._call
        self._call, self._in_call = [], False
        self._n_calls += 1
        self._answer = _Run(after_mark=True)
        self.form()

    def refuse(self) -> None:
        """Give what was read of a call that is none as answer, unless it was cut. Mutates.

        What came out of it stays: such a call ends here, and the rest is the answer. No part of a
        call that was cut is.
        """
        if self._in_call and self._streams:
            self.events.append(ToolCallEnd(self._n_calls, is_whole=False))
            self._n_calls += 1
        self._call, self._in_call = [], False
        if self.lacks_text:
            self._at = len(self._text)
            self._answer = _Run(after_mark=True)
            self.form()
        else:
            self.content(self._text[self._start : self._at])

    # ----- inside -----

    def _give(self, event: ReplyEvent) -> None:
        if not self._streams:
            self._call.append(event)
            return
        self.events.append(event)
        self._answer = _Run(after_mark=True)
        self._start = self._at


def _joined(events: list[ReplyEvent]) -> list[ReplyEvent]:
    """Join neighbours that continue each other."""
    joined: list[ReplyEvent] = []
    for _, group in itertools.groupby(events, key=type):
        neighbours = list(group)
        text = "".join(getattr(event, "text", "") for event in neighbours)
        first = neighbours[0]
        if isinstance(first, Content | Thought | ToolCallArguments):
            neighbours = [replace(first, text=text)]  # other calls begin in between
        joined += neighbours
    return joined
