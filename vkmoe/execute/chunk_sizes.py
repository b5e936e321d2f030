"""Chooses how many rows of a prompt go into a chunk, by how long submits took."""

from __future__ import annotations

from collections.abc import Sequence

_HARDLY_LONGER = 1.5  # where rows are twice as many or more
_MOST_TARGETS = 4  # that a submit may take where fewer rows would hardly make it shorter


class ChunkSizes:
    """Chooses the largest size whose longest submit is expected to keep to a target.

    That is expected to be as long as its rows are many. Where two sizes show otherwise, because
    what a chunk costs is bringing experts over a bus, a longer submit is allowed: each of those
    experts is brought once a chunk, for few rows as for many.
    """

    def __init__(self, sizes: Sequence[int], target_s: float) -> None:
        self._sizes, self._least_target_s = tuple(sizes), target_s
        self.begin_prompt()

    def begin_prompt(self) -> None:
        """Forget what took too long: it is tried once for each prompt."""
        self._most, self._target_s = self._sizes[-1], self._least_target_s
        self._last: tuple[int, float] | None = None  # the last chunk: its rows, its longest submit
        self._other: tuple[int, float] | None = None  # the last one before it of another size

    def next(self, n_rows: int, longest_s: float) -> int:
        """Return the rows of the next chunk, after one of `n_rows` with a submit of `longest_s`."""
        if self._last and self._last[0] != n_rows:
            self._other = self._last
        self._last = n_rows, longest_s
        most_s = _MOST_TARGETS * self._least_target_s
        if self._other and _is_hardly_longer(self._other, self._last):
            allowed_s = min(most_s, 2 * max(self._other[1], longest_s))
            self._target_s = max(self._least_target_s, allowed_s)
            self._most = self._sizes[-1]
        fitting = [n for n in self._sizes if n <= self._most and self._fits(n)]
        chosen = fitting[-1] if fitting else self._sizes[0]
        if longest_s > self._target_s:
            self._most = chosen
        if chosen == n_rows == self._sizes[0] and not self._other and 2 * longest_s <= most_s:
            return self._sizes[min(1, len(self._sizes) - 1)]  # to learn what twice as many take
        return chosen

    def _fits(self, n_rows: int) -> bool:
        assert self._last is not None
        known_rows, longest_s = self._last
        return longest_s * n_rows / known_rows <= self._target_s


def _is_hardly_longer(one: tuple[int, float], other: tuple[int, float]) -> bool:
    few, many = sorted((one, other))
    return many[0] >= 2 * few[0] and many[1] < _HARDLY_LONGER * few[1]
