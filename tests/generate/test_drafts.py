"""Look-up drafts: the continuation of the latest earlier occurrence of the last tokens."""

from __future__ import annotations

import random

import pytest

from vkmoe.generate.drafts import LookUp


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([], []),
        ([1], []),
        ([1, 2, 3, 4], []),
        ([1, 2, 9, 8, 1, 2], [9, 8, 1]),  # the last two
        ([5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2], [7, 6, 1]),  # the last three come first
        ([1, 2, 7, 1, 2, 8, 1, 2], [8, 1, 2]),  # the latest
        ([4, 4, 4], [4, 4, 4]),  # goes round
        ([1, 2, 3, 1, 2, 3, 1, 2], [3, 1, 2]),
    ],
)
def test_the_continuation_is_found(tokens: list[int], draft: list[int]) -> None:
    assert LookUp().draft(tokens, 3) == draft
    assert LookUp().draft(tokens, 0) == []


def test_drafts_are_as_long_as_the_last_ones_were_right() -> None:
    look_up, tokens = LookUp(), [1, 2] * 20
    lengths = [len(look_up.draft(tokens, 9))]
    for n_right in (3, 6, 2, 3, 0, 1):
        look_up.learn(lengths[-1], n_right)
        tokens += [1, 2]
        lengths.append(len(look_up.draft(tokens, 9)))
    assert lengths == [3, 6, 9, 3, 6, 1, 2]
    look_up.learn(0, 0)
    assert len(look_up.draft(tokens, 9)) == 2, "no draft says nothing"


def by_search(tokens: list[int], n_most: int) -> list[int]:
    """What is looked up, looked for from the end."""
    for size in (3, 2):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                period = tokens[end:]
                return (period * n_most)[:n_most]
    return []


def test_a_text_that_grows_is_looked_up_as_a_whole_one() -> None:
    draw = random.Random(1)
    for _ in range(20):
        look_up, tokens = LookUp(), [draw.randrange(4) for _ in range(draw.randrange(3))]
        while len(tokens) < 80:
            assert look_up.draft(tokens, 3) == by_search(tokens, 3)
            tokens += [draw.randrange(4) for _ in range(draw.randrange(1, 4))]
