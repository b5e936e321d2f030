"""How often predictors are right, on routing where the answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from tests.experts.invented_traces import drifting, trace_of
from vkmoe.choices import Executor
from vkmoe.experts.decide.predict import WARM_UP
from vkmoe.experts.study.accuracy import accuracies, guess_accuracy

MEANINGS: tuple[Executor, ...] = ("fused", "stepped")


def ids(n: int) -> list[list[int]]:
    """Two of 16 experts in each of three layers; those of layers 1 and 2 follow from layer 0."""
    return [[2 * (n % 8), 2 * (n % 8) + 1], [n % 8, 15], [n % 8 + 7, 0]]


CYCLE = trace_of(np.array([ids(n) for n in range(200)], np.uint32), 16)


@pytest.mark.parametrize("meaning", MEANINGS)
def test_what_always_follows_is_always_guessed(meaning: Executor) -> None:
    found = guess_accuracy(CYCLE, "correlation", meaning, 64.0)
    assert found is not None and found > 0.97
    blind = guess_accuracy(CYCLE, "previous", meaning, 64.0)
    assert blind is not None and blind <= 0.5, "only 15 and 0 come back"


def test_repeated_tokens_are_all_that_previous_needs() -> None:
    same = trace_of(np.array([ids(3)] * 20, np.uint32), 16)
    assert guess_accuracy(same, "previous", "fused", 64.0) == 1
    assert guess_accuracy(same, "frequency", "fused", 64.0) == 1


def test_experts_without_a_score_are_not_named() -> None:
    """One expert of eight is known; a guess of seven more would be right now and then."""
    routing = np.array([[[0]], [[1]], [[2]], [[3]]], np.uint32)
    assert guess_accuracy(trace_of(routing, 8), "previous", "fused", 64.0) == 0


def test_a_text_is_not_guessed_from_the_one_before() -> None:
    """Both texts are one token of one and the same: whoever guesses across the border is right."""
    routing = np.array([ids(3)] * 4, np.uint32)
    trace = trace_of(routing, 16, starts=(0, 1, 2, 3))
    assert guess_accuracy(trace, "previous", "fused", 64.0) is None


def test_nobody_is_named_during_the_warm_up() -> None:
    short = trace_of(CYCLE.routing[:WARM_UP], 16)
    assert guess_accuracy(short, "correlation", "fused", 64.0) is None
    assert guess_accuracy(CYCLE, "none", "fused", 64.0) is None


def test_all_are_compared_in_both_meanings() -> None:
    trace = trace_of(drifting(80, 2, 16, 4), 16)
    found = accuracies(trace, 64.0)
    assert list(found) == list(MEANINGS)
    for shares in found.values():
        assert list(shares) == ["previous", "correlation", "frequency"]
        assert all(share is not None and 0.2 < share < 0.9 for share in shares.values())
