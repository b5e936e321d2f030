"""This module finds marks in a text while it arrives: stop strings, and what surrounds tool calls.

It owns the text that may yet become a mark. It owns neither what marks mean (tools/) nor characters
that are not finished yet (tokenizer.py).
"""

from __future__ import annotations

from collections.abc import Sequence


def find_mark(text: str, marks: Sequence[str], start: int = 0) -> tuple[int, int] | None:
    """Return where a mark begins and ends in `text` from `start` on, or None without one.

    It is the mark that is complete first, the longest of those that end at the same character.
    """
    starts = [(text.find(mark, start), mark) for mark in marks]
    ends = [(found + len(mark), found) for found, mark in starts if found >= 0]
    if not ends:
        return None
    end, begin = min(ends)
    return begin, end


def possible_length(text: str, marks: Sequence[str], start: int = 0) -> int:
    """Return the length of the longest end of `text` from `start` on that begins a mark."""
    longest = max(map(len, marks), default=1) - 1
    for n in range(min(len(text) - start, longest), 0, -1):
        if any(mark.startswith(text[-n:]) for mark in marks):
            return n
    return 0


class MarkFinder:
    """Finds marks in a text that comes in pieces, and never lets a part of one through.

    What comes out does not depend on how the text was cut into pieces (`find_mark`).
    """

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = tuple(marks)
        self._held = ""  # may yet become a mark

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return text that is certainly before any mark, and the mark if it is whole. Mutates.

        Call it again with no text after a mark: what follows may have another.
        """
        held = self._held + text
        if (found := find_mark(held, self._marks)) is not None:
            start, end = found
            self._held = held[end:]
            return held[:start], held[start:end]
        n_certain = len(held) - possible_length(held, self._marks)
        self._held = held[n_certain:]
        return held[:n_certain], None

    def finish(self) -> str:
        """Return the held text, once nothing can follow that would complete a mark."""
        held, self._held = self._held, ""
        return held
