"""The byte budget of copies in the background."""

from __future__ import annotations

from math import inf

import pytest

from vkmoe.experts.store.copies import NEW_WEIGHT, CopyBudget
from vkmoe.gpu.link_speed import LinkSpeed

LINK = LinkSpeed(10e9, 20e9)  # reads in place, copies
EXPERT = 3_000_000


def budget(link: LinkSpeed | None, token_s: float, missed_bytes: float) -> float:
    """What may be copied after one token."""
    found = CopyBudget(link, EXPERT)
    found.token(token_s, missed_bytes)
    return found.n_bytes


def test_a_quarter_of_the_link_where_misses_leave_more() -> None:
    assert budget(LINK, 0.040, 0) == pytest.approx(0.25 * 0.040 * 20e9)
    # 200 MB of misses take 20 of the 40 ms; a quarter is still less than the other half
    assert budget(LINK, 0.040, 200e6) == pytest.approx(0.25 * 0.040 * 20e9)


def test_what_the_misses_leave_where_that_is_less() -> None:
    # 350 MB of misses take 35 of the 40 ms
    assert budget(LINK, 0.040, 350e6) == pytest.approx(0.005 * 20e9)


@pytest.mark.parametrize(("token_s", "missed"), [(0.040, 400e6), (0.040, 4e9), (1e-5, 0), (0, 0)])
def test_at_least_one_expert(token_s: float, missed: float) -> None:
    assert budget(LINK, token_s, missed) == EXPERT


def test_no_limit_without_a_link() -> None:
    assert budget(None, 0.040, 1e9) == inf
    assert CopyBudget(None, EXPERT).n_bytes == inf


def test_the_budget_follows_the_tokens() -> None:
    budget = CopyBudget(LINK, EXPERT)
    assert budget.n_bytes == EXPERT
    budget.token(0.040, 0)
    assert budget.n_bytes == pytest.approx(200e6)
    budget.token(0.080, 0)
    assert budget.n_bytes == pytest.approx(200e6 * (1 + NEW_WEIGHT))
    for _ in range(100):
        budget.token(0.040, 350_000_000)
    assert budget.n_bytes == pytest.approx(100e6, rel=1e-3)
    for _ in range(100):
        budget.token(0.040, 0)
    assert budget.n_bytes == pytest.approx(200e6, rel=1e-3)
