"""This module guesses the next tokens of a text from its earlier tokens (prompt look-up).

The guesses are verified as rows of one batch; whether they hold is the subject of scheduler.py.
Idea: Saxena, "Prompt Lookup Decoding", 2023.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["LookUp"]

_SIZES = (3, 2)  # of the groups of tokens that are looked up, the surest first


class LookUp:
    """Finds the latest earlier occurrence of the last tokens of a sequence that only grows."""

    def __init__(self) -> None:
        # Where what followed a group of tokens begins; groups of all sizes.
        self._after: dict[tuple[int, ...], int] = {}
        self._n_known = 0  # tokens that were seen

    def draft(self, tokens: Sequence[int], n_most: int) -> list[int]:
        """Return up to `n_most` tokens that may follow `tokens`, often none. Mutates.

        Must hold: `tokens` begins with those of the call before.
        """
        for end in range(self._n_known, len(tokens)):
            for size in _SIZES:
                if size <= end:
                    self._after[tuple(tokens[end - size : end])] = end
        self._n_known = len(tokens)
        for size in _SIZES:
            start = self._after.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if start is not None:
                period = tokens[start:]  # repeated where the text behind it ends too soon
                return [period[i % len(period)] for i in range(n_most)]
        return []
