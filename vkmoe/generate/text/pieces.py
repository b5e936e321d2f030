"""This module cuts a long text into pieces, so that encoding holds memory for one at a time.

The `tokenizers` package takes some 200 bytes for each byte of the text that it is given. Where a
text may be cut without another result is what the codecs know (byte_level.py, characters.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vkmoe.errors import PromptError

# Finds the first place between two positions where a text can be cut: both parts have the tokens
# of the whole.
FindCut = Callable[[str, int, int], int | None]

_LEAST, _MOST = 1 << 16, 1 << 18  # characters of a piece


def pieces(text: str, find_cut: FindCut) -> Iterator[str]:
    """Yield the pieces of a text; a short one is one piece.

    Raises PromptError where a piece would be too long.
    """
    start = 0
    while len(text) - start > _LEAST:
        end = min(start + _MOST, len(text))
        cut = find_cut(text, start + _LEAST, end)
        if cut is None and end == len(text):
            break
        if cut is None:
            raise PromptError(
                f"the text has {_MOST - _LEAST} characters in a row that cannot be cut into words",
                "put blanks or line ends into it",
            )
        yield text[start:cut]
        start = cut
    yield text[start:]
