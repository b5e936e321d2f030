"""Vocabularies in which every cut between words shows.

Owns them: all single bytes and all pairs of bytes, merged in a shuffled order, and some longer
words that no merge makes; and the same of characters, for kinds whose tokens are spelled in those.
In a published vocabulary few tokens reach over a place where pre-tokenizers differ, so that wrong
cuts would stay hidden.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

from vkmoe.generate.text.byte_level import PRE_TOKENIZERS, byte_alphabet
from vkmoe.generate.text.vocabulary import TokenType

_WORDS = [
    "hello",
    " hello",
    "Hello",
    "the",
    " the",
    "123",
    "中文",
    " Привет",
    "...",
    "\n\n\n",
    "    ",
]


# Tokens of the character kinds; other characters are spelled in bytes there.
_CHARACTERS = sorted(
    {*map(chr, range(0x21, 0x7F)), *"▁\n\t\réÉßñ中文你好世界日本語하다ПриветपकΣΊ😀🦙♥\u0301\u200d"}
)


def pair_vocabulary(pre: str) -> dict[str, Any]:
    """Metadata of a model file that has it, cut as `pre` says."""
    if PRE_TOKENIZERS[pre].in_characters:
        return _of_characters(pre)
    chars = {byte: char for char, byte in byte_alphabet().items()}
    words = ["".join(chars[byte] for byte in word.encode()) for word in _WORDS]
    single = [chars[byte] for byte in range(256)]
    pairs = _pairs(tuple(single))
    tokens = [*single, *map("".join, pairs), *words, "<|bos|>"]
    types = [TokenType.NORMAL] * (len(tokens) - 1) + [TokenType.CONTROL]
    return _metadata("gpt2", pre, tokens, types, pairs)


def _of_characters(pre: str) -> dict[str, Any]:
    """Metadata of one with a token for each byte; blanks are U+2581."""
    words = [word.replace(" ", "▁") for word in _WORDS if len(word) > 2]
    pairs = _pairs(tuple(_CHARACTERS))
    plain = [*_CHARACTERS, *map("".join, pairs), *words, "</s>"]
    special = ["<|tool_response>", "<|channel>", "<|bos|>"]
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), *plain, *special]
    types = [TokenType.BYTE] * 256 + [TokenType.NORMAL] * len(plain)
    types += [TokenType.USER_DEFINED] * 2 + [TokenType.CONTROL]
    if pre != "gemma4":
        return _metadata("gpt2", pre, tokens, types, pairs)
    metadata = _metadata("gemma4", pre, tokens, types, pairs)
    del metadata["tokenizer.ggml.pre"]
    return metadata | {
        "tokenizer.ggml.add_bos_token": False
    }  # Gemma 4 begins with BOS all the same


@cache
def _pairs(single: tuple[str, ...]) -> list[tuple[str, str]]:
    pairs = [(first, second) for first in single for second in single]
    random.Random(20261123).shuffle(pairs)
    return pairs


def _metadata(
    model: str,
    pre: str,
    tokens: list[str],
    types: Sequence[int],
    pairs: Sequence[tuple[str, str]],
) -> dict[str, Any]:
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
        "tokenizer.ggml.merges": [f"{first} {second}" for first, second in pairs],
        "tokenizer.ggml.bos_token_id": len(tokens) - 1,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
    }
