"""This module knows the tokens of the prompts that are kept in host memory.

Their rows are the model's (runner.py), which also decides what stays there. When a prompt is kept,
and where it comes back, is the subject of regions.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.generate.runner import BatchRunner, KeptText

Ids = NDArray[np.int32]


class KeptPrompt(NamedTuple):
    """Holds a prompt that left the KV cache."""

    tokens: Ids  # one for each of its rows
    text: KeptText

    def n_common(self, tokens: Ids) -> int:
        """Count the leading tokens that it has in common with others."""
        n_most = min(len(self.tokens), len(tokens))
        differ = self.tokens[:n_most] != tokens[:n_most]
        return int(differ.argmax()) if differ.any() else n_most

    @contextmanager
    def spared(self) -> Iterator[None]:
        """Let no other prompt take its place meanwhile."""
        self.text.is_spared = True
        try:
            yield
        finally:
            self.text.is_spared = False


class KeptPrompts:
    """Finds the kept prompt that a new one goes on from. One thread changes it, any may look."""

    def __init__(self, runner: BatchRunner) -> None:
        self._runner = runner
        self._prompts: list[KeptPrompt] = []
        self.n_restored = 0  # rows that came back, since the model was loaded

    @property
    def prompts(self) -> tuple[KeptPrompt, ...]:
        """List the prompts that are there."""
        return tuple(prompt for prompt in self._prompts if prompt.text.is_there)

    def find(self, tokens: Sequence[int]) -> tuple[KeptPrompt | None, int]:
        """Find the prompt with the longest beginning in common; return that length, too."""
        ids, found = np.array(tokens, np.int32), self.prompts
        best = max(found, key=lambda prompt: prompt.n_common(ids), default=None)
        return (None, 0) if best is None else (best, best.n_common(ids))

    def keep(self, region: int, tokens: Sequence[int]) -> None:
        """Keep the rows of `tokens`, with which a region begins, if memory has room. Mutates.

        Prompts with which this one begins are dropped.
        """
        ids, found = np.array(tokens, np.int32), self.prompts
        if any(prompt.n_common(ids) == len(ids) for prompt in found):
            return
        for prompt in found:
            if prompt.n_common(ids) == len(prompt.tokens) and not prompt.text.is_spared:
                prompt.text.drop()
        text = self._runner.keep_text(region, len(ids))
        kept = [] if text is None else [KeptPrompt(ids[: text.n_positions], text)]
        self._prompts = [*self.prompts, *kept]

    def bring_back(self, prompt: KeptPrompt, region: int, n_positions: int, n_least: int) -> int:
        """Have a region begin with a prompt's first rows, and hold no others. Mutates.

        Returns how many there are: fewer where the state cannot stop there; 0 where nothing was
        done, as they would be fewer than `n_least`. A prompt that came back whole is kept no more.
        """
        n_rows = prompt.text.bring_back(region, n_positions, n_least)
        self.n_restored += n_rows
        if n_rows == len(prompt.tokens):
            prompt.text.drop()
        return n_rows

    def forget(self) -> None:
        """Drop all prompts. Mutates."""
        for prompt in self.prompts:
            prompt.text.drop()
        self._prompts = []
