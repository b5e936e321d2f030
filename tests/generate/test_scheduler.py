"""The scheduler: every reply equals the one generated alone, whatever runs beside it; turns are
fair; nothing leaks.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.generate.fake_model import FakeModel
from vkmoe.batch import RunResult, TokenBatch, TopLogits
from vkmoe.choices import DraftWay
from vkmoe.config import SamplingConfig
from vkmoe.errors import OutOfMemoryError, VkmoeError
from vkmoe.generate.loop import Generation, GenerationStatistics, Piece, Request
from vkmoe.generate.scheduler import Scheduler
from vkmoe.generate.text.tokenizer import Tokenizer

GREEDY = SamplingConfig(temp=0)
HABIT = 4.0  # of the fake model: how far it repeats itself


class Reply(NamedTuple):
    """What came of a request."""

    pieces: list[Piece]
    reason: str | None


def begin(
    scheduler: Scheduler, request: Request, tokenizer: Tokenizer, ctx: int = 64
) -> Generation:
    generation = Generation(request, tokenizer, ctx)
    scheduler.submit(generation)
    return generation


def finish(scheduler: Scheduler) -> None:
    """Run all that is left, which ends."""
    n_steps = 0
    while scheduler.has_work:
        scheduler.step()
        n_steps += 1
        assert n_steps < 10_000
    check_nothing_leaks(scheduler)


def check_nothing_leaks(scheduler: Scheduler) -> None:
    regions = scheduler.regions
    assert regions.n_free == len(regions._regions)
    runner: Any = scheduler._runner
    assert [regions.n_rows(i) for i in range(regions.n_free)] == [len(rows) for rows in runner.rows]


def alone(request: Request, tokenizer: Tokenizer, **options: Any) -> Reply:
    """The reply of a fresh model with one region, whose prompts run one row at a time."""
    scheduler = Scheduler(FakeModel(n_regions=1, prompt_rows=1, **options))
    generation = begin(scheduler, request, tokenizer)
    finish(scheduler)
    return reply_of(generation)


def reply_of(generation: Generation) -> Reply:
    return Reply(generation.take_pieces(), generation.finish_reason)


def random_request(draw: random.Random, prefixes: Sequence[list[int]]) -> Request:
    prompt = draw.choice(prefixes)[: draw.randrange(1, 50)]
    prompt = prompt + [draw.randrange(256) for _ in range(draw.randrange(0, 12))]
    sampling = SamplingConfig(
        temp=draw.choice([0.0, 0.7, 1.2]),
        top_k=draw.choice([0, 3, 40]),
        repeat_penalty=draw.choice([1.0, 1.0, 1.3]),
        typical_p=draw.choice([1.0, 1.0, 0.6]),
        xtc_probability=draw.choice([0.0, 0.0, 0.7]),
        dry_multiplier=draw.choice([0.0, 0.0, 2.0]),
        mirostat=draw.choice([0, 0, 0, 1, 2]),
        seed=draw.randrange(100),
    )
    return Request(
        tuple(prompt),
        sampling,
        max_tokens=draw.choice([0, 1, 5, 20, None]),
        stop=draw.choice([(), ("a",), ("he", "zz")]),
        ignore_eos=draw.random() < 0.3,
    )


# ----- neighbours change nothing -----


@pytest.mark.parametrize("seed", range(50))
@pytest.mark.sample(20)
def test_every_reply_equals_the_one_generated_alone(seed: int, tiny_tokenizer: Tokenizer) -> None:
    """Random arrivals, cancellations and ends over four regions; some go on from a reply."""
    draw = random.Random(seed)
    options: dict[str, Any] = {"habit": draw.choice([0.0, HABIT])}
    stops_at, n_guesses = draw.choice([1, 1, 4]), draw.choice([1, 3])
    model = FakeModel(
        4, prompt_rows=draw.choice([1, 3, 16]), stops_at=stops_at, n_guesses=n_guesses, **options
    )
    ways: tuple[DraftWay, ...] = ("none", "lookup", "mtp")
    scheduler = Scheduler(model, ways[seed % 3])
    prefixes = [[draw.randrange(256) for _ in range(50)] for _ in range(3)]
    asked: list[tuple[Request, Generation]] = []
    for _ in range(60):
        if draw.random() < 0.35:
            texts = [
                *prefixes,
                *(generation.tokens for _, generation in asked if draw.random() < 0.5),
            ]
            request = random_request(draw, texts)
            asked.append((request, begin(scheduler, request, tiny_tokenizer)))
        if asked and draw.random() < 0.08:
            draw.choice(asked)[1].cancel()
        if draw.random() < 0.3:
            model.prompt_rows = draw.choice([1, 2, 7, 16, 40])
        scheduler.step()
    finish(scheduler)
    assert len(asked) > 5
    for request, generation in asked:
        wanted, found = alone(request, tiny_tokenizer, **options), reply_of(generation)
        if found.reason == "interrupt":
            assert generation.is_cancelled
            assert found.pieces == wanted.pieces[: len(found.pieces)]
        else:
            assert found == wanted


def test_the_fake_model_feels_a_row_of_the_wrong_kind() -> None:
    """Or the test above would not see replies of earlier prompts used as if they were prompts."""
    found = []
    for phase in ("prompt", "decode"):
        result = FakeModel().run(TokenBatch((1,), (0,), (0,), (True,), phase))
        found.append(result.tops[0].log_sum_exp)
    assert found[0] != found[1]


@pytest.mark.parametrize(("temp", "habit"), [(0.0, 4.0), (1.0, 8.0)])
def test_drafts_change_neither_text_nor_draws(
    temp: float, habit: float, tiny_tokenizer: Tokenizer
) -> None:
    sampling = SamplingConfig(temp=temp, top_k=0, top_p=1, min_p=0, seed=3)
    request = Request((1, 2, 3), sampling, ignore_eos=True)
    found, n_batches, statistics = {}, {}, {}
    drafts: tuple[DraftWay, ...] = ("none", "lookup", "mtp")
    for draft in drafts:
        model = FakeModel(1, ctx_size=256, habit=habit, n_guesses=2)
        scheduler = Scheduler(model, draft)
        generation = begin(scheduler, request, tiny_tokenizer, 256)
        finish(scheduler)
        found[draft], n_batches[draft] = reply_of(generation), len(model.batches)
        statistics[draft] = generation.statistics(0)
    for draft in drafts[1:]:
        assert found["none"] == found[draft]
        assert n_batches[draft] < 0.8 * n_batches["none"], "few drafts were accepted"
        check_drafts(statistics[draft])
    assert statistics["none"].n_drafted_tokens == statistics["none"].accepted_per_step == 0


def check_drafts(s: GenerationStatistics) -> None:
    assert 0 < s.n_accepted_tokens < s.n_drafted_tokens, "some are wrong"
    assert s.n_generated_tokens == 1 + s.n_decode_steps + s.n_accepted_tokens
    assert s.accepted_per_step == s.n_accepted_tokens / s.n_decode_steps > 0.2


# ----- turns -----


def test_a_long_prompt_does_not_stop_the_others(tiny_tokenizer: Tokenizer) -> None:
    """A sequence that decodes waits for one batch of prompt rows at most."""
    model = FakeModel(4, ctx_size=600, prompt_rows=16)
    scheduler = Scheduler(model)
    talking = [begin(scheduler, Request((i,), GREEDY, 90, (), True), tiny_tokenizer, 600)
               for i in range(2)]  # fmt: skip
    for _ in range(5):
        scheduler.step()
    begin(scheduler, Request(tuple(range(200)) * 2, GREEDY, 4), tiny_tokenizer, 600)
    short = begin(scheduler, Request((9, 8, 7), GREEDY, 4), tiny_tokenizer, 600)
    n_before = len(model.batches)
    while not short.n_generated:
        scheduler.step()
    phases = [batch.phase for batch in model.batches[n_before:]]
    assert phases.count("prompt") <= 2, "the short prompt waits for one chunk of the long one"
    finish(scheduler)
    phases = [batch.phase for batch in model.batches[n_before:]]
    assert phases.count("prompt") > 20, "the long prompt"
    assert not any(a == b == "prompt" for a, b in pairwise(phases))
    assert all(generation.n_generated == 90 for generation in talking)


def test_more_sequences_than_rows_take_turns(tiny_tokenizer: Tokenizer) -> None:
    model = FakeModel(5, max_decode_rows=2, prompt_rows=64)
    scheduler = Scheduler(model)
    replies = [begin(scheduler, Request((i,), GREEDY, None, (), True), tiny_tokenizer)
               for i in range(5)]  # fmt: skip
    for _ in range(40):
        scheduler.step()
        counts = [generation.n_generated for generation in replies if generation.n_generated]
        assert max(counts) - min(counts) <= 2
    assert {len(batch.tokens) for batch in model.batches if batch.phase == "decode"} == {2}
    finish(scheduler)


def test_one_batch_has_rows_of_several_prompts(tiny_tokenizer: Tokenizer) -> None:
    model = FakeModel(4, prompt_rows=16)
    scheduler = Scheduler(model)
    for i in range(3):
        begin(scheduler, Request((i, 5, 6), GREEDY, 1), tiny_tokenizer)
    scheduler.step()
    assert model.batches[0].sequences == (0, 0, 0, 1, 1, 1, 2, 2, 2)
    finish(scheduler)
    assert len(model.batches) == 1


def test_a_batch_names_the_rows_of_prompts_that_come_next(tiny_tokenizer: Tokenizer) -> None:
    """Prompts take turns: what was read is not named again."""
    scheduler = Scheduler(FakeModel(2, prompt_rows=4))
    batches: list[TokenBatch] = []
    scheduler.after_run = lambda batch, result: batches.append(batch)
    for first in (10, 100):
        begin(scheduler, Request(tuple(range(first, first + 13)), GREEDY, 1), tiny_tokenizer)
    finish(scheduler)
    prompts = [batch for batch in batches if batch.phase == "prompt"]
    assert len(prompts) > 5 and {batch.tokens[0] < 100 for batch in prompts} == {True, False}
    for before, after in pairwise(prompts):
        assert before.later[: len(after.tokens)] == after.tokens, (before, after)
        assert not set(before.later) & set(before.tokens)
    assert prompts[-1].later == ()


def test_prompts_that_end_together_wait_for_rows_with_logits(tiny_tokenizer: Tokenizer) -> None:
    model = FakeModel(4, max_decode_rows=2, prompt_rows=64)
    scheduler = Scheduler(model)
    replies = [begin(scheduler, Request((i, 5), GREEDY, 1), tiny_tokenizer) for i in range(4)]
    finish(scheduler)
    assert [sum(batch.wants_logits) for batch in model.batches] == [2, 2]
    assert all(generation.n_generated == 1 for generation in replies)


def test_those_that_wait_for_a_region_come_in_order(tiny_tokenizer: Tokenizer) -> None:
    scheduler = Scheduler(FakeModel(1))
    replies = [begin(scheduler, Request((i,), GREEDY, 3), tiny_tokenizer) for i in range(3)]
    ends: list[Generation] = []
    while scheduler.has_work:
        ends += [generation for generation in scheduler.step() if generation.is_done]
    assert ends == replies


# ----- prefixes -----


def test_two_prompts_with_one_beginning_read_it_once(tiny_tokenizer: Tokenizer) -> None:
    """Each copies what the other has read by then."""
    model = FakeModel(2, ctx_size=600, prompt_rows=40)
    scheduler = Scheduler(model)
    beginning = tuple(i % 256 for i in range(400))
    first, second = (
        begin(scheduler, Request((*beginning, i), GREEDY, 2), tiny_tokenizer, 600) for i in (1, 2)
    )
    finish(scheduler)
    n_rows = sum(len(batch.tokens) for batch in model.batches if batch.phase == "prompt")
    assert n_rows <= len(beginning) + 2 + 40
    assert first.n_reused + second.n_reused == 2 * 401 - n_rows
    assert model.n_copied > 0


def test_a_reply_is_read_again_as_a_part_of_the_next_prompt(tiny_tokenizer: Tokenizer) -> None:
    model = FakeModel(1)
    scheduler = Scheduler(model)
    first = begin(scheduler, Request((1, 2, 3, 4, 5), GREEDY, 5, (), True), tiny_tokenizer)
    finish(scheduler)
    longer = Request((*first.tokens, 77), GREEDY, 4, (), True)
    second = begin(scheduler, longer, tiny_tokenizer)
    finish(scheduler)
    assert second.n_reused == 5
    assert reply_of(second) == alone(longer, tiny_tokenizer)


# ----- ends -----


class FailingModel(FakeModel):
    """Fails in the batch after `n_sound` ones."""

    n_sound = 1 << 30
    error: BaseException = VkmoeError("the device is gone")

    def run(self, batch: TokenBatch) -> RunResult:
        self.n_sound -= 1
        if self.n_sound == -1:
            raise self.error
        return super().run(batch)


def test_an_error_of_the_model_ends_what_runs_and_nothing_else(tiny_tokenizer: Tokenizer) -> None:
    model = FailingModel(2)
    model.n_sound = 2
    scheduler = Scheduler(model)
    requests = [Request((i, 3), GREEDY, 4, (), True) for i in range(3)]
    replies = [begin(scheduler, request, tiny_tokenizer) for request in requests]
    while not replies[0].is_done:
        scheduler.step()
    assert [generation.error is model.error for generation in replies] == [True, True, False]
    assert not any(scheduler.regions.tokens(i) for i in range(2))
    model.rows = [[], []]
    finish(scheduler)
    assert reply_of(replies[2]) == alone(requests[2], tiny_tokenizer)


def test_ctrl_c_ends_the_replies_of_the_batch(tiny_tokenizer: Tokenizer) -> None:
    model = FailingModel(2)
    model.n_sound, model.error = 2, KeyboardInterrupt()
    scheduler = Scheduler(model)
    generation = begin(scheduler, Request((1, 2), GREEDY, 9, (), True), tiny_tokenizer)
    with pytest.raises(KeyboardInterrupt):
        finish(scheduler)
    assert generation.finish_reason == "interrupt" and not scheduler.has_work
    request = Request((1, 2), GREEDY, 9, (), True)
    again = begin(scheduler, request, tiny_tokenizer)
    finish(scheduler)
    assert reply_of(again) == alone(request, tiny_tokenizer)


class DamagedModel(FakeModel):
    """Its logits after the token 9 are not numbers."""

    def run(self, batch: TokenBatch) -> RunResult:
        result = super().run(batch)
        bad = TopLogits(np.zeros(1, np.int32), np.full(1, -np.inf, np.float32), 262, 0.0, True)
        rows = [i for i, wants in enumerate(batch.wants_logits) if wants]
        tops = [bad if batch.tokens[row] == 9 else top
                for row, top in zip(rows, result.tops, strict=True)]  # fmt: skip
        return result._replace(tops=tuple(tops))


def test_a_prompt_that_memory_has_no_room_for_is_refused_before_it_is_read(
    tiny_tokenizer: Tokenizer,
) -> None:
    """The others, those behind it too, get what they get alone."""
    model = FakeModel(n_regions=2)
    model.most_positions = 24
    scheduler = Scheduler(model)
    fitting = Request((5, 6, 7), GREEDY, 8)
    asked = (fitting, Request((4,) * 30, GREEDY, 8), fitting)
    first, refused, last = (begin(scheduler, each, tiny_tokenizer) for each in asked)
    finish(scheduler)
    assert isinstance(refused.error, OutOfMemoryError) and refused.n_read == 0
    assert refused.finish_reason == "interrupt" and max(map(len, model.rows)) < 24
    assert reply_of(first) == reply_of(last) == alone(fitting, tiny_tokenizer)


def test_a_reply_ends_where_memory_does(
    tiny_tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """With the text that it has, as at any other limit of its length; the others go on."""
    model = FakeModel(n_regions=2, max_decode_rows=2, habit=HABIT)
    model.most_positions = 20
    scheduler = Scheduler(model)
    long = Request((5, 6, 7), GREEDY, 50, ignore_eos=True)
    short = Request((8, 9), GREEDY, 6, ignore_eos=True)
    cut, whole = (begin(scheduler, each, tiny_tokenizer) for each in (long, short))
    finish(scheduler)
    wanted = [alone(each, tiny_tokenizer, habit=HABIT) for each in (long, short)]
    assert reply_of(whole) == wanted[1]
    text = "".join(piece.text for piece in cut.take_pieces())
    assert cut.finish_reason == "length" and cut.error is None
    assert 10 < len(cut.tokens) - 3 <= 20 - 3 + 1
    assert text and "".join(piece.text for piece in wanted[0].pieces).startswith(text)
    assert "a reply ends: no memory is left" in caplog.text


def test_bad_logits_of_one_sequence_leave_the_others_alone(tiny_tokenizer: Tokenizer) -> None:
    scheduler = Scheduler(DamagedModel(2))
    request = Request((1,), GREEDY, 6, (), True)
    sound = begin(scheduler, request, tiny_tokenizer)
    bad = begin(scheduler, Request((9,), GREEDY, 6), tiny_tokenizer)
    finish(scheduler)
    assert bad.error is not None and "NaN" in str(bad.error) and bad.finish_reason == "interrupt"
    assert reply_of(sound) == alone(request, tiny_tokenizer)


def test_requests_and_cancellations_come_from_other_threads(tiny_tokenizer: Tokenizer) -> None:
    scheduler = Scheduler(FakeModel(3))
    requests = [Request((i % 7, i % 5), SamplingConfig(seed=i), 12) for i in range(60)]
    replies: list[tuple[Request, Generation]] = []

    def client(mine: Sequence[Request]) -> None:
        for request in mine:
            generation = begin(scheduler, request, tiny_tokenizer)
            replies.append((request, generation))
            if len(replies) % 9 == 0:
                generation.cancel()

    threads = [threading.Thread(target=client, args=(requests[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        scheduler.step()
    for thread in threads:
        thread.join()
    finish(scheduler)
    assert len(replies) == len(requests)
    for request, generation in replies:
        found = reply_of(generation)
        assert generation.is_done and (found.reason == "interrupt") <= generation.is_cancelled
        if found.reason != "interrupt":
            assert found == alone(request, tiny_tokenizer)


def test_every_batch_is_reported_when_it_is_done(tiny_tokenizer: Tokenizer) -> None:
    model = FakeModel(2)
    scheduler = Scheduler(model)
    seen: list[TokenBatch] = []
    scheduler.after_run = lambda batch, result: seen.append(batch)
    begin(scheduler, Request((1, 2), GREEDY, 4), tiny_tokenizer)
    finish(scheduler)
    assert seen == model.batches and len(seen) > 1
