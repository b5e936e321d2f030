"""This module turns text into ids by merging the best-scored pair (SentencePiece), and back.

It owns the merging, the spelling of blanks, and bytes for characters without a token. It does not
own special tokens (tokenizer.py). As in llama.cpp, every token can come out of a merge, and text is
not normalised.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import pairwise

from vkmoe.generate.text.pieces import pieces
from vkmoe.generate.text.vocabulary import Vocabulary

_BLANK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_N_KEPT, _LONGEST_KEPT = 1 << 14, 64  # words whose ids are known, and their characters


class SentencePieceCodec:
    """Encodes plain text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._adds_space = vocabulary.adds_space
        self._ids = vocabulary.ids
        self._byte_ids = vocabulary.byte_ids
        self._costs: list[float] = (-vocabulary.scores).tolist()
        # Neighbours within tokens: two characters that are never such are never merged.
        self._pairs = {pair for text in vocabulary.tokens for pair in map("".join, pairwise(text))}
        joined = "".join({pair[0] for pair in self._pairs if pair[1] == _BLANK} | {_BLANK})
        self._between_words = re.compile(f"(?<=[^{re.escape(joined)}])(?={_BLANK})")
        self._known_word = lru_cache(_N_KEPT)(lambda word: tuple(self.encode_piece(word)))

    def encode(self, text: str, after_special: bool) -> list[int]:
        """Return the token ids of `text`, a piece between special tokens or at the start.

        Raises PromptError for text that can be cut nowhere.
        """
        prefix = _BLANK if after_special and self._adds_space else ""
        spelled = prefix + text.replace(" ", _BLANK)
        return [
            i
            for piece in pieces(spelled, self.find_cut)
            for word in self._between_words.split(piece)
            for i in self._encode_word(word)
        ]

    def _encode_word(self, word: str) -> Sequence[int]:
        """Return the token ids of a word, of which a text has many again and again."""
        return self._known_word(word) if len(word) <= _LONGEST_KEPT else self.encode_piece(word)

    def encode_piece(self, spelled: str) -> list[int]:
        """Return the token ids of text whose blanks are spelled already, and which is not cut."""
        return [
            token
            for symbol in _merge_by_score(spelled, self._ids, self._costs)
            for token in self._tokens_of(symbol)
        ]

    def _tokens_of(self, symbol: str) -> Sequence[int]:
        """Return a token, or those of the bytes of a character without one."""
        token = self._ids.get(symbol)
        return [self._byte_ids[byte] for byte in symbol.encode()] if token is None else (token,)

    def find_cut(self, text: str, first: int, last: int) -> int | None:
        """Return the first place where no token can lie across; None: there is none."""
        return next((i for i in range(first, last) if text[i - 1 : i + 1] not in self._pairs), None)

    def token_bytes(self, text: str) -> bytes:
        """Return the bytes that a token with this text stands for."""
        byte = _BYTE_TOKEN.fullmatch(text)
        return bytes.fromhex(byte[1]) if byte else text.replace(_BLANK, " ").encode()


def _merge_by_score(text: str, ids: Mapping[str, int], costs: Sequence[float]) -> list[str]:
    """Cut `text` into tokens and single characters; `costs` [tokens] are the scores, negated.

    This is the algorithm of Kudo and Richardson's BPE model (arXiv:1808.06226): the best-scored
    pair of neighbours first, of equal ones the leftmost. The `tokenizers` package takes equal ones
    in the order of a list, and 0.3 seconds to read the merges of 32,000 tokens.
    """
    n = len(text)
    ends = list(range(1, n + 1))  # where the symbol that starts here ends, 0 if none starts here
    before = list(range(-1, n - 1))  # where the symbol before it starts
    queue = [
        (costs[token], start, start + 2)
        for start in range(n - 1)
        if (token := ids.get(text[start : start + 2])) is not None
    ]
    heapify(queue)
    while queue:
        _, start, end = heappop(queue)
        middle = ends[start]
        if not 0 < middle < n or ends[middle] != end:
            continue  # one of the two has been merged since
        ends[start], ends[middle] = end, 0
        neighbours = []
        if end < n:
            before[end] = start
            neighbours.append((start, ends[end]))
        if before[start] >= 0:
            neighbours.append((before[start], end))
        for first, last in neighbours:
            token = ids.get(text[first:last])
            if token is not None:
                heappush(queue, (costs[token], first, last))
    symbols, start = [], 0
    while start < n:
        symbols.append(text[start : ends[start]])
        start = ends[start]
    return symbols
