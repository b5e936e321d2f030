"""A byte-level vocabulary in which every cut between words shows.

Owns the vocabulary: all single bytes and all pairs of bytes, merged in a shuffled order, and some
longer words that no merge makes. In a published vocabulary few tokens reach over a place where
pre-tokenizers differ, so that wrong cuts would stay hidden.
"""

from __future__ import annotations

import random
from typing import Any

from vkmoe.generate.text.byte_level import byte_alphabet

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


def pair_vocabulary(pre: str) -> dict[str, Any]:
    """Metadata of a model file that has it, cut as `pre` says."""
    chars = {byte: char for char, byte in byte_alphabet().items()}
    words = ["".join(chars[byte] for byte in word.encode()) for word in _WORDS]
    single = [chars[byte] for byte in range(256)]
    pairs = [(first, second) for first in single for second in single]
    random.Random(20261123).shuffle(pairs)
    tokens = [*single, *(first + second for first, second in pairs), *words, "<|bos|>"]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
        "tokenizer.ggml.merges": [f"{first} {second}" for first, second in pairs],
        "tokenizer.ggml.bos_token_id": len(tokens) - 1,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
    }
