"""Guesses the next tokens of a sequence, for the scheduler to have them verified together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from vkmoe.choices import DraftWay

_LOOKED_UP = (3, 2)  # of the groups of tokens that are looked up, the surest first
_FIRST_DRAFT = 3  # of a draft, while nothing is known of how good they are


class Drafter(Protocol):
    """Describes what guesses the tokens of one sequence."""

    def draft(self, tokens: Sequence[int], n_most: int) -> list[int]:
        """Return up to `n_most` tokens that may follow `tokens`, often none. Mutates.

        Must hold: `tokens` begins with those of the call before.
        """

    def learn(self, n_drafted: int, n_right: int) -> None:
        """Note how many tokens of a draft were right, from its first on. Mutates."""


class LookUp:
    """Guesses the next tokens of a sequence that only grows: what followed the last ones before.

    Idea: Saxena, "Prompt Lookup Decoding", 2023.

    A row of a guess that fails costs its experts, which may have to be fetched. Drafts are as long
    as the last ones were right: in Python code, a third as many rows for nine tenths of the tokens.
    """

    def __init__(self) -> None:
        # Where what followed a group of tokens begins; groups of all sizes.
        self._after: dict[tuple[int, ...], int] = {}
        self._n_known = 0  # tokens that were seen
        self._length = _FIRST_DRAFT

    def draft(self, tokens: Sequence[int], n_most: int) -> list[int]:
        for end in range(self._n_known, len(tokens)):
            for size in _LOOKED_UP:
                if size <= end:
                    self._after[tuple(tokens[end - size : end])] = end
        self._n_known = len(tokens)
        n_most = min(n_most, self._length)
        for size in _LOOKED_UP:
            start = self._after.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if start is not None:
                period = tokens[start:]  # repeated where the text behind it ends too soon
                return [period[i % len(period)] for i in range(n_most)]
        return []

    def learn(self, n_drafted: int, n_right: int) -> None:
        if n_right < n_drafted:
            self._length = n_right + 1
        else:
            self._length = max(self._length, 2 * n_drafted)


class Ahead:
    """Hands on what a layer of the model guessed when it last ran."""

    def __init__(self) -> None:
        self.guessed: list[int] = []

    def draft(self, tokens: Sequence[int], n_most: int) -> list[int]:
        return self.guessed[:n_most]

    def learn(self, n_drafted: int, n_right: int) -> None:
        pass


def make_drafter(way: DraftWay) -> Drafter | None:
    """Make what guesses the tokens of a sequence; None: nothing does."""
    if way == "mtp":
        return Ahead()
    return LookUp() if way == "lookup" else None
