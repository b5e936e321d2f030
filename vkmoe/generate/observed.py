"""A model that is watched: everything goes on to it, and somebody is told of each token."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from vkmoe.generate.loop import TokenRunner, TopLogits

__all__ = ["ObservedRunner"]


class ObservedRunner:
    """A `TokenRunner` around another; `after(position)` is called when a token has been run."""

    def __init__(self, runner: TokenRunner, after: Callable[[int], None]) -> None:
        self._runner, self._after = runner, after

    @property
    def ctx_size(self) -> int:
        return self._runner.ctx_size

    @property
    def n_vocab(self) -> int:
        return self._runner.n_vocab

    def run_token(self, token: int, position: int, with_logits: bool = True) -> TopLogits | None:
        top = self._runner.run_token(token, position, with_logits)
        self._after(position)
        return top

    def full_logits(self) -> NDArray[np.float32]:
        return self._runner.full_logits()
