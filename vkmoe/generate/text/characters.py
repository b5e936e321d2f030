"""This module holds what vocabularies share whose tokens are spelled in characters, not in bytes.

It owns the spelling of blanks, the tokens of single bytes, where texts of such vocabularies may be
cut, and the merging of pairs (BPE) as Gemma 4 and Sarvam want it. It does not own merging by scores
(sentencepiece.py) or special tokens (tokenizer.py). As in llama.cpp, text is not normalised.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from itertools import pairwise

from tokenizers import Tokenizer as Backend
from tokenizers import models

from vkmoe.generate.text.byte_level import PreTokenizerSpec
from vkmoe.generate.text.pieces import pieces
from vkmoe.generate.text.vocabulary import Vocabulary

BLANK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class CharacterCodec(ABC):
    """Encodes plain text whose blanks are spelled as U+2581.

    A character without a token becomes the tokens of its bytes.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._adds_space = vocabulary.adds_space
        # Neighbours within tokens: two characters that are never such are never merged.
        self._pairs = {pair for text in vocabulary.tokens for pair in map("".join, pairwise(text))}

    def encode(self, text: str, after_special: bool) -> list[int]:
        """Return the token ids of `text`, a piece between special tokens or at the start.

        Raises PromptError for text that can be cut nowhere.
        """
        prefix = BLANK if after_special and self._adds_space else ""
        spelled = prefix + text.replace(" ", BLANK)
        return [i for piece in pieces(spelled, self.find_cut) for i in self.encode_piece(piece)]

    @abstractmethod
    def encode_piece(self, spelled: str) -> list[int]:
        """Return the token ids of text whose blanks are spelled already, and which is not cut."""

    def find_cut(self, text: str, first: int, last: int) -> int | None:
        """Return the first place where no token can lie across; None: there is none."""
        return next((i for i in range(first, last) if text[i - 1 : i + 1] not in self._pairs), None)

    def token_bytes(self, text: str) -> bytes:
        """Return the bytes that a token with this text stands for."""
        byte = _BYTE_TOKEN.fullmatch(text)
        return bytes.fromhex(byte[1]) if byte else text.replace(BLANK, " ").encode()


class CharacterBpeCodec(CharacterCodec):
    """Merges pairs in the order of a list, in the lines and the runs of line ends of a text."""

    def __init__(self, vocabulary: Vocabulary, pre: PreTokenizerSpec) -> None:
        super().__init__(vocabulary)
        # Line ends and others are never merged, even if there is a token of both.
        self._pairs = {pair for pair in self._pairs if "\n" not in pair or pair == "\n\n"}
        ids = vocabulary.ids
        self._backend = Backend(
            models.BPE(vocab=ids, merges=vocabulary.merges, byte_fallback=True, fuse_unk=False)
        )
        self._backend.pre_tokenizer = pre.pre_tokenizer()
        runs = {text: i for text, i in ids.items() if not text.strip("\n")}
        self._whole = runs if pre.whole_line_ends else {}
        self._numbers = tuple(range(len(ids)))  # one object for each id, not for each token

    def encode_piece(self, spelled: str) -> list[int]:
        """Return the token ids of text whose blanks are spelled already, and which is not cut."""
        parts = re.split(r"(\n+)", spelled) if self._whole else [spelled]
        # As a batch: only then does the package let other threads of Python go on.
        found = self._backend.encode_batch_fast(parts, add_special_tokens=False)
        ids: list[int] = []
        for part, encoded in zip(parts, found, strict=True):
            whole = self._whole.get(part)
            ids += [self._numbers[i] for i in encoded.ids] if whole is None else [whole]
        return ids
