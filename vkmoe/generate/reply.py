"""This module finds marks in a reply while it arrives: stop strings, and the channels of gpt-oss.

It owns the text that may yet become a mark, and what the marks of OpenAI's harmony format mean,
which tell what a model thinks aloud from what it answers: a reply is messages such as
`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`.
It does not own characters that are not finished yet (tokenizer.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = ["FINAL", "ChannelText", "MarkFinder", "ReplyChannels"]

FINAL = "final"
_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")


class MarkFinder:
    """Finds marks in a text that comes in pieces, and never lets a part of one through.

    What comes out does not depend on how the text was cut into pieces: the mark that is complete
    first is found, the longest of those that end at the same character.
    """

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = tuple(marks)
        self._held = ""  # may yet become a mark

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return text that is certainly before any mark, and the mark if it is whole. Mutates.

        Call it again with no text after a mark: what follows may have another.
        """
        held = self._held + text
        starts = [(held.find(mark), mark) for mark in self._marks]
        ends = [(start + len(mark), start) for start, mark in starts if start >= 0]
        if ends:
            end, start = min(ends)
            self._held = held[end:]
            return held[:start], held[start:end]
        n_certain = len(held) - self._possible_length(held)
        self._held = held[n_certain:]
        return held[:n_certain], None

    def finish(self) -> str:
        """Return the held text, once nothing can follow that would complete a mark."""
        held, self._held = self._held, ""
        return held

    def _possible_length(self, held: str) -> int:
        """Return the length of the longest end of the held text that begins a mark."""
        longest = max(map(len, self._marks), default=1) - 1
        for n in range(min(len(held), longest), 0, -1):
            if any(mark.startswith(held[-n:]) for mark in self._marks):
                return n
        return 0


class ChannelText(NamedTuple):
    """Holds a part of a reply; `channel` is FINAL for what is meant for the user."""

    channel: str
    text: str


class ReplyChannels:
    """Sorts the text of one reply by channel while it arrives.

    The texts joined are the reply without its marks and headers. Replies of models without such
    marks are one answer.
    """

    def __init__(self, has_channels: bool) -> None:
        """Begin a reply; `has_channels`: the model's vocabulary has the marks."""
        self._marks = MarkFinder(_MARKS if has_channels else ())
        self._header: str | None = None  # of the message to come; None: inside a message
        self._channel = FINAL

    def feed(self, text: str) -> list[ChannelText]:
        """Return the parts that are certain with this text. Mutates."""
        certain, mark = self._marks.feed(text)
        parts = list(self._plain(certain))
        while mark is not None:
            self._act(mark)
            certain, mark = self._marks.feed("")
            parts += self._plain(certain)
        return parts

    def finish(self) -> list[ChannelText]:
        """Return what is left when the reply is over."""
        return list(self._plain(self._marks.finish()))

    def _act(self, mark: str) -> None:
        if mark == "<|message|>":
            words = (self._header or "").split()
            self._channel, self._header = words[0] if words else FINAL, None
        elif mark == "<|constrain|>":  # the rest of the header says what form a message has
            self._header = f"{self._header or ''} "
        else:
            self._header = ""

    def _plain(self, text: str) -> Iterator[ChannelText]:
        if self._header is not None:
            self._header += text
        elif text:
            yield ChannelText(self._channel, text)
