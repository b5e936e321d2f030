"""How many rows of a prompt go into a chunk, by times that are made up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vkmoe.execute.chunk_sizes import ChunkSizes

SIZES = (32, 64, 128, 256, 512)


def sizes_of_chunks(longest_s: Callable[[int], float], n_chunks: int = 12) -> list[int]:
    """The rows of chunks whose longest submit takes so long, with a target of a quarter second."""
    sizes, found = ChunkSizes(SIZES, 0.25), [32]
    for _ in range(n_chunks):
        found.append(sizes.next(found[-1], longest_s(found[-1])))
    return found


@pytest.mark.parametrize(
    ("row_s", "last"), [(1e-4, 512), (1e-3, 128), (3e-3, 64), (6e-3, 32), (0.1, 32)]
)
def test_chunks_are_as_long_as_their_submits_allow(row_s: float, last: int) -> None:
    found = sizes_of_chunks(lambda n_rows: row_s * n_rows)
    assert found[3:] == [last] * 10
    assert max(found) <= max(64, last), "one try with twice the least"


@pytest.mark.parametrize("bring_s", [0.05, 0.13, 0.2, 0.3, 0.45])
def test_chunks_are_long_where_bringing_takes_the_time(bring_s: float) -> None:
    """However slow the bus: fewer rows would be brought the same experts."""
    found = sizes_of_chunks(lambda n_rows: bring_s + 1e-4 * n_rows)
    assert found[-6:] == [512] * 6


def test_a_size_that_took_too_long_is_tried_again_with_the_next_prompt_only() -> None:
    sizes = ChunkSizes(SIZES, 0.25)
    assert sizes.next(128, 0.1) == 256
    assert sizes.next(256, 0.9) == 64, "at this speed 128 rows take too long as well"
    assert sizes.next(64, 0.01) == 64
    sizes.begin_prompt()
    assert sizes.next(64, 0.01) == 512


def test_no_submit_may_take_longer_than_four_targets() -> None:
    assert set(sizes_of_chunks(lambda n_rows: 0.9 + 1e-5 * n_rows)) == {32}
