"""This module guesses the next tokens of a text from its earlier tokens (prompt look-up).

The guesses are verified as rows of one batch; whether they hold is the subject of scheduler.py.
Idea: Saxena, "Prompt Lookup Decoding", 2023.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["LookUp"]

_SIZES = (3, 2)  # of the groups of tokens that are looked up, the surest first
_FIRST_LENGTH = 3  # of a draft, while nothing is known of how good they are


class LookUp:
    """Finds the latest earlier occurrence of the last tokens of a sequence that only grows.

    A row of a guess that fails costs its experts, which may have to be fetched. Drafts are as long
    as the last ones were right: in Python code, a third as many rows for nine tenths of the tokens.
    """

    def __init__(self) -> None:
        # Where what followed a group of tokens begins; groups of all sizes.
        self._after: dict[tuple[int, ...], int] = {}
        self._n_known = 0  # tokens that were seen
        self._length = _FIRST_LENGTH

    def draft(self, tokens: Sequence[int], n_most: int) -> list[int]:
        """Return up to `n_most` tokens that may follow `tokens`, often none. Mutates.

        Must hold: `tokens` begins with those of the call before.
        """
        for end in range(self._n_known, len(tokens)):
            for size in _SIZES:
                if size <= end:
                    self._after[tuple(tokens[end - size : end])] = end
        self._n_known = len(tokens)
        n_most = min(n_most, self._length)
        for size in _SIZES:
            start = self._after.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if start is not None:
                period = tokens[start:]  # repeated where the text behind it ends too soon
                return [period[i % len(period)] for i in range(n_most)]
        return []

    def learn(self, n_drafted: int, n_right: int) -> None:
        """Note how many tokens of a draft were right, from its first on. Mutates."""
        if n_right < n_drafted:
            self._length = n_right + 1
        else:
            self._length = max(self._length, 2 * n_drafted)
