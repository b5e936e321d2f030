"""The predictor that learns from pairs: from token to token, and from layer to layer."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from vkmoe.experts.decide import predict
from vkmoe.experts.decide.keys import KeySpace
from vkmoe.experts.decide.predict import LEAST, WARM_UP, Correlation

SPACE = KeySpace(3, 16)


def token(*experts: int) -> NDArray[np.uint32]:
    """One expert of each layer."""
    return np.array(experts, np.uint32)[:, None]


def cycle(n: int) -> NDArray[np.uint32]:
    """Token n: each layer goes round in experts of its own, layer 2 by what layer 1 has."""
    return token(n % 3, 3 + n % 4, 15 - n % 4)


def taught(meaning: str = "fused", lag: int = 1, n: int = 60) -> Correlation:
    found = Correlation(SPACE, 256.0, meaning, lag)  # type: ignore[arg-type]
    for index in range(n):
        found.after_token(cycle(index))
    return found


def best(scores: NDArray[np.float64] | None, layer: int = 0) -> int:
    assert scores is not None
    return int(scores.reshape(-1, 16)[layer].argmax())


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_who_used_to_follow_is_expected_at_the_distance_asked_for(lag: int) -> None:
    scores = taught(lag=lag).after_token(cycle(60))
    assert [best(scores, layer) for layer in range(3)] == [
        int(each) for each in cycle(60 + lag)[:, 0]
    ]


@pytest.mark.parametrize("lag", [1, 2])
def test_what_was_said_of_a_token_is_kept_until_it_comes(lag: int) -> None:
    predictor = taught(lag=lag)
    says = predictor.after_token(cycle(60))
    for index in range(lag):
        predictor.after_token(cycle(61 + index))
    assert says is not None and predictor.guessed is not None
    assert np.array_equal(predictor.guessed, says)


def test_stepped_expects_the_next_layer_by_the_layer_at_hand() -> None:
    predictor = taught("stepped")
    for expert in (3, 4, 5, 6):  # of layer 1, whatever the token before was
        row = predictor.after_layer(1, np.array([expert], np.uint32))
        assert best(row) == 15 - (expert - 3)


def test_stepped_says_of_a_token_what_its_layers_let_expect() -> None:
    predictor = taught("stepped")
    rows = [predictor.after_layer(layer, cycle(60)[layer]) for layer in (0, 1)]
    predictor.after_token(cycle(60))
    assert predictor.guessed is not None
    for layer, row in enumerate(rows):
        assert row is not None
        assert np.array_equal(predictor.guessed.reshape(3, 16)[layer + 1], row)
    # The first layer follows the last one of the token before, which had 15 - 59 % 4.
    shares = predictor.guessed.reshape(3, 16)[0, :3]
    assert shares == pytest.approx(1 / 3, abs=0.15), "its three in turn, whatever layer 2 had"


@pytest.mark.parametrize("meaning", ["fused", "stepped"])
def test_nobody_is_expected_during_the_warm_up(meaning: str) -> None:
    early = taught(meaning, n=WARM_UP)
    assert early.after_layer(0, cycle(0)[0]) is None
    later = taught(meaning, n=WARM_UP + 1)
    assert later.after_layer(0, cycle(0)[0]) is not None


def test_a_new_text_is_not_taken_to_follow_the_last_one() -> None:
    """After 0 comes 1; a text that begins with 9 was not foretold by the 2 before it."""
    predictor = taught()
    predictor.after_token(token(2, 2, 2))
    predictor.reset()
    assert predictor.after_layer(0, cycle(0)[0]) is None and predictor.guessed is None
    predictor.after_token(token(9, 9, 9))
    scores = predictor.after_token(token(2, 2, 2))
    assert scores is not None and scores.reshape(3, 16)[0][9] == 0
    assert best(predictor.after_token(cycle(0))) == 1, "what was learned of the model stays"


def test_old_pairs_count_less() -> None:
    predictor = Correlation(SPACE, 8.0)
    for index in range(80):
        after = 5 if index < 40 else 6
        predictor.after_token(token(1, 1, 1))
        scores = predictor.after_token(token(after, 1, 1))
    scores = predictor.after_token(token(1, 1, 1))
    assert scores is not None and scores[6] > 0.8 and scores[5] < 0.05


def test_weights_that_grow_for_ever_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = taught(n=90).after_token(cycle(90))
    monkeypatch.setattr(predict, "LATEST", 1.05)
    found = taught(n=90).after_token(cycle(90))
    assert expected is not None and found is not None
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_pairs_too_old_to_tell_are_forgotten() -> None:
    """Numbers near the end of float32's range would take a hundred times as long to add up."""
    predictor = Correlation(SPACE, 1.0)
    for index in range(110):  # counts are scaled twice
        predictor.after_token(token(index % 16, 1, 1) if index < 40 else token(1, 1, 1))
    pairs = predictor._pairs
    assert pairs[0, 2, 3] == 0 < pairs[0, 1, 1]
    assert pairs[pairs > 0].min() >= LEAST


def test_a_model_of_one_layer_has_no_next_one_to_expect() -> None:
    predictor = Correlation(KeySpace(1, 4), 64.0, "stepped")
    for index in range(WARM_UP + 3):
        assert predictor.after_token(np.array([[index % 4]], np.uint32)) is None
    assert predictor.guessed is not None and int(predictor.guessed.argmax()) == (WARM_UP + 2) % 4
