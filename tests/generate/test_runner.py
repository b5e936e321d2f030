"""An engine of one row runs batches row by row; prompts go on from where its state holds."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from vkmoe.batch import RunResult, TokenBatch, TopLogits
from vkmoe.config import SamplingConfig
from vkmoe.generate.loop import Generation, Request
from vkmoe.generate.runner import RowByRow
from vkmoe.generate.scheduler import Scheduler
from vkmoe.generate.tokenizer import Tokenizer
from vkmoe.llm import LLM

TOP = TopLogits(np.array([3], np.int32), np.array([1.5], np.float32), 34, 2.0)


class OneRow:
    """Remembers what it ran; its state can stop at every fourth position."""

    ctx_size = 12

    def __init__(self) -> None:
        self.done: list[tuple[int, int, bool]] = []

    def run(self, batch: TokenBatch) -> RunResult:
        ((token, position, wants),) = zip(
            batch.tokens, batch.positions, batch.wants_logits, strict=True
        )
        self.done.append((token, position, wants))
        routing = np.full((1, 2, 3), token, np.uint32)
        return RunResult(routing, None, (TOP._replace(n_vocab=token),) if wants else ())

    def rewind(self, position: int) -> int:
        return position - position % 4

    def full_logits(self) -> NDArray[np.float32]:
        return np.full(3, self.done[-1][0], np.float32)


def test_a_batch_is_run_row_by_row() -> None:
    model = OneRow()
    runner = RowByRow(model, 8, 8)
    batch = TokenBatch((5, 6, 7), (0, 1, 2), (0, 0, 0), (True, False, True), "prompt")
    result = runner.run(batch)
    assert model.done == [(5, 0, True), (6, 1, False), (7, 2, True)]
    assert [top.n_vocab for top in result.tops] == [5, 7]
    assert result.routing[:, 0, 0].tolist() == [5, 6, 7]
    assert [runner.full_logits(i)[0] for i in range(2)] == [5, 7]


@pytest.mark.parametrize(("n_cached", "n_reused"), [(3, 0), (5, 4), (6, 4), (7, 4), (8, 4)])
def test_a_prompt_goes_on_from_where_the_state_holds(
    n_cached: int, n_reused: int, tiny_tokenizer: Tokenizer
) -> None:
    """Recurrent layers can only go back to positions whose state was kept: here every fourth."""
    model, prompt = OneRow(), tuple(range(10, 17))
    scheduler = Scheduler(RowByRow(model))
    for position, token in enumerate((*prompt, 33)[:n_cached]):
        scheduler.regions.note(TokenBatch.one(token, position))
    request = Request(prompt, SamplingConfig(temp=0), 1, (), True)
    run = Generation(request, tiny_tokenizer, 12)
    scheduler.submit(run)
    while not run.is_done:
        scheduler.step()
    assert [position for _, position, _ in model.done] == list(range(n_reused, len(prompt)))
    assert [token for token, _, _ in model.done] == list(prompt[n_reused:])
    assert scheduler.regions.tokens(0) == prompt
    assert run.statistics(0).n_reused_tokens == n_reused


@pytest.mark.parametrize("position", [0, 2, 4])
def test_an_engine_keeps_every_earlier_position(position: int) -> None:
    with LLM(ctx_size=16) as llm:
        wanted = llm.logits([5, 6, 7, 8, 9][: position + 1])[-1]
        llm.engine.run_tokens([5, 6, 7, 8], 0)
        assert llm.engine.rewind(position) == position
        assert llm.engine.rewind(9) == position, "the state ends there now"
        llm.engine.run_token([5, 6, 7, 8, 9][position], position)
        np.testing.assert_array_equal(llm.engine.full_logits(), wanted)
