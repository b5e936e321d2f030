"""This module turns text into token ids and back, by the vocabulary inside a model file.

It owns encoding and decoding as a whole: special tokens, what is added around a text, the bytes of
every token, and the bytes of a character that is not finished yet. It does not own reading the
metadata (vocabulary.py) or how plain text becomes ids (byte_level.py, characters.py,
sentencepiece.py).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from functools import cached_property

from vkmoe.generate.text.byte_level import ByteLevelCodec
from vkmoe.generate.text.characters import CharacterBpeCodec, CharacterCodec
from vkmoe.generate.text.sentencepiece import SentencePieceCodec
from vkmoe.generate.text.vocabulary import Vocabulary, read_vocabulary
from vkmoe.gguf_file import GgufFile

_SWALLOWED = " \t\n\v\f\r"  # by some special tokens in front of them


class Tokenizer:
    """Turns text into token ids and back, by BPE of bytes or characters, or SentencePiece.

    `bos_id`, `eos_id`, `eot_id` are None where the model has no such token; `end_ids` are all
    tokens that end a generation; `control_ids` never show in generated text; `added_first` and
    `added_last` are what the model wants around every text, BOS and EOS or nothing.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        pre, tokens = vocabulary.pre, vocabulary.tokens
        self.pre_name = "SentencePiece" if pre is None else pre.name
        self.n_vocab = len(tokens)
        self.bos_id, self.eos_id, self.eot_id = map(vocabulary.named.get, ("bos", "eos", "eot"))
        self.end_ids = vocabulary.end_ids
        self.adds_space = vocabulary.adds_space
        self.control_ids = vocabulary.control
        self.special_ids = vocabulary.control | vocabulary.user_defined
        shown = {tokens[i] for i in vocabulary.user_defined}
        self.has_channels = {"<|channel|>", "<|message|>"} <= shown  # see reply.py
        self.added_first, self.added_last = vocabulary.added_first, vocabulary.added_last
        self.gaps = vocabulary.gaps
        self._unused_ids = vocabulary.unused
        self._swallowing = vocabulary.swallow_blanks
        self._tokens = tokens
        self._special_texts = {tokens[i]: i for i in self.special_ids}
        self._longest_first = sorted(self.special_ids, key=lambda i: (-len(tokens[i].encode()), i))
        self._codec = _codec(vocabulary)

    @classmethod
    def from_file(cls, file: GgufFile) -> Tokenizer:
        """Build the tokenizer that a GGUF file's metadata describes.

        Raises ModelFileError for damaged metadata, UnsupportedModelError for an unknown kind.
        """
        return cls(read_vocabulary(file))

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Return the token ids of `text`; half surrogate pairs become replacement characters.

        `add_special` adds BOS and EOS where the model wants them, never a second one next to one
        the text spells out. With `parse_special` false, control tokens in the text are plain text.
        Raises PromptError for text that the vocabulary cannot spell, or that can be cut nowhere.
        """
        text = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        ids: list[int] = []
        after_special = True
        for part in self.parts(text, parse_special):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._codec.encode(part, after_special)
            after_special = isinstance(part, int)
        if add_special and ids[:1] != self.added_first:
            ids = self.added_first + ids
        if add_special and ids[-1:] != self.added_last:
            ids = ids + self.added_last
        return ids

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that `text` has at least, without encoding it."""
        n_bytes = len(text.encode("utf-8", "surrogatepass"))
        if self._swallowing:
            n_bytes -= sum(map(text.count, _SWALLOWED))
        return -(-n_bytes // self._longest)

    @cached_property
    def _longest(self) -> int:
        """Count the bytes of the longest token; none has more than its spelling does."""
        longest = 1
        for i, text in enumerate(self._tokens):
            if len(text.encode()) > longest:
                longest = max(longest, len(self.token_bytes(i, after_special=False)))
        return longest

    def encode_plain(self, text: str) -> list[int]:
        """Return the token ids of `text` where it stands amid a text and has no special tokens.

        Raises PromptError for text that the vocabulary cannot spell.
        """
        return self._codec.encode(text, after_special=False)

    def parts(self, text: str, parse_special: bool = True) -> list[str | int]:
        """Cut `text` into ids of special tokens and the non-empty texts between them.

        As in llama.cpp, the longest token is looked for first, everywhere, then the next in what
        is left.
        """
        parts: list[str | int] = [text]
        for token_id in self._longest_first:
            is_asked_for = parse_special or token_id not in self.control_ids
            if is_asked_for and self._tokens[token_id] in text:
                parts = [piece for part in parts for piece in self._cut_at(token_id, part)]
        return [part for part in parts if part != ""]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; bytes that are no UTF-8 become the replacement character.

        The blank that encoding puts before a text is taken away again.
        """
        stream = StreamDetokenizer(self, is_reply=False)
        return "".join(map(stream.feed, ids)) + stream.finish()

    def token_text(self, token_id: int) -> str:
        """Return a token as the vocabulary spells it. Raises IndexError for an unknown id."""
        if not 0 <= token_id < self.n_vocab:
            raise IndexError(f"token id {token_id} is not one of {self.n_vocab}")
        return self._tokens[token_id]

    @cached_property
    def words(self) -> Sequence[bytes]:
        """Return what each token adds amid a text [n_vocab]."""
        return [self.token_bytes(i, after_special=False) for i in range(self.n_vocab)]

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token that is written `text`, None without one."""
        return self._special_texts.get(text)

    def token_bytes(self, token_id: int, after_special: bool) -> bytes:
        """Return what a token adds to a text. Raises IndexError for an unknown id.

        `after_special`: the text starts here, or a special token stands before it.
        """
        text = self.token_text(token_id)
        if token_id in self._unused_ids:
            return b""
        if token_id in self.special_ids:
            return text.encode()
        raw = self._codec.token_bytes(text)
        return raw.removeprefix(b" ") if after_special and self.adds_space else raw

    def _cut_at(self, token_id: int, part: str | int) -> list[str | int]:
        if isinstance(part, int):
            return [part]
        first, *others = part.split(self._tokens[token_id])
        if token_id in self._swallowing:
            others = [text.lstrip(_SWALLOWED) for text in others]
        return [first, *(piece for text in others for piece in (token_id, text))]


def _codec(vocabulary: Vocabulary) -> ByteLevelCodec | CharacterCodec:
    pre = vocabulary.pre
    if pre is None:
        return SentencePieceCodec(vocabulary)
    if pre.in_characters:
        return CharacterBpeCodec(vocabulary, pre)
    return ByteLevelCodec(vocabulary.ids, vocabulary.merges, pre)


class StreamDetokenizer:
    """Turns ids into text, one at a time.

    The pieces of `feed` and `finish` joined are the whole text. The replacement character appears
    for bytes that can never become UTF-8, and at the very end. In a reply control tokens do not
    show but for those in `shown`, and the blank before the first word of a SentencePiece model
    stays: the text goes on. With `keeps_blanks` it stays behind special tokens too.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        is_reply: bool = True,
        keeps_blanks: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer, self._keeps_blanks = tokenizer, keeps_blanks
        self._hidden = tokenizer.control_ids - shown if is_reply else frozenset()
        self._after_special = not is_reply
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        """Return the text that is certain after this token, often none. Mutates."""
        if token_id >= self._tokenizer.n_vocab:
            return ""  # models may have more rows than their vocabulary has tokens
        after_special = self._after_special
        self._after_special = token_id in self._tokenizer.special_ids and not self._keeps_blanks
        if token_id in self._hidden:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id, after_special))

    def finish(self) -> str:
        """Return what is left: a replacement character if the last character is incomplete."""
        return self._decoder.decode(b"", final=True)
