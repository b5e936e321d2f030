"""This module turns text into ids by merging a printable spelling of bytes (BPE), and back.

It owns that spelling, the use of the `tokenizers` package for it, and how bytes that are no UTF-8
are read for it. It does not own special tokens or how text is cut into words (special_tokens.py,
pretokenizer.py).
"""

from __future__ import annotations

import re
from functools import lru_cache

from tokenizers import Tokenizer as Backend
from tokenizers import models

from vkmoe.errors import ModelFileError, PromptError
from vkmoe.generate.pretokenizer import PreTokenizerSpec
from vkmoe.generate.vocabulary import Vocabulary

__all__ = ["ByteLevelCodec", "byte_alphabet", "lenient_text"]

_SURROGATE = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\ufffd"
_PRIVATE = range(0xF0000, 0x10FFFE)  # characters that are cut as surrogates are


@lru_cache(maxsize=1)
def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary.

    Printable Latin-1 bytes stand for themselves; the others, in order, for U+0100 upwards.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(0x100 + i): byte for i, byte in enumerate(rest)})
    return table


def _spelled(raw: bytes) -> str:
    chars = {byte: char for char, byte in byte_alphabet().items()}
    return "".join(chars[byte] for byte in raw)


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
        """Token ids of `text`, a piece between special tokens.

        Raises PromptError for bytes the vocabulary cannot spell.
        """
        if self._absent_bytes:
            self._check(text.encode("utf-8", "surrogatepass"))
        if not text.isascii() and _SURROGATE.search(text):
            return self._encode_surrogates(text)
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def encode_damaged(self, raw: bytes, after_special: bool) -> list[int]:
        """Token ids of bytes that are no UTF-8."""
        return self.encode(lenient_text(raw), after_special)

    def token_bytes(self, text: str) -> bytes:
        """The bytes a token with this text stands for."""
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

    def _encode_surrogates(self, text: str) -> list[int]:
        """Encode text with surrogates, which the package refuses: others stand in while it cuts."""
        free = (chr(code) for code in _PRIVATE if chr(code) not in text)
        stand_ins = {char: next(free) for char in set(_SURROGATE.findall(text))}
        spellings = {
            _spelled(stand_in.encode()): _spelled(char.encode("utf-8", "surrogatepass"))
            for char, stand_in in stand_ins.items()
        }
        replaced = _SURROGATE.sub(lambda match: stand_ins[match[0]], text)
        ids: list[int] = []
        for word, _ in self._backend.pre_tokenizer.pre_tokenize_str(replaced):
            for stand_in, spelling in spellings.items():
                word = word.replace(stand_in, spelling)
            ids += (token.id for token in self._backend.model.tokenize(word))
        return ids


def lenient_text(raw: bytes) -> str:
    """Read bytes as llama.cpp does, with a replacement character where no character begins.

    Lengths are taken from the first byte alone, so that surrogates and over-long spellings, which
    UTF-8 forbids, become characters; the result may hold lone surrogates.
    """
    text: list[str] = []
    place = 0
    while place < len(raw):
        char, n_bytes = _character(raw, place)
        text.append(char)
        place += n_bytes
    return "".join(text)


def _character(raw: bytes, place: int) -> tuple[str, int]:
    first = raw[place]
    if first < 0x80:
        return chr(first), 1
    n_bytes = 2 if 0xC0 <= first < 0xE0 else 3 if 0xE0 <= first < 0xF0 else 4
    rest = raw[place + 1 : place + n_bytes]
    if not 0xC0 <= first < 0xF8 or len(rest) < n_bytes - 1 or any(b >> 6 != 2 for b in rest):
        return _REPLACEMENT, 1
    code = first & (0x7F >> n_bytes)
    for byte in rest:
        code = code << 6 | byte & 0x3F
    return (chr(code), n_bytes) if code < 0x110000 else (_REPLACEMENT, 1)
