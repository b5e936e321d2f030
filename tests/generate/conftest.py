"""Tokenizers small enough to build in a test, and schemas of any depth."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.gguf_file import samples as make
from vkmoe.generate.text.byte_level import byte_alphabet
from vkmoe.generate.text.tokenizer import Tokenizer
from vkmoe.generate.text.vocabulary import TokenType
from vkmoe.gguf_file import GgufFile


def file_of(metadata: Mapping[str, Any]) -> GgufFile:
    """An open file without tensors that says `metadata`; nothing of it stays on disk."""
    pairs = [make.pair(key, *in_bytes(value)) for key, value in metadata.items()]
    with tempfile.TemporaryDirectory() as folder:
        return make.opened(Path(folder), make.file_bytes(pairs))


NUMBERS = {bool: (make.BOOL, "?"), int: (make.I64, "q"), float: (make.F64, "d")}


def in_bytes(value: Any) -> tuple[int, bytes]:
    """The kind of a metadata value and its bytes; all items of an array have one."""
    if isinstance(value, str):
        return make.STRING, make.text(value)
    if not isinstance(value, list):
        kind, code = NUMBERS[type(value)]
        return kind, struct.pack(f"<{code}", value)
    if any(isinstance(item, float) for item in value):
        value = [float(item) for item in value]
    if not value or isinstance(value[0], str):
        return make.ARRAY, make.array(make.STRING, len(value), b"".join(map(make.text, value)))
    kind, code = NUMBERS[type(value[0])]
    return make.ARRAY, make.array(kind, len(value), struct.pack(f"<{len(value)}{code}", *value))


def tokenizer_of(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a file that says `metadata`."""
    return Tokenizer.from_file(file_of(metadata))


def tiny_metadata(**changes: Any) -> dict[str, Any]:
    """256 byte tokens, three merged words, two control tokens and one user-defined token.

    `changes` replace `tokenizer.ggml.<name>`; None removes it.
    """
    alphabet = byte_alphabet()
    tokens = [*sorted(alphabet, key=alphabet.__getitem__), "he", "ll", "hell"]
    tokens += ["<|endoftext|>", "<|im_end|>", "<think>"]
    types = [TokenType.NORMAL] * 259 + [TokenType.CONTROL] * 2 + [TokenType.USER_DEFINED]
    values: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [int(kind) for kind in types],
        "merges": ["h e", "l l", "he ll"],
        "bos_token_id": 259,
        "eos_token_id": 259,
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in values.items() if value is not None}


def metadata_with(*texts: str, kind: int = TokenType.CONTROL, **changes: Any) -> dict[str, Any]:
    """The metadata of `tiny_metadata` and tokens 262, 263, ... of one type."""
    metadata = tiny_metadata(**changes)
    metadata["tokenizer.ggml.tokens"] += texts
    metadata["tokenizer.ggml.token_type"] += [int(kind)] * len(texts)
    return metadata


def with_tokens(*texts: str, **options: Any) -> Tokenizer:
    """The tokenizer of `metadata_with`."""
    return tokenizer_of(metadata_with(*texts, **options))


def spm_metadata(words: list[str], **changes: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary: <unk>, <s>, </s>, 256 byte tokens, then `words`, best first.

    `changes` replace `tokenizer.ggml.<name>`; None removes it.
    """
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    types += [TokenType.USER_DEFINED if "<t" in word else TokenType.NORMAL for word in words]
    values: dict[str, Any] = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + [-99.0 if "▁▁" in x else -i for i, x in enumerate(words, 1)],
        "token_type": [int(kind) for kind in types],
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in values.items() if value is not None}


def tokens_with(**places: str) -> list[str]:
    """The tokens of `tiny_metadata`, some replaced: _5="x" puts "x" in place of token 5."""
    tokens = list(tiny_metadata()["tokenizer.ggml.tokens"])
    for place, text in places.items():
        tokens[int(place[1:])] = text
    return tokens


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Tokenizer:
    return tokenizer_of(tiny_metadata())


def nested(depth: int) -> dict[str, Any]:
    """Make a schema of arrays in arrays."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema
