"""Perplexity is what llama.cpp's `llama-perplexity` computes: its definition, in plain loops."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.generate.fake_model import FakeModel
from tests.generate.test_scheduler import FailingModel, begin, finish
from vkmoe.batch import RunResult, TokenBatch, TopLogits
from vkmoe.errors import PromptError, UsageError, VkmoeError
from vkmoe.generate.loop import Request
from vkmoe.generate.perplexity import Windows, estimates, run_tokens
from vkmoe.generate.regions.regions import Regions
from vkmoe.generate.scheduler import Scheduler
from vkmoe.generate.text.tokenizer import Tokenizer

TEXT = [random.Random(4).randrange(256) for _ in range(150)]


def surprises(tokens: Sequence[int], first: int) -> list[float]:
    """Minus the log of the probabilities of a window's tokens from the one after `first` on."""
    model = FakeModel(1, ctx_size=200, max_decode_rows=1, prompt_rows=1)
    found = []
    for position, token in enumerate(tokens[:-1]):
        model.run(TokenBatch((token,), (position,), (0,), (True,), "prompt"))
        logits = model.full_logits(0).astype(np.float64)
        if position >= first:
            found.append(float(np.log(np.exp(logits).sum()) - logits[tokens[position + 1]]))
    return found


def measured(model: FakeModel, windows: Windows, bos: Sequence[int]) -> list[Any]:
    regions = Regions(model)
    found = list(estimates(model, regions, TEXT, windows, bos))
    assert regions.n_free == model.n_regions
    assert [each.n_windows for each in found] == list(range(1, len(found) + 1))
    assert {each.n_planned for each in found} == {len(found)}
    return [(each.n_tokens, each.mean) for each in found]


@pytest.mark.parametrize("bos", [[], [255]])
@pytest.mark.parametrize(("length", "rows"), [(20, 3), (21, 16), (33, 200), (150, 7)])
def test_windows_follow_each_other_and_half_of_each_counts(
    bos: list[int], length: int, rows: int
) -> None:
    """Of n tokens, the positions n // 2 to n - 2 predict the next ones; BOS replaces the first."""
    wanted, sums = [], []
    for start in range(0, len(TEXT) // length * length, length):
        window = bos + TEXT[start + len(bos) : start + length]
        sums += surprises(window, length // 2)
        wanted.append((len(sums), pytest.approx(np.mean(sums))))
    model = FakeModel(2, ctx_size=200, prompt_rows=rows)
    assert measured(model, Windows(length), bos) == wanted
    assert wanted[0][0] == length - length // 2 - 1


def test_with_a_stride_as_many_tokens_count() -> None:
    length, stride, wanted, sums = 40, 15, [], []
    for i in range(math.ceil((len(TEXT) - length) / stride)):
        sums += surprises(TEXT[i * stride : i * stride + length], length - stride - 1)
        wanted.append((len(sums), pytest.approx(np.mean(sums))))
    assert measured(FakeModel(2, ctx_size=64), Windows(length, stride), []) == wanted
    assert wanted[0][0] == stride


def test_the_error_is_that_of_the_mean() -> None:
    (last,) = list(
        estimates(model := FakeModel(1, ctx_size=200), Regions(model), TEXT, Windows(150), [])
    )
    found = surprises(TEXT, 75)
    assert last.perplexity == pytest.approx(math.exp(np.mean(found)))
    error = np.std(found, ddof=1) / math.sqrt(len(found))
    assert last.standard_error == pytest.approx(math.exp(np.mean(found)) * error)


def test_a_chunk_runs_once_and_its_head_for_a_few_rows_at_a_time() -> None:
    model = FakeModel(1, ctx_size=200, max_decode_rows=8, prompt_rows=40)
    rows = list(run_tokens(model, Regions(model), TEXT[:100], 70, "prompt"))
    assert [row.position for row in rows] == list(range(70, 100))
    wanted = [(len(batch.tokens), sum(batch.wants_logits)) for batch in model.batches]
    assert wanted == [(40, 0), (40, 10), (20, 20)]
    assert model.heads == [2, 8, 4]
    assert {batch.phase for batch in model.batches} == {"prompt"}


def test_rows_to_decode_want_logits_all_or_none() -> None:
    model = FakeModel(1, ctx_size=200, max_decode_rows=8)
    rows = list(run_tokens(model, Regions(model), TEXT[:30], 13, "decode"))
    assert [row.position for row in rows] == list(range(13, 30))
    wanted = [(len(batch.tokens), sum(batch.wants_logits)) for batch in model.batches]
    assert wanted == [(8, 0), (5, 0), (8, 8), (8, 8), (1, 1)] and not model.heads


def test_likely_tokens_need_no_full_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel(1, ctx_size=200)
    row = next(run_tokens(model, Regions(model), TEXT, 0, "decode"))
    listed, other = int(row.top.ids[3]), next(i for i in range(256) if i not in row.top.ids)
    assert row.surprise(other) == pytest.approx(row.top.log_sum_exp - row.fetch()[other])
    monkeypatch.setattr(model, "full_logits", None)
    assert row.surprise(listed) == row.top.log_sum_exp - float(row.top.logits[3])


@pytest.mark.parametrize(
    ("length", "stride", "words"),
    [(2, None, "2 tokens"), (40, 40, "--stride 40"), (40, 0, "--stride 0")],
)
def test_windows_that_predict_nothing_are_refused(
    length: int, stride: int | None, words: str
) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        Windows(length, stride)
    assert caught.value.hint


def test_a_text_shorter_than_a_window_is_refused() -> None:
    assert len(Windows(150).starts(150)) == len(Windows(149, 9).starts(150)) == 1
    for windows in (Windows(151), Windows(150, 9)):
        with pytest.raises(PromptError, match="150 tokens") as caught:
            windows.starts(150)
        assert "--ctx-size" in caught.value.hint


class Damaged(FakeModel):
    """Its logits are not numbers."""

    def run(self, batch: TokenBatch) -> RunResult:
        bad = TopLogits(np.arange(3, dtype=np.int32), np.zeros(3, np.float32), 262, math.nan, True)
        return super().run(batch)._replace(tops=(bad,) * sum(batch.wants_logits))


def test_logits_that_are_no_numbers_are_an_error() -> None:
    model = Damaged(1, ctx_size=200)
    regions = Regions(model)
    with pytest.raises(VkmoeError, match="not numbers"):
        list(estimates(model, regions, TEXT, Windows(50), []))
    assert regions.n_free == 1


def test_a_region_must_be_free() -> None:
    model = FakeModel(1)
    regions = Regions(model)
    regions.take([])
    with pytest.raises(UsageError, match="under way"):
        next(run_tokens(model, regions, [1], 0, "prompt"))


def test_an_error_leaves_the_replies_that_run_alone(tiny_tokenizer: Tokenizer) -> None:
    model = FailingModel(2)
    scheduler = Scheduler(model)
    request = Request((1, 2), max_tokens=9, ignore_eos=True)
    generation = begin(scheduler, request, tiny_tokenizer)
    scheduler.step()
    model.n_sound = 0
    with pytest.raises(VkmoeError, match="the device is gone"):
        list(run_tokens(model, scheduler.regions, [3, 4], 0, "prompt"))
    finish(scheduler)
    assert generation.n_generated == 9 and generation.error is None
