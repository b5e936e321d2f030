"""This module makes the embedding of a text from the states that a model leaves of its tokens.

Ways to pool, and norms, are those of llama.cpp. Sums are in float64 and in the order of the tokens,
so that it does not matter in which chunks the states come.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vkmoe.choices import Pooling
from vkmoe.generate.runner import bad_logits

Floats = NDArray[np.float32]
NO_NORM, LARGEST, EUCLIDEAN = -1, 0, 2  # orders of a norm
_LARGEST_SCALE = 32760  # of the largest value behind the norm that it gives: fits in 16 bits


class Pool:
    """Collects the states of the tokens of one text, which come in order."""

    def __init__(self, pooling: Pooling, n_tokens: int) -> None:
        self._pooling, self._n_tokens = pooling, n_tokens
        self._kept: list[Floats] = []
        self._sum: NDArray[np.float64] | None = None
        self._n_seen = 0  # states

    def n_wanted(self, first: int, n_rows: int) -> int:
        """Count the last of `n_rows` tokens, from position `first` on, whose states are wanted."""
        if self._pooling == "last":
            return int(first + n_rows == self._n_tokens)
        if self._pooling == "cls":
            return n_rows if first == 0 else 0
        return n_rows

    def add(self, states: Floats) -> None:
        """Take the next states that are wanted [n, width]. Mutates.

        Raises VkmoeError for what is no number.
        """
        if not np.isfinite(states).all():
            raise bad_logits("states")
        self._n_seen += len(states)
        if self._pooling == "mean":
            total = np.zeros(states.shape[1]) if self._sum is None else self._sum
            for row in states:
                total += row
            self._sum = total
        else:
            self._kept.append(states[:1] if self._pooling == "cls" else states)

    @property
    def is_whole(self) -> bool:
        """Say whether all states came that the embedding needs."""
        return self._n_seen >= (1 if self._pooling in ("cls", "last") else self._n_tokens)

    @property
    def embedding(self) -> Floats:
        """Return the text's embedding [width]; unpooled, its tokens' [n_tokens, width].

        Must hold: `is_whole`.
        """
        assert self.is_whole
        if self._sum is not None:
            return (self._sum / self._n_tokens).astype(np.float32)
        whole = np.concatenate(self._kept)
        return whole if self._pooling == "none" else whole[0]


def normalized(vectors: Floats, order: int = EUCLIDEAN) -> Floats:
    """Divide vectors [..., width] by their norms; those of zeros stay.

    The norm of order p is the p-th root of the sum of all values to the power of p. NO_NORM divides
    by nothing; LARGEST makes the largest value one that just fits in 16 bits.
    """
    if order == NO_NORM:
        return vectors
    sizes = np.abs(vectors.astype(np.float64))
    if order == LARGEST:
        norms = sizes.max(axis=-1, keepdims=True) / _LARGEST_SCALE
    else:
        most = np.maximum(sizes.max(axis=-1, keepdims=True), np.finfo(np.float64).tiny)
        norms = most * np.sum((sizes / most) ** order, axis=-1, keepdims=True) ** (1 / order)
    return (vectors / np.where(norms > 0, norms, 1)).astype(np.float32)
