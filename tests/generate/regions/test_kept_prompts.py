"""Which prompts are kept when they leave their region, and what comes back."""

from __future__ import annotations

import pytest

from tests.generate.fake_model import FakeModel
from tests.generate.regions.test_regions import fill
from vkmoe.generate.regions.regions import Regions

A, B = list(range(100, 180)), list(range(50, 120))


def opened(n_regions: int = 1, most_kept: int = 1000, **more: int) -> tuple[FakeModel, Regions]:
    model = FakeModel(n_regions, ctx_size=300, most_kept=most_kept, **more)
    return model, Regions(model)


def lengths(regions: Regions) -> list[int]:
    return [len(prompt.tokens) for prompt in regions.kept.prompts]


def test_two_conversations_in_turns_come_back_whole() -> None:
    """One that came back whole is not kept twice."""
    model, regions = opened()
    fill(model, regions, A)
    rows = list(model.rows[0])
    fill(model, regions, B)
    assert lengths(regions) == [80]
    region = regions.take([*A, 1])
    assert regions.keep(region, [*A, 1]) == 80 and model.rows[0] == rows
    assert lengths(regions) == [70] and regions.kept.n_restored == 80
    assert regions.tokens(0) == (*A,)


def test_a_prompt_that_begins_a_newer_one_is_dropped() -> None:
    model, regions = opened()
    fill(model, regions, A)
    fill(model, regions, B)
    fill(model, regions, [*A[:60], *B])  # goes on from a part of A
    assert lengths(regions) == [80, 70], "A is still there, as the rest of it did not come back"
    fill(model, regions, [*A, *range(30)])
    fill(model, regions, B)
    assert lengths(regions) == [130, 110]


@pytest.mark.parametrize(("n_lost", "n_kept"), [(20, 0), (40, 0), (60, 1)])
def test_little_that_is_lost_is_not_worth_a_copy(n_lost: int, n_kept: int) -> None:
    """A long beginning that all requests share is not copied for each of them."""
    model, regions = opened()
    fill(model, regions, [*A, *B, *range(n_lost)])
    fill(model, regions, [*A, *B, 99, 98])
    assert len(lengths(regions)) == n_kept
    assert regions.tokens(0) == (*A, *B, 99, 98)


def test_what_another_region_has_is_not_brought_back() -> None:
    model, regions = opened(n_regions=2)
    for prompt in (A, B, list(range(60)), A):
        fill(model, regions, prompt)
    assert regions.kept.n_restored == 80
    first = regions.take([*A, 1])
    second = regions.take([*A, 2])
    assert regions.keep(first, [*A, 1]) == 80
    assert regions.keep(second, [*A, 2]) == 0 and regions.kept.n_restored == 80


def test_an_empty_region_takes_what_comes_back() -> None:
    """Not one whose text has less in common."""
    model, regions = opened(n_regions=2)
    fill(model, regions, A)
    regions.let_leave(0, 0)
    regions.go_back(0, 0)
    fill(model, regions, A[:30])
    assert regions.tokens(1) == (*A[:30],)
    region = regions.take([*A, 1])
    assert region == 0 and regions.keep(region, [*A, 1]) == 80


def test_the_prompt_that_comes_back_is_not_lost_for_the_one_that_leaves() -> None:
    """Where memory has room for one of them; and nothing is kept where it has room for none."""
    model, regions = opened(most_kept=100)
    fill(model, regions, A)
    fill(model, regions, B)
    region = regions.take([*A, 1])
    assert regions.keep(region, [*A, 1]) == 80
    assert not lengths(regions)
    model, regions = opened(most_kept=79)
    fill(model, regions, A)
    fill(model, regions, B)
    assert not lengths(regions)


def test_states_that_cannot_stop_just_there_leave_fewer_rows() -> None:
    model, regions = opened(stops_at=32)
    fill(model, regions, A)
    fill(model, regions, B)
    assert lengths(regions) == [64]
    region = regions.take([*A, 1])
    assert regions.keep(region, [*A, 1]) == 64


def test_decoded_rows_are_not_kept() -> None:
    model, regions = opened()
    fill(model, regions, A)
    fill(model, regions, [*A, *range(9)], "decode")
    fill(model, regions, B)
    assert lengths(regions) == [80]
