"""Which region a prompt gets, and what is copied between them."""

from __future__ import annotations

import pytest

from tests.generate.fake_model import FakeModel
from vkmoe.batch import Phase, TokenBatch
from vkmoe.generate.regions.regions import Regions

OLD = list(range(100, 140))


def fill(model: FakeModel, regions: Regions, tokens: list[int], phase: Phase = "prompt") -> int:
    """Run tokens in the region they get, and let go of it."""
    region = regions.take(tokens)
    first = regions.keep(region, tokens)
    add(model, regions, region, tokens[first:], phase)
    regions.release(region)
    return region


def add(
    model: FakeModel, regions: Regions, region: int, tokens: list[int], phase: Phase = "prompt"
) -> None:
    for token in tokens:
        batch = TokenBatch((token,), (regions.n_rows(region),), (region,), (False,), phase)
        model.run(batch)
        regions.note(batch)


@pytest.fixture
def model() -> FakeModel:
    return FakeModel(3, ctx_size=200)


def test_the_longest_common_prefix_wins(model: FakeModel) -> None:
    regions = Regions(model)
    places = [fill(model, regions, [i, *OLD]) for i in range(3)]
    assert places == [0, 1, 2], "those never used come first"
    region = regions.take([1, *OLD, 7])
    assert (region, regions.keep(region, [1, *OLD, 7])) == (1, 41)
    assert regions.tokens(1) == (1, *OLD)


def test_without_one_it_is_the_one_unused_for_longest(model: FakeModel) -> None:
    regions = Regions(model)
    for i in (0, 1, 2, 0):
        fill(model, regions, [i, *OLD])
    region = regions.take([9])
    assert (region, regions.keep(region, [9]), model.rows[1]) == (1, 0, [])
    assert regions.take([9]) == 2 and regions.n_free == 1


def test_a_long_conversation_is_not_lost_for_a_short_beginning(model: FakeModel) -> None:
    regions = Regions(model)
    fill(model, regions, [1, 2, *OLD])
    region = regions.take([1, 2, 77])
    assert region == 1
    regions.keep(region, [1, 2, 77])
    assert regions.tokens(0) == (1, 2, *OLD)


def test_decoded_rows_are_no_part_of_a_prompt(model: FakeModel) -> None:
    """They may differ by rounding, and a reply would depend on what was generated before."""
    regions = Regions(model)
    region = fill(model, regions, [1, 2, 3])
    add(model, regions, region, [4, 5], "decode")
    add(model, regions, region, [6])
    assert regions.take([1, 2, 3, 4, 5, 6]) == region
    assert regions.keep(region, [1, 2, 3, 4, 5, 6]) == 3


@pytest.mark.parametrize(("n_more", "n_copied"), [(31, 0), (32, 34), (38, 40)])
def test_a_prefix_is_copied_where_that_saves_enough(
    model: FakeModel, n_more: int, n_copied: int
) -> None:
    regions = Regions(model)
    source, prompt = regions.take([]), OLD[: 2 + n_more]
    add(model, regions, source, prompt)
    target = regions.take(OLD)
    add(model, regions, target, OLD[:2])
    assert regions.share(target, OLD) == max(0, n_copied - 2)
    assert model.n_copied == n_copied
    assert regions.n_rows(target) == len(model.rows[target]) == max(2, n_copied)
    assert model.rows[target] == model.rows[source][: max(2, n_copied)]
    assert regions.share(target, OLD) == 0, "it has them now"


@pytest.mark.parametrize("is_taken", [True, False])
def test_nothing_is_used_again_that_was_forgotten(is_taken: bool, model: FakeModel) -> None:
    """A sequence keeps its rows as long as it has its region."""
    regions = Regions(model)
    region = fill(model, regions, OLD)
    if is_taken:
        assert regions.take(OLD) == region
    regions.forget()
    assert regions.n_rows(region) == len(model.rows[region]) == (len(OLD) if is_taken else 0)
    regions.release(region)
    assert regions.keep(regions.take(OLD), OLD) == 0
