"""This module turns text into ids by merging the best-scored pair (SentencePiece), and back.

It owns how scores become the merges that the `tokenizers` package wants, and the plain twin of that
package for vocabularies with equal scores. It does not own the spelling of blanks and bytes
(characters.py) or special tokens (tokenizer.py). As in llama.cpp, every token can come out of a
merge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import models

from vkmoe.generate.text.characters import BLANK, CharacterCodec
from vkmoe.generate.text.vocabulary import Vocabulary


class SentencePieceCodec(CharacterCodec):
    """Encodes plain text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._ids = vocabulary.ids
        self._byte_ids = vocabulary.byte_ids
        self._costs: list[float] = (-vocabulary.scores).tolist()
        # A merge needs an id for each character of a token: those without get one after the others.
        chars = sorted({char for text in vocabulary.tokens for char in text} - self._ids.keys())
        added = {char: len(self._ids) + i for i, char in enumerate(chars)}
        # The ids for each id of the package: one object for each, not for each token of a text.
        self._spelled = [*((i,) for i in range(len(self._ids))), *map(self._spell, chars)]
        ids = self._ids | added
        pairs = _merges(vocabulary, ids)
        self.has_equal_scores = _have_equal_scores(pairs, vocabulary)
        merges = [] if self.has_equal_scores else pairs
        self._backend = Backend(models.BPE(vocab=ids, merges=merges, byte_fallback=True))

    def encode_piece(self, spelled: str) -> list[int]:
        """Return the token ids of text whose blanks are spelled already, and which is not cut."""
        if self.has_equal_scores:
            return self.encode_plainly(spelled)
        # As a batch: only then does the package let other threads of Python go on.
        found = self._backend.encode_batch_fast([spelled], add_special_tokens=False)[0].ids
        return [i for token in found for i in self._spelled[token]]

    def encode_plainly(self, spelled: str) -> list[int]:
        """Return the token ids of text whose blanks are spelled already, without the package."""
        ids: list[int] = []
        for symbol in _merge_by_score(spelled, self._ids, self._costs):
            token = self._ids.get(symbol)
            ids += self._spell(symbol) if token is None else [token]
        return ids

    def _spell(self, char: str) -> tuple[int, ...]:
        return tuple(self._byte_ids[byte] for byte in char.encode())


def _merges(vocabulary: Vocabulary, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that make a token, the best score first.

    The scores of runs of blanks are equal. The longest comes first: a run then grows from its left
    end, as it does where equal pairs are taken from the left.
    """
    lengths = np.fromiter(map(len, vocabulary.tokens), dtype=np.int64)
    pairs: list[tuple[str, str]] = []
    for i in np.lexsort((-lengths, -vocabulary.scores)).tolist():
        text = vocabulary.tokens[i]
        for split in range(len(text) - 1, 0, -1):
            left, right = text[:split], text[split:]
            if left in ids and right in ids:
                pairs.append((left, right))
    return pairs


def _have_equal_scores(pairs: list[tuple[str, str]], vocabulary: Vocabulary) -> bool:
    """Say whether two tokens that merges make have one score; runs of blanks count as one."""
    score_of = {
        left + right: vocabulary.scores[vocabulary.ids[left + right]] for left, right in pairs
    }
    runs = {text for text in score_of if not text.strip(BLANK)}
    scores = [score for text, score in score_of.items() if text not in runs]
    scores += {score_of[text] for text in runs}
    return len(set(scores)) < len(scores)


def _merge_by_score(text: str, ids: Mapping[str, int], costs: Sequence[float]) -> list[str]:
    """Cut `text` into tokens and single characters; `costs` [tokens] are the scores, negated.

    This is the algorithm of Kudo and Richardson's BPE model (arXiv:1808.06226): the best-scored
    pair of neighbours first, of equal ones the leftmost. The `tokenizers` package is six times
    faster, but takes equal ones in the order of a list.
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
