"""Text to token ids and back, for the vocabulary inside a model file.

Owns encoding (through the `tokenizers` package), the bytes of every token, and which tokens are
special. Does not own reading the metadata (vocabulary.py), how words are cut (pretokenizer.py) or
streaming (detokenizer.py).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from vkmoe.errors import ModelFileError, PromptError
from vkmoe.generate.vocabulary import Vocabulary, read_vocabulary

__all__ = ["Tokenizer", "byte_alphabet"]


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


class Tokenizer:
    """A byte-level BPE tokenizer.

    `bos_id`, `eos_id`, `eot_id` are None where the model has no such token; `end_ids` are all
    tokens that end a generation; `control_ids` never show in generated text.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.pre_name = vocabulary.pre.name
        self.n_vocab = len(vocabulary.ids)
        self.bos_id, self.eos_id = vocabulary.bos, vocabulary.eos
        self.eot_id, self.eom_id = vocabulary.eot, vocabulary.eom
        self.end_ids = vocabulary.end_ids
        self.adds_bos, self.adds_eos = vocabulary.adds_bos, vocabulary.adds_eos
        self.control_ids = frozenset(vocabulary.ids[text] for text in vocabulary.control)
        self._verbatim_ids = self.control_ids | {
            vocabulary.ids[text] for text in vocabulary.user_defined
        }
        self._absent_bytes = _absent_bytes(vocabulary)
        self._backend = _backend(vocabulary)
        self._parse_lock = threading.Lock()

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build the tokenizer that a GGUF file's metadata describes.

        Raises ModelFileError for damaged metadata, UnsupportedModelError for an unknown kind.
        """
        return cls(read_vocabulary(metadata))

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        `add_special` adds BOS and EOS where the model wants them, never a second one next to one
        the text spells out. With `parse_special` false, control tokens in the text are plain text.
        Raises PromptError for text that is not Unicode or that the vocabulary cannot spell.
        """
        try:
            raw = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise PromptError(
                f"the prompt is not valid Unicode text (position {error.start})",
                "save it as UTF-8",
            ) from error
        absent = self._absent_bytes.intersection(raw) if self._absent_bytes else None
        if absent:
            raise PromptError(
                f"the model's vocabulary has no token for byte 0x{min(absent):02x} of the prompt",
                "leave that character out: this model cannot read it",
            )
        with self._parse_lock:
            self._backend.encode_special_tokens = not parse_special
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        if add_special and self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        if add_special and self.adds_eos and self.eos_id is not None and ids[-1:] != [self.eos_id]:
            ids.append(self.eos_id)
        return ids

    def decode(self, ids: Iterable[int], skip_control: bool = False) -> str:
        """Text of `ids`; bytes that are no UTF-8 become the replacement character."""
        skip = self.control_ids if skip_control else frozenset()
        raw = b"".join(self.token_bytes(i) for i in ids if i not in skip)
        return raw.decode("utf-8", errors="replace")

    def token_text(self, token_id: int) -> str:
        """The token as the vocabulary spells it. Raises IndexError for an id that is not there."""
        text: str | None = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if text is None:
            raise IndexError(f"token id {token_id} is not one of {self.n_vocab}")
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for. Raises IndexError for an id that is not there."""
        text = self.token_text(token_id)
        if token_id in self._verbatim_ids:
            return text.encode("utf-8")
        table = byte_alphabet()
        return b"".join(
            bytes((table[char],)) if char in table else char.encode("utf-8") for char in text
        )


def _backend(vocabulary: Vocabulary) -> Backend:
    """Build the package's tokenizer; what it rejects is a fault of the file."""
    try:
        model = models.BPE(
            vocab=vocabulary.ids,
            merges=vocabulary.merges,
            ignore_merges=vocabulary.pre.whole_words,
        )
    except Exception as error:  # the package raises bare Exception
        raise ModelFileError(
            f"the model file's merges do not fit its vocabulary: {str(error).splitlines()[0]}",
            "the file is damaged or was converted wrongly",
        ) from error
    backend = Backend(model)
    normalizer = vocabulary.pre.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = vocabulary.pre.pre_tokenizer()
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in vocabulary.control]
    )
    backend.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in vocabulary.user_defined]
    )
    assert backend.get_vocab_size() == len(vocabulary.ids), "an added token got a new id"
    return backend


def _absent_bytes(vocabulary: Vocabulary) -> frozenset[int]:
    """Bytes without a token of their own: the package would drop them silently."""
    table = byte_alphabet()
    return frozenset(byte for char, byte in table.items() if char not in vocabulary.ids)
