"""Several prompts in one call, and the model behind the scheduler: chunks, drafts, open streams."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.engine.caches import rounding
from tests.engine.tiny import model_path
from vkmoe.errors import PromptError, UsageError
from vkmoe.generate.perplexity import Windows
from vkmoe.generate.scheduler import Scheduler
from vkmoe.llm import LLM

pytestmark = pytest.mark.usefixtures("one_device")

TINY = model_path("moe_plain")
PROMPTS: list[list[int]] = [[5, 6, 7], [5, 6, 9, 1], [2], [5, 6, 7]]
SAMPLED: dict[str, Any] = {"max_tokens": 7, "temp": 1.0, "seed": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(TINY, ctx_size=64, parallel=2, ubatch_size=16) as opened:
        yield opened


def test_a_list_of_prompts_gives_a_list_of_replies(llm: LLM) -> None:
    alone = [llm.generate(prompt, **SAMPLED) for prompt in PROMPTS]
    together = llm.generate(PROMPTS, **SAMPLED)
    assert [result.token_ids for result in together] == [result.token_ids for result in alone]
    assert [result.text for result in together] == [result.text for result in alone]
    assert {result.finish_reason for result in together} == {"length"}
    assert llm.scheduler.regions.n_free == 2 and not llm.scheduler.has_work


def test_texts_and_requests_are_prompts_too(llm: LLM) -> None:
    texts = ["the self", "def"]
    wanted = [llm.generate(text, **SAMPLED).token_ids for text in texts]
    arrays: Any = [np.array(llm.tokenizer.encode(text)) for text in texts]
    assert [result.token_ids for result in llm.generate(arrays, **SAMPLED)] == wanted
    assert [result.token_ids for result in llm.generate(texts, **SAMPLED)] == wanted
    requests = [
        llm.request(text, **{**SAMPLED, "max_tokens": n}) for n, text in enumerate(texts, 2)
    ]
    found = llm.generate(requests)
    assert [result.token_ids for result in found] == [wanted[0][:2], wanted[1][:3]]
    assert llm.generate(requests[0]).token_ids == wanted[0][:2]
    assert "".join(piece.text for piece in llm.stream(requests[0])) == found[0].text


def test_pieces_come_with_the_index_of_their_prompt(llm: LLM) -> None:
    wanted = [llm.generate(prompt, **SAMPLED).token_ids for prompt in PROMPTS]
    found: list[list[int]] = [[] for _ in PROMPTS]
    for index, piece in llm.stream_many(PROMPTS, **SAMPLED):
        found[index] += [piece.token_id] if piece.token_id >= 0 else []
    assert found == wanted
    assert sorted(index for index, _ in llm.generate_many(PROMPTS, **SAMPLED)) == [0, 1, 2, 3]


def test_a_wrong_prompt_among_many_is_refused_before_any_runs(llm: LLM) -> None:
    before = llm.scheduler.regions.tokens(0)
    calls: list[Any] = [llm.generate, llm.stream_many, llm.generate_many]
    for call in calls:
        with pytest.raises(PromptError, match="empty"):
            call([[1, 2], []], max_tokens=1)
    assert llm.scheduler.regions.tokens(0) == before


def test_a_closed_iterator_leaves_nothing_under_way(llm: LLM) -> None:
    pieces: Any = llm.stream_many(PROMPTS, **SAMPLED)
    next(pieces)
    assert llm.scheduler.has_work
    pieces.close()
    assert not llm.scheduler.has_work and llm.scheduler.regions.n_free == 2
    assert llm.last_statistics is not None and llm.last_statistics.finish_reason == "interrupt"
    assert llm.logits([1, 2]).shape == (2, llm.spec.n_vocab)


def test_two_open_streams_do_not_mix(llm: LLM) -> None:
    """The second waits for the region of the first, whose pieces are kept for it."""
    wanted = [llm.generate(prompt, **SAMPLED).token_ids for prompt in PROMPTS[:2]]
    first, second = (llm.stream(prompt, **SAMPLED) for prompt in PROMPTS[:2])
    found = [[next(first).token_id], [next(second).token_id]]
    found[0] += [piece.token_id for piece in first if piece.token_id >= 0]
    found[1] += [piece.token_id for piece in second if piece.token_id >= 0]
    assert found == wanted


def test_progress_counts_the_tokens_of_the_prompt(llm: LLM) -> None:
    llm.forget()
    seen: list[tuple[int, int]] = []
    n_rows = llm.runner.prompt_rows
    prompt = [1 + i % 8 for i in range(n_rows + 3)]
    for _ in llm.stream(prompt, progress=lambda *now: seen.append(now), max_tokens=2, temp=0):
        pass
    assert seen == [(n_rows, n_rows + 3), (n_rows + 3, n_rows + 3)]


@pytest.mark.parametrize("options", [{"temp": 0}, {"temp": 1.0, "seed": 3, "top_k": 0}])
@pytest.mark.parametrize("draft", ["none", "lookup"])
def test_drafts_do_not_change_the_text(llm: LLM, draft: Any, options: dict[str, Any]) -> None:
    prompt = [5, 6, 7, 8] * 5
    llm.forget()
    wanted = llm.generate(prompt, max_tokens=30, ignore_eos=True, **options)
    llm.forget()
    before, llm._turns.scheduler = llm.scheduler, Scheduler(llm.runner, draft)
    try:
        found = llm.generate(prompt, max_tokens=30, ignore_eos=True, **options)
    finally:
        llm._turns.scheduler = before
    assert found.token_ids == wanted.token_ids
    assert found.statistics.n_prompt_tokens == 20
    assert (found.statistics.n_drafted_tokens > 0) == (draft == "lookup")


def test_a_server_can_drive_the_scheduler(llm: LLM) -> None:
    """One thread steps; another one asks and cancels."""
    from vkmoe.generate.loop import Generation

    wanted = llm.generate(PROMPTS[0], **SAMPLED).token_ids
    sound, cancelled = (
        Generation(llm.request(PROMPTS[0], **SAMPLED), llm.tokenizer, 64) for _ in range(2)
    )

    def client() -> None:
        cancelled.cancel()
        for generation in (cancelled, sound):
            llm.scheduler.submit(generation)

    thread = threading.Thread(target=client)
    thread.start()
    thread.join()
    while llm.scheduler.has_work:
        llm.scheduler.step()
    assert [piece.token_id for piece in sound.take_pieces() if piece.token_id >= 0] == wanted
    assert cancelled.finish_reason == "interrupt" and not cancelled.take_pieces()


def test_the_perplexity_is_that_of_the_logits(llm: LLM) -> None:
    text = "def self the " * 12
    tokens = llm.tokenizer.encode(text, parse_special=False)
    windows, sums = Windows(16), []
    bos = llm.tokenizer.added_first
    for start in range(0, len(tokens) - 15, 16):
        window = bos + tokens[start + len(bos) : start + 16]
        logits = llm.logits(window).astype(np.float64)
        for position in range(8, 15):
            row = logits[position]
            sums.append(np.log(np.exp(row).sum()) - row[window[position + 1]])
    *_, last = llm.perplexity(text, windows)
    assert last.n_tokens == len(sums) > 7
    assert last.mean == pytest.approx(np.mean(sums), rel=rounding(llm.engine, 1e-5))
    with pytest.raises(UsageError, match="longer than the context"):
        llm.perplexity(text, Windows(65))


def test_logits_of_a_prompt_and_of_a_reply_differ_by_rounding(llm: LLM) -> None:
    tokens = [4, 5, 6, 9, 2, 30, 1] * 5
    decoded, read = llm.logits(tokens), llm.logits(tokens, "prompt")
    most = rounding(llm.engine, 5e-4) * np.abs(decoded).max()
    np.testing.assert_allclose(read, decoded, atol=most)
