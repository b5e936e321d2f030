"""What an expert must be worth to get a slot: more than its victim, far more if it is copied."""

from __future__ import annotations

import numpy as np
import pytest

from vkmoe.experts.decide.keys import KeySpace
from vkmoe.experts.decide.residency import Residency
from vkmoe.experts.decide.residents import Move
from vkmoe.experts.decide.settings import CacheSettings, PoolSpec, PredictorName
from vkmoe.experts.decide.worth import COPY, GUESS

HELD, MISSED = (0, 1), 7  # one layer of eight experts, with slots for two


def full(predictor: PredictorName = "none") -> Residency:
    """Experts 0 and 1 have the slots, and enough tokens were seen to weigh them."""
    settings = CacheSettings(admission=True, predictor=predictor)
    made = Residency(KeySpace(1, 8), [PoolSpec((0,), 2, 0, 100)], settings)
    for _ in range(80):
        made.landed(made.use(np.array([HELD], np.uint32)))
    return made


def weigh(cache: Residency, missed: float, held: float) -> None:
    """Let this be worth what is missed next, and that who has a slot, whatever was learned."""
    foresight = cache._foresight
    assert foresight is not None and foresight.worth is not None
    worth = np.zeros(8)
    worth[MISSED], worth[list(HELD)] = missed, held

    foresight.worth = foresight.held_worth = worth
    foresight.after_token = lambda ids, keys: None  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("worth", "landed", "enters"),
    [
        (COPY * 0.99, False, False),
        (COPY * 1.01, False, True),
        (0.99, True, False),
        (1.01, True, True),
    ],
)
def test_a_copy_must_pay_for_its_bytes_and_landing_costs_none(
    worth: float, landed: bool, enters: bool
) -> None:
    cache = full()
    weigh(cache, worth, 1.0)
    moves = cache.use(np.array([[MISSED, 1]], np.uint32), [MISSED] if landed else [])
    assert moves == ([Move(0, MISSED, 0, landed)] if enters else [])


@pytest.mark.parametrize(("worth", "enters"), [(GUESS * 0.99, False), (GUESS * 1.01, True)])
def test_a_guess_must_be_worth_still_more(worth: float, enters: bool) -> None:
    cache = full("frequency")
    weigh(cache, worth, 1.0)
    moves = cache.hint([MISSED], np.zeros(0, np.int64))
    assert [move.key for move in moves] == ([MISSED] if enters else [])


def test_who_has_a_slot_keeps_it_for_the_long_run_or_for_what_comes_next() -> None:
    """Six experts follow each other in pairs: the predictor is sure of the next, counts are not."""
    cache = full("correlation")
    pairs = [(2, 3), (4, 5), (6, 7)]
    for token in range(120):
        cache.landed(cache.use(np.array([pairs[token % 3]], np.uint32)))
    foresight = cache._foresight
    assert foresight is not None and foresight.worth is not None
    assert foresight.held_worth is not None
    due, others = list(pairs[0]), [*pairs[1], *pairs[2]]
    assert foresight.worth[due].min() > 0.5 > foresight.worth[others].max()
    gained = foresight.held_worth - foresight.worth
    assert gained.min() == 0, "never less than the next token lets expect"
    assert gained[others].max() > 0.1, "more for what the long run says"
