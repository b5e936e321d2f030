"""Bytes that are no UTF-8, read as llama.cpp reads them, so that they become the same tokens.

Owns the two ways to read them. Does not own tokens (byte_level.py, sentencepiece.py).
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["lenient_text", "text_and_bytes"]

_REPLACEMENT = "\ufffd"


def lenient_text(raw: bytes) -> str:
    """Text with a replacement character for each byte that begins no character.

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


def text_and_bytes(raw: bytes) -> Iterator[str | bytes]:
    """`raw` in order: runs of good characters as text, every bad symbol as its bytes.

    A symbol is as long as its first byte says, whatever follows.
    """
    good: list[str] = []
    place = 0
    while place < len(raw):
        first = raw[place]
        n_bytes = 1 if first < 0xC0 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4
        symbol = raw[place : place + n_bytes]
        place += n_bytes
        try:
            good.append(symbol.decode())
        except UnicodeDecodeError:
            if good:
                yield "".join(good)
            good = []
            yield symbol
    if good:
        yield "".join(good)
