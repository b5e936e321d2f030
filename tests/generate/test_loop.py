"""Prompts go on from where the model's state holds; every token is reported."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from vkmoe.batch import RunResult, TokenBatch, TopLogits
from vkmoe.config import SamplingConfig
from vkmoe.errors import VkmoeError
from vkmoe.generate.loop import CachedSequence, Generation
from vkmoe.llm import LLM

TOP = TopLogits(np.array([3], np.int32), np.array([1.5], np.float32), 34, 2.0)
NO_ROUTING = np.zeros((1, 0, 0), np.uint32)


class Runner:
    """Remembers what it ran; fails at the token 9."""

    ctx_size = 12

    def __init__(self) -> None:
        self.done: list[tuple[int, int, bool]] = []

    def run(self, batch: TokenBatch) -> RunResult:
        if 9 in batch.tokens:
            raise VkmoeError("no")
        self.done += zip(batch.tokens, batch.positions, batch.wants_logits, strict=True)
        return RunResult(NO_ROUTING, NO_ROUTING, TOP if any(batch.wants_logits) else None)

    def rewind(self, position: int) -> int:
        return position - position % 4

    def full_logits(self) -> NDArray[np.float32]:
        return np.arange(3, dtype=np.float32)


def test_every_token_is_reported_when_it_is_done() -> None:
    runner = Runner()
    sequence = CachedSequence(runner)
    seen: list[tuple[int, int]] = []
    sequence.after_run = lambda batch, _: seen.append((batch.positions[0], len(runner.done)))
    assert sequence.run(5) is TOP
    assert sequence.run(6, with_logits=False) is None
    with pytest.raises(VkmoeError):
        sequence.run(9)
    assert runner.done == [(5, 0, True), (6, 1, False)]
    assert seen == [(0, 1), (1, 2)]
    assert sequence.tokens == [], "after a failure nothing is known"


@pytest.mark.parametrize(("n_cached", "n_reused"), [(3, 0), (5, 4), (6, 4), (7, 4), (8, 4)])
def test_a_prompt_goes_on_from_where_the_state_holds(n_cached: int, n_reused: int) -> None:
    """Recurrent layers can only go back to positions whose state was kept: here every fourth."""
    runner = Runner()
    prompt = list(range(10, 17))
    sequence = CachedSequence(runner)
    sequence.tokens = [*prompt, 33][:n_cached]
    with LLM() as llm:
        run = Generation(sequence, llm.tokenizer, prompt, SamplingConfig(temp=0), 1, (), True)
    next(run.pieces(lambda _: None))
    assert [position for _, position, _ in runner.done] == list(range(n_reused, len(prompt)))
    assert [token for token, _, _ in runner.done] == prompt[n_reused:]
    assert sequence.tokens == prompt and run.statistics(0).n_reused_tokens == n_reused


@pytest.mark.parametrize("position", [0, 2, 4])
def test_an_engine_keeps_every_earlier_position(position: int) -> None:
    with LLM(ctx_size=16) as llm:
        wanted = llm.logits([5, 6, 7, 8, 9][: position + 1])[-1]
        llm.engine.run_tokens([5, 6, 7, 8], 0)
        assert llm.engine.rewind(position) == position
        assert llm.engine.rewind(9) == position, "the state ends there now"
        llm.engine.run_token([5, 6, 7, 8, 9][position], position)
        np.testing.assert_array_equal(llm.engine.full_logits(), wanted)
