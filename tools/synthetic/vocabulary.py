"""A byte-level BPE vocabulary of any size that tokenizes any text."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator

END_OF_TEXT = "<|endoftext|>"


def byte_tokens() -> list[str]:
    """The 256 characters byte-level BPE writes bytes as, in the order of the bytes.

    Printable Latin-1 stands for itself; the other bytes take characters from 256 on.
    """
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = itertools.count(256)
    return [chr(byte) if byte in plain else chr(next(spare)) for byte in range(256)]


def merge_rules() -> Iterator[tuple[str, str]]:
    """Endless enough: letter pairs, then a space before a letter, triples, fours."""
    letters = string.ascii_lowercase
    space = byte_tokens()[ord(" ")]
    pairs = [a + b for a in letters for b in letters]
    yield from itertools.product(letters, letters)
    yield from ((space, letter) for letter in letters)
    yield from itertools.product(pairs, letters)
    yield from itertools.product(pairs, pairs)


def vocabulary(n_tokens: int) -> tuple[list[str], list[str]]:
    """`n_tokens` tokens and the merges that reach them: bytes, merged letters, end of text last."""
    merges = list(itertools.islice(merge_rules(), n_tokens - 257))
    tokens = [*byte_tokens(), *(left + right for left, right in merges), END_OF_TEXT]
    return tokens, [f"{left} {right}" for left, right in merges]
