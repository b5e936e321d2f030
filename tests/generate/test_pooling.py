"""Embeddings: pools and norms, in any chunks, and beside replies in a scheduler."""

from __future__ import annotations

import random
from typing import get_args

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.generate.fake_model import FakeModel
from tests.generate.test_scheduler import alone, begin, finish, random_request, reply_of
from vkmoe.choices import DraftWay, Pooling
from vkmoe.errors import VkmoeError
from vkmoe.generate.loop import Generation, Request
from vkmoe.generate.pooling import LARGEST, NO_NORM, Pool, normalized
from vkmoe.generate.scheduler import Scheduler
from vkmoe.generate.text.tokenizer import Tokenizer

POOLINGS: tuple[Pooling, ...] = get_args(Pooling)


def pooled(pooling: Pooling, states: NDArray[np.float32], cuts: list[int]) -> NDArray[np.float32]:
    """The embedding of a text whose states come in chunks as long as `cuts`."""
    pool, first = Pool(pooling, len(states)), 0
    for count in cuts:
        if n_wanted := pool.n_wanted(first, count):
            pool.add(states[first + count - n_wanted : first + count])
        first += count
    assert pool.is_whole
    return pool.embedding


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_pool_gives_the_same_bits_in_any_chunks(pooling: Pooling) -> None:
    """Those of a plain formula, where rounding is the last thing that happens."""
    states = np.random.default_rng(3).normal(size=(23, 5)).astype(np.float32) * 1e3
    wanted = {
        "none": states,
        "mean": states.astype(np.float64).mean(axis=0).astype(np.float32),
        "cls": states[0],
        "last": states[-1],
    }[pooling]
    for cuts in ([23], [1] * 23, [7, 16], [22, 1], [1, 22]):
        np.testing.assert_array_equal(pooled(pooling, states, cuts), wanted)


def test_norms_are_llama_cpp_s() -> None:
    vectors = np.array([[3, -4, 0], [0, 0, 0], [1e-30, 0, 1e-30]], np.float32)
    np.testing.assert_allclose(normalized(vectors)[0], [0.6, -0.8, 0], rtol=1e-7)
    assert not normalized(vectors)[1].any(), "zeros have no direction"
    np.testing.assert_allclose(normalized(vectors)[2], [0.5**0.5, 0, 0.5**0.5], rtol=1e-7)
    np.testing.assert_allclose(normalized(vectors, 1)[0], [3 / 7, -4 / 7, 0], rtol=1e-7)
    np.testing.assert_allclose(normalized(vectors, 3)[0] * 91 ** (1 / 3), [3, -4, 0], rtol=1e-6)
    np.testing.assert_allclose(normalized(vectors, LARGEST)[0], [24570, -32760, 0], rtol=1e-7)
    np.testing.assert_array_equal(normalized(vectors, NO_NORM), vectors)


def embedded_alone(request: Request, tokenizer: Tokenizer) -> NDArray[np.float32]:
    """The embedding that a fresh model gives, whose prompts run one row at a time."""
    scheduler = Scheduler(FakeModel(n_regions=1, prompt_rows=1))
    generation = begin(scheduler, request, tokenizer)
    finish(scheduler)
    assert generation.pool is not None
    return generation.pool.embedding


@pytest.mark.parametrize("seed", range(12))
def test_embeddings_and_replies_do_not_disturb_each_other(
    seed: int, tiny_tokenizer: Tokenizer
) -> None:
    """Each is that of a request made alone, in chunks of any size, with guesses or without; also
    where all that was read before is forgotten amid them."""
    draw = random.Random(seed)
    model = FakeModel(3, n_guesses=2, stops_at=draw.choice([1, 4]))
    ways: tuple[DraftWay, ...] = ("none", "lookup", "mtp")
    scheduler = Scheduler(model, ways[seed % 3])
    prefixes = [[draw.randrange(256) for _ in range(50)] for _ in range(2)]
    asked: list[tuple[Request, Generation]] = []
    for _ in range(50):
        if draw.random() < 0.4:
            request = random_request(draw, prefixes)
            if draw.random() < 0.6:
                request = Request(request.tokens, pooling=draw.choice(POOLINGS))
            asked.append((request, begin(scheduler, request, tiny_tokenizer)))
        if asked and draw.random() < 0.05:
            draw.choice(asked)[1].cancel()
        if draw.random() < 0.1:
            scheduler.regions.forget()
        model.prompt_rows = draw.choice([1, 2, 7, 16, 40])
        scheduler.step()
    finish(scheduler)
    assert {batch.wants_states for batch in model.batches} == {True, False}
    for request, generation in asked:
        if generation.is_cancelled:
            continue
        if request.pooling is None:
            assert reply_of(generation) == alone(request, tiny_tokenizer)
            continue
        assert generation.pool is not None and generation.finish_reason == "stop"
        wanted = embedded_alone(request, tiny_tokenizer)
        np.testing.assert_array_equal(generation.pool.embedding, wanted)


def test_texts_share_batches(tiny_tokenizer: Tokenizer) -> None:
    model = FakeModel(4)
    scheduler = Scheduler(model)
    for i in range(4):
        begin(scheduler, Request((i, 1, 2), pooling="mean"), tiny_tokenizer)
    finish(scheduler)
    assert len(model.batches) == 1 and model.batches[0].wants_logits == (True,) * 12


def test_a_conversation_stays_where_it_is_while_texts_are_embedded(
    tiny_tokenizer: Tokenizer,
) -> None:
    """They take the other region, and nothing of them is kept."""
    scheduler = Scheduler(FakeModel(2))
    spoken = tuple(range(40))
    begin(scheduler, Request(spoken, max_tokens=1), tiny_tokenizer)
    finish(scheduler)
    for i in range(3):
        begin(scheduler, Request((i + 100,) * 40, pooling="last"), tiny_tokenizer)
        finish(scheduler)
    assert scheduler.regions.tokens(0) == spoken and not scheduler.regions.tokens(1)
    assert not scheduler.regions.kept.prompts


class DamagedStates(FakeModel):
    """A model whose states are no numbers behind token 9."""

    def states(self, first: int, n_rows: int) -> NDArray[np.float32]:
        found = super().states(first, n_rows)
        tokens = np.array(self._last[0].tokens[first : first + n_rows])
        found[tokens == 9] = np.nan
        return found


def test_bad_states_of_one_text_leave_the_others_alone(tiny_tokenizer: Tokenizer) -> None:
    scheduler = Scheduler(DamagedStates(2))
    bad = begin(scheduler, Request((9,), pooling="mean"), tiny_tokenizer)
    sound = begin(scheduler, Request((1, 2), pooling="mean"), tiny_tokenizer)
    finish(scheduler)
    assert isinstance(bad.error, VkmoeError) and "states that are not numbers" in str(bad.error)
    assert sound.error is None and sound.finish_reason == "stop"
