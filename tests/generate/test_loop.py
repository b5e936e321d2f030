"""A watched model does what the model does, and reports every token after it."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from vkmoe.generate.loop import ObservedRunner, TopLogits

TOP = TopLogits(np.array([3], np.int32), np.array([1.5], np.float32), 2.0, False)


class Runner:
    """Remembers what it ran; fails at the token 9."""

    ctx_size, n_vocab = 12, 34

    def __init__(self) -> None:
        self.done: list[tuple[int, int, bool]] = []

    def run_token(self, token: int, position: int, with_logits: bool = True) -> TopLogits | None:
        if token == 9:
            raise RuntimeError("no")
        self.done.append((token, position, with_logits))
        return TOP if with_logits else None

    def full_logits(self) -> NDArray[np.float32]:
        return np.arange(3, dtype=np.float32)


def test_everything_goes_to_the_model_and_each_token_is_told_when_it_is_done() -> None:
    runner = Runner()
    told: list[tuple[int, int]] = []
    watched = ObservedRunner(runner, lambda position: told.append((position, len(runner.done))))
    assert (watched.ctx_size, watched.n_vocab) == (12, 34)
    assert watched.full_logits().tolist() == [0, 1, 2]
    assert watched.run_token(5, 0) is TOP
    assert watched.run_token(6, 1, with_logits=False) is None
    with pytest.raises(RuntimeError):
        watched.run_token(9, 2)
    assert runner.done == [(5, 0, True), (6, 1, False)]
    assert told == [(0, 1), (1, 2)]
