"""The channels of a reply: what gpt-oss thinks aloud, and what it answers.

Its replies (OpenAI's harmony format) are messages such as
`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`. Replies
of other models are one answer, and such marks in them are text. Does not own which tokens are
marks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["FINAL", "ChannelText", "ReplyChannels"]

FINAL = "final"
_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")
_MARK = re.compile("|".join(map(re.escape, _MARKS)))
_LONGEST = max(map(len, _MARKS))


class ChannelText(NamedTuple):
    """A part of a reply; `channel` is FINAL for what is meant for the user."""

    channel: str
    text: str


class ReplyChannels:
    """Sorts the text of one reply by channel while it arrives.

    The texts joined are the reply without its marks and headers.
    """

    def __init__(self, has_channels: bool) -> None:
        """`has_channels`: the model's vocabulary has the marks."""
        self._has_channels = has_channels
        self._held = ""  # may yet become a mark
        self._header: str | None = None  # of the message to come; None: inside a message
        self._channel = FINAL

    def feed(self, text: str) -> list[ChannelText]:
        """The parts that are certain with this text. Mutates."""
        if not self._has_channels:
            return list(self._plain(text))
        self._held += text
        parts = list(self._sorted())
        n_certain = len(self._held) - self._possible_mark()
        parts += self._plain(self._held[:n_certain])
        self._held = self._held[n_certain:]
        return parts

    def finish(self) -> list[ChannelText]:
        """What is left when the reply is over."""
        held, self._held = self._held, ""
        return list(self._plain(held))

    def _sorted(self) -> Iterator[ChannelText]:
        """All up to the last whole mark."""
        while mark := _MARK.search(self._held):
            yield from self._plain(self._held[: mark.start()])
            self._held = self._held[mark.end() :]
            self._act(mark.group())

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

    def _possible_mark(self) -> int:
        """Length of the longest end of the held text that begins a mark."""
        for n in range(min(len(self._held), _LONGEST - 1), 0, -1):
            if any(mark.startswith(self._held[-n:]) for mark in _MARKS):
                return n
        return 0
