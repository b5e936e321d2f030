"""Log-probabilities against a softmax of all logits, and where pieces have them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from tests.generate.fake_model import FakeModel
from vkmoe.batch import TopLogits
from vkmoe.config import SamplingConfig
from vkmoe.generate.constraint import Constraints
from vkmoe.generate.logprobs import log_probs
from vkmoe.generate.loop import Generation, Piece, Request
from vkmoe.generate.scheduler import Scheduler
from vkmoe.generate.text.tokenizer import Tokenizer

from .test_sampler import best, never


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    wide = logits.astype(np.float64)
    result: npt.NDArray[np.float64] = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    return result


@pytest.mark.parametrize("n_vocab", [3, 64, 1000])
@pytest.mark.parametrize("n", [0, 1, 20, 64, 70])
def test_they_are_those_of_a_softmax_of_all_logits(n_vocab: int, n: int) -> None:
    rng = np.random.default_rng(n_vocab + n)
    logits = np.round(rng.normal(0, 4, n_vocab), 1).astype(np.float32)  # some are equal
    right, top = log_softmax(logits), best(logits, 64)
    order = np.lexsort((np.arange(n_vocab), -logits))[:n]
    for token in rng.integers(0, n_vocab, 20).tolist():
        found = log_probs(token, n, top, lambda: logits)
        assert found.chosen == pytest.approx(right[token], abs=1e-5)
        assert [i for i, _ in found.likeliest] == order.tolist()
        assert [p for _, p in found.likeliest] == pytest.approx(right[order], abs=1e-5)


def test_all_logits_are_fetched_only_for_tokens_that_are_not_listed() -> None:
    logits = np.linspace(5, -5, 100, dtype=np.float32)
    top: TopLogits = best(logits, 64)
    assert log_probs(63, 20, top, never).chosen == pytest.approx(log_softmax(logits)[63], abs=1e-5)
    for token, n in ((64, 0), (0, 65)):
        with pytest.raises(AssertionError, match="fetched"):
            log_probs(token, n, top, never)


def pieces_of(request: Request, tokenizer: Tokenizer) -> list[Piece]:
    model = FakeModel(1)
    scheduler = Scheduler(model)
    generation = Generation(request, tokenizer, model.ctx_size)
    scheduler.submit(generation)
    while scheduler.has_work:
        scheduler.step()
    assert generation.error is None
    return generation.take_pieces()


def test_pieces_have_those_of_raw_logits_whatever_else_counts(tiny_tokenizer: Tokenizer) -> None:
    """Options of a request change what is chosen, not how likely the model held it."""
    sampling = SamplingConfig(temp=1.5, top_k=0, top_p=1, min_p=0, repeat_penalty=1.2, seed=4)
    constraint = Constraints(tiny_tokenizer).regex("[a-h]+")
    request = Request(
        (1, 2, 3),
        sampling,
        max_tokens=8,
        ignore_eos=True,
        logit_bias=((97, 2.0),),
        n_logprobs=5,
        constraint=constraint,
    )
    pieces = pieces_of(request, tiny_tokenizer)
    assert len(pieces) == 8
    model = FakeModel(1)
    tokens = [piece.token_id for piece in pieces]
    n_unlisted = 0
    for index, piece in enumerate(pieces):
        logits = model_logits(model, [1, 2, 3], tokens[:index])
        right = log_softmax(logits)
        order = np.lexsort((np.arange(logits.size), -logits))
        assert piece.logprob == pytest.approx(right[piece.token_id], abs=1e-5)
        assert [i for i, _ in piece.top_logprobs] == order[:5].tolist()
        assert [p for _, p in piece.top_logprobs] == pytest.approx(right[order[:5]], abs=1e-5)
        n_unlisted += piece.token_id not in order[:64]
    assert 0 < n_unlisted < 8


def model_logits(model: FakeModel, prompt: list[int], reply: list[int]) -> npt.NDArray[np.float32]:
    """The logits behind a prompt and what came of it, as the scheduler runs them."""
    row = 0
    for token, is_prompt in [*((i, True) for i in prompt), *((i, False) for i in reply)]:
        row = hash((row, token, is_prompt))
    return model._logits_after(row, [*prompt, *reply][-1])


def test_without_a_wish_there_are_none(tiny_tokenizer: Tokenizer) -> None:
    plain = pieces_of(Request((1,), SamplingConfig(seed=1), 5), tiny_tokenizer)
    assert all(piece.logprob is None and piece.top_logprobs == () for piece in plain)
    own = pieces_of(Request((1,), SamplingConfig(seed=1), 5, n_logprobs=0), tiny_tokenizer)
    assert [piece.token_id for piece in own] == [piece.token_id for piece in plain]
    for piece in own:
        assert piece.top_logprobs == ()
        assert (piece.logprob is None) == (piece.token_id < 0)
        assert piece.logprob is None or -math.inf < piece.logprob < 0


@pytest.mark.parametrize("n_prompt", [1, 2, 9, 40])
def test_a_prompt_is_scored_as_its_rows_alone_say(tiny_tokenizer: Tokenizer, n_prompt: int) -> None:
    """Beside others, after the same prompt was read, and where the head takes fewer rows."""
    model = FakeModel(4, max_decode_rows=3, prompt_rows=16)
    scheduler = Scheduler(model)
    prompt = [(7 * i) % 250 for i in range(n_prompt)]
    plain = Request(tuple(prompt), SamplingConfig(temp=0), 6, n_logprobs=3)
    scored = replace(plain, scores_prompt=True)
    generations = [
        Generation(each, tiny_tokenizer, model.ctx_size) for each in (plain, scored, scored, plain)
    ]
    for generation in generations:
        scheduler.submit(generation)
    while scheduler.has_work:
        scheduler.step()
    replies = [generation.take_pieces() for generation in generations]
    assert replies == [replies[0]] * 4
    assert [len(each.prompt_logprobs) for each in generations] == [0, n_prompt - 1, n_prompt - 1, 0]
    for place, found in enumerate(generations[1].prompt_logprobs):
        right = log_softmax(model_logits(model, prompt[: place + 1], []))
        assert found.chosen == pytest.approx(right[prompt[place + 1]], abs=1e-5)
        assert [p for _, p in found.likeliest] == pytest.approx(np.sort(right)[:-4:-1], abs=1e-5)
    assert generations[1].prompt_logprobs == generations[2].prompt_logprobs
