"""This module turns text into token ids and back, by the vocabulary inside a model file.

It owns encoding and decoding as a whole: special tokens, what is added around a text, the bytes of
every token. It does not own reading the metadata (vocabulary.py), how plain text becomes ids
(byte_level.py, sentencepiece.py) or streaming (detokenizer.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vkmoe.generate.byte_level import ByteLevelCodec
from vkmoe.generate.sentencepiece import SentencePieceCodec
from vkmoe.generate.special_tokens import SpecialTokens
from vkmoe.generate.vocabulary import Vocabulary, read_vocabulary

__all__ = ["Tokenizer"]


class Tokenizer:
    """Turns text into token ids and back, by byte-level BPE or SentencePiece.

    `bos_id`, `eos_id`, `eot_id` are None where the model has no such token; `end_ids` are all
    tokens that end a generation; `control_ids` never show in generated text.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        pre = vocabulary.pre
        self.pre_name = "SentencePiece" if pre is None else pre.name
        self.n_vocab = len(vocabulary.tokens)
        self.bos_id, self.eos_id = vocabulary.bos, vocabulary.eos
        self.eot_id, self.eom_id = vocabulary.eot, vocabulary.eom
        self.end_ids = vocabulary.end_ids
        self.adds_bos, self.adds_eos = vocabulary.adds_bos, vocabulary.adds_eos
        self.adds_space = vocabulary.adds_space
        self.control_ids = vocabulary.control
        self.special_ids = vocabulary.control | vocabulary.user_defined
        shown = {vocabulary.tokens[i] for i in vocabulary.user_defined}
        self.has_channels = {"<|channel|>", "<|message|>"} <= shown  # see chat.py
        self._unused_ids = vocabulary.unused
        self._tokens = vocabulary.tokens
        self._special = SpecialTokens(
            vocabulary.tokens,
            vocabulary.control,
            vocabulary.user_defined,
            vocabulary.swallow_blanks,
        )
        self._codec: ByteLevelCodec | SentencePieceCodec = (
            SentencePieceCodec(vocabulary) if pre is None else ByteLevelCodec(vocabulary, pre)
        )

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build the tokenizer that a GGUF file's metadata describes.

        Raises ModelFileError for damaged metadata, UnsupportedModelError for an unknown kind.
        """
        return cls(read_vocabulary(metadata))

    def encode(
        self, text: str | bytes, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Return the token ids of `text`; what is no UTF-8 in it becomes the replacement character.

        `add_special` adds BOS and EOS where the model wants them, never a second one next to one
        the text spells out. With `parse_special` false, control tokens in the text are plain text.
        Raises PromptError for text that the vocabulary cannot spell.
        """
        raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        text = raw.decode("utf-8", "replace")
        ids: list[int] = []
        after_special = True
        for part in self._special.cut(text, parse_special):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._codec.encode(part, after_special)
            after_special = isinstance(part, int)
        if add_special and self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        if add_special and self.adds_eos and self.eos_id is not None and ids[-1:] != [self.eos_id]:
            ids.append(self.eos_id)
        return ids

    def decode(self, ids: Iterable[int], skip_control: bool = False) -> str:
        """Return the text of `ids`; bytes that are no UTF-8 become the replacement character.

        The blank that encoding puts before a text is taken away again.
        """
        raw = bytearray()
        after_special = True
        for i in ids:
            is_hidden = skip_control and i in self.control_ids
            raw += b"" if is_hidden else self.piece(i, after_special)
            after_special = i in self.special_ids
        return raw.decode("utf-8", errors="replace")

    def piece(self, token_id: int, after_special: bool) -> bytes:
        """Return what a token adds to a text. Raises IndexError for an id that is not there.

        `after_special`: the text starts here, or a special token stands before it.
        """
        raw = self.token_bytes(token_id)
        if after_special and self.adds_space and token_id not in self.special_ids:
            return raw.removeprefix(b" ")
        return raw

    def token_text(self, token_id: int) -> str:
        """Return a token as the vocabulary spells it. Raises IndexError for an unknown id."""
        if not 0 <= token_id < self.n_vocab:
            raise IndexError(f"token id {token_id} is not one of {self.n_vocab}")
        return self._tokens[token_id]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, none for an unused one. Raises IndexError likewise."""
        text = self.token_text(token_id)
        if token_id in self._unused_ids:
            return b""
        if token_id in self.special_ids:
            return text.encode("utf-8")
        return self._codec.token_bytes(text)
