"""This module turns token ids into text while they arrive, and ends it at stop strings.

It owns the bytes of an unfinished character and the text that may yet become a stop string.
It does not own why a generation ends otherwise (end tokens, length), nor printing.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from vkmoe.errors import UsageError
from vkmoe.generate.tokenizer import Tokenizer

__all__ = ["StopMatcher", "StreamDetokenizer"]


class StreamDetokenizer:
    """Turns ids into text, one at a time.

    The pieces of `feed` and `finish` joined are exactly what decoding all ids at once gives, but
    for the blank before the first word of a SentencePiece model: it stays unless `at_start`, as
    generated text goes on from a prompt. The replacement character appears for bytes that can
    never become UTF-8, and at the very end.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_control: bool = True, at_start: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.control_ids if skip_control else frozenset()
        self._after_special = at_start
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        """Return the text that is certain after this token, often none. Mutates."""
        if token_id >= self._tokenizer.n_vocab:
            return ""  # models may have more rows than their vocabulary has tokens
        after_special, tokenizer = self._after_special, self._tokenizer
        self._after_special = token_id in tokenizer.special_ids
        if token_id in self._skip:
            return ""
        return self._decoder.decode(tokenizer.piece(token_id, after_special))

    def finish(self) -> str:
        """Return what is left: a replacement character if the last character is incomplete."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Ends a text at the first stop string, and never lets a part of one through.

    What comes out does not depend on how the text was cut into pieces: the stop string that is
    complete first wins, the longest of those that end at the same character.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if any(not stop for stop in stops):
            raise UsageError("a stop string is empty", "leave the option out for no stop string")
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """Return text that is certainly before any stop string. Mutates; nothing follows a stop."""
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        self._held += text
        start = self._match_start()
        if start is not None:
            self.stopped = True
            certain, self._held = self._held[:start], ""
            return certain
        n_certain = len(self._held) - self._possible_prefix_length()
        certain, self._held = self._held[:n_certain], self._held[n_certain:]
        return certain

    def finish(self) -> str:
        """Return the held text, once nothing can follow that would complete a stop string."""
        held, self._held = self._held, ""
        return held

    def _match_start(self) -> int | None:
        found = [(self._held.find(stop), stop) for stop in self._stops]
        ends = [(start + len(stop), start) for start, stop in found if start >= 0]
        return min(ends)[1] if ends else None

    def _possible_prefix_length(self) -> int:
        """Return the length of the longest end of the held text that begins a stop string."""
        longest = min(len(self._held), max(map(len, self._stops)) - 1)
        for n in range(longest, 0, -1):
            if any(stop.startswith(self._held[-n:]) for stop in self._stops):
                return n
        return 0
