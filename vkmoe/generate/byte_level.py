"""This module turns text into ids by merging a printable spelling of bytes (BPE), and back.

It owns that spelling and the use of the `tokenizers` package for it. It does not own special tokens
or how text is cut into words (special_tokens.py, pretokenizer.py).
"""

from __future__ import annotations

from functools import lru_cache

from tokenizers import Tokenizer as Backend
from tokenizers import models

from vkmoe.errors import ModelFileError, PromptError
from vkmoe.generate.pretokenizer import PreTokenizerSpec
from vkmoe.generate.vocabulary import Vocabulary

__all__ = ["ByteLevelCodec", "byte_alphabet"]


@lru_cache(maxsize=1)
def byte_alphabet() -> dict[str, int]:
    """Return the printable character that stands for each byte in a byte-level vocabulary.

    Printable Latin-1 bytes stand for themselves; the others, in order, for U+0100 upwards.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(0x100 + i): byte for i, byte in enumerate(rest)})
    return table


class ByteLevelCodec:
    """Encodes plain text; raises ModelFileError for merges that do not fit the vocabulary."""

    def __init__(self, vocabulary: Vocabulary, pre: PreTokenizerSpec) -> None:
        try:
            model = models.BPE(
                vocab=vocabulary.ids, merges=vocabulary.merges, ignore_merges=pre.whole_words
            )
        except Exception as error:  # the package raises bare Exception
            raise ModelFileError(
                f"the model file's merges do not fit its vocabulary: {str(error).splitlines()[0]}",
                "the file is damaged or was converted wrongly",
            ) from error
        self._backend = Backend(model)
        self._backend.pre_tokenizer = pre.pre_tokenizer()
        # Bytes without a token of their own: the package would drop them silently.
        self._absent_bytes = frozenset(
            byte for char, byte in byte_alphabet().items() if char not in vocabulary.ids
        )

    def encode(self, text: str, after_special: bool) -> list[int]:
        """Return the token ids of `text`, a piece between special tokens.

        Raises PromptError for bytes the vocabulary cannot spell.
        """
        if self._absent_bytes:
            self._check(text.encode())
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def token_bytes(self, text: str) -> bytes:
        """Return the bytes that a token with this text stands for."""
        table = byte_alphabet()
        return b"".join(
            bytes((table[char],)) if char in table else char.encode("utf-8") for char in text
        )

    def _check(self, raw: bytes) -> None:
        absent = self._absent_bytes.intersection(raw)
        if absent:
            raise PromptError(
                f"the model's vocabulary has no token for byte 0x{min(absent):02x} of the prompt",
                "leave that character out: this model cannot read it",
            )
