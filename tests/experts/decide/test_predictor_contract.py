"""What every predictor must do, in both meanings."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.experts.invented_traces import drifting
from vkmoe.choices import Executor, PredictorName
from vkmoe.experts.decide.keys import DecayedCounts, KeySpace
from vkmoe.experts.decide.predict import WARM_UP, Predictor, Scores, create_predictor
from vkmoe.experts.decide.settings import CacheSettings

SPACE = KeySpace(3, 16)
TOKENS = drifting(WARM_UP + 20, 3, 16, 4, persistence=2)
FIRST = np.arange(3)[:, None] * 16

Told = Callable[[NDArray[np.uint32]], Scores | None]


class Watched:
    """A predictor with the counts that its owner keeps."""

    def __init__(self, name: PredictorName, meaning: Executor, lag: int = 1) -> None:
        self.counts = DecayedCounts(SPACE.n_keys, 64.0)
        settings = CacheSettings(predictor=name, executor=meaning, lag=lag)
        found = create_predictor(settings, SPACE, self.counts)
        assert found is not None
        self.predictor: Predictor = found

    def token(self, ids: NDArray[np.uint32]) -> Scores | None:
        self.counts.use((ids + FIRST).reshape(-1))
        scores = self.predictor.after_token(ids)
        self.counts.advance()
        return scores

    def tokens(self, each: NDArray[np.uint32]) -> None:
        for ids in each:
            self.token(ids)


@pytest.fixture(params=["previous", "correlation", "frequency"])
def name(request: pytest.FixtureRequest) -> PredictorName:
    found: PredictorName = request.param
    return found


@pytest.fixture(params=["fused", "stepped"])
def meaning(request: pytest.FixtureRequest) -> Executor:
    found: Executor = request.param
    return found


def test_none_is_no_predictor() -> None:
    assert create_predictor(CacheSettings(), SPACE, DecayedCounts(SPACE.n_keys, 64.0)) is None


def test_nothing_is_said_before_the_first_token(name: PredictorName, meaning: Executor) -> None:
    assert Watched(name, meaning).predictor.after_layer(0, TOKENS[0][0]) is None


def test_scores_have_one_number_per_expert(name: PredictorName, meaning: Executor) -> None:
    watched = Watched(name, meaning)
    watched.tokens(TOKENS)
    scores = watched.token(TOKENS[0])
    if meaning == "fused" or not watched.predictor.informs:
        assert scores is not None and scores.shape == (SPACE.n_keys,)
        assert (scores >= 0).all() and scores.any()
    else:
        assert scores is None, "in stepped mode a layer tells of the next"
    for layer in (0, 1):
        row = watched.predictor.after_layer(layer, TOKENS[1][layer])
        assert row is not None and row.shape == (16,) and row.any() and (row >= 0).all()


def test_a_new_text_forgets_the_last_tokens(name: PredictorName, meaning: Executor) -> None:
    """What the tokens before the end were changes nothing; what they taught of the model stays."""
    watched, other = Watched(name, meaning), Watched(name, meaning)
    for each in (watched, other):
        each.tokens(TOKENS)
        each.predictor.reset()
    other.predictor.reset()  # twice is once
    scores = [each.token(TOKENS[5]) for each in (watched, other)]
    np.testing.assert_array_equal(scores[0], scores[1])
    if name == "previous":
        used = np.zeros(SPACE.n_keys, np.bool_)
        used[TOKENS[5] + FIRST] = True
        assert scores[0] is not None and ((scores[0] > 0) == used).all()
    if watched.predictor.informs and meaning == "fused":
        assert watched.predictor.guessed is None, "the last text foretold nothing of this one"


def test_the_same_tokens_let_expect_the_same(name: PredictorName, meaning: Executor) -> None:
    found = []
    for _ in range(2):
        watched = Watched(name, meaning)
        watched.tokens(TOKENS)
        found.append([watched.token(TOKENS[2]), watched.predictor.after_layer(0, TOKENS[3][0])])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_ids_that_are_written_over_change_nothing(name: PredictorName, meaning: Executor) -> None:
    """The engine hands out a view of its log, which the next token writes to."""
    kept, reused = Watched(name, meaning), Watched(name, meaning)
    log = np.zeros_like(TOKENS[0])
    for ids in TOKENS:
        log[:] = ids
        expected, found = kept.token(ids), reused.token(log)
        log[:] = 0
        assert (expected is None) == (found is None)
        np.testing.assert_array_equal(expected, found)
        np.testing.assert_array_equal(kept.predictor.guessed, reused.predictor.guessed)


# ----- each alone -----


def test_previous_forgets_an_expert_after_four_tokens() -> None:
    watched = Watched("previous", "fused")
    watched.token(np.full((3, 1), 9, np.uint32))
    scores = [watched.token(np.full((3, 1), expert, np.uint32)) for expert in (1, 2, 3, 4)]
    assert [each[9] for each in scores if each is not None] == [0.5, 0.25, 0.125, 0]


def test_previous_scores_an_expert_by_its_latest_use() -> None:
    watched = Watched("previous", "fused")
    for expert in (7, 8, 7):
        scores = watched.token(np.full((3, 1), expert, np.uint32))
    assert scores is not None and (scores[7], scores[8]) == (1, 0.5)


def test_frequency_follows_the_counts() -> None:
    watched = Watched("frequency", "fused")
    for expert in (7, 7, 8):
        scores = watched.token(np.full((3, 1), expert, np.uint32))
    assert scores is not None and scores[7] > scores[8] > scores[9] == 0
