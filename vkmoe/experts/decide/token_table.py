"""Remembers which experts each token id uses: P(expert | id), learned online in bounded memory.

Much of what a layer's router decides follows from the token itself, most in the first layers. Owns
the rows and which ids have one; what follows for slots is the subject of worth.py. Ids are names:
nothing is read into their order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.experts import _residency
from vkmoe.experts.decide.keys import KeySpace, Values

MAX_BYTES = 32 << 20  # of a table; rows of the ids that occurred last
WIDTH = 2  # entries of a row and layer, times the experts that a token uses in a layer
SLOWEST = 32  # occurrences that are averaged over: an id means other things in another text
DOUBT = 0.5  # occurrences that would count as much as what all tokens use


class Upcoming(NamedTuple):
    """Lists the ids of tokens that are known to come, when something is decided."""

    ids: tuple[int, ...] = ()  # of the next run
    later: tuple[int, ...] = ()  # behind it, in order


class TokenRows(NamedTuple):
    """Holds what is known of ids, the one that occurred last at the end: kept between runs."""

    ids: NDArray[np.int64]  # [n]
    seen: NDArray[np.uint16]  # [n]: occurrences, at most SLOWEST
    experts: NDArray[np.uint16]  # [n, n_layers, width]
    shares: NDArray[np.uint16]  # alike; 0: no entry, 65535: used at each occurrence


class History(NamedTuple):
    """Holds what a run leaves to the next one."""

    counts: Values  # [n_keys]: decayed uses
    tokens: TokenRows | None = None  # None: nothing is known of tokens by their ids


def row_bytes(n_layers: int, n_used: int) -> int:
    """Count the bytes of one id's row."""
    return 2 * 2 * n_layers * WIDTH * n_used


def n_rows_of(n_layers: int, n_used: int) -> int:
    """Count the ids that a table has room for."""
    return max(1, MAX_BYTES // row_bytes(n_layers, n_used))


class TokenTable:
    """Learns from tokens with `learn`, and says with `expect` what ids let expect.

    For an id it keeps twice as many experts of each layer as a token uses there, with the share of
    the id's occurrences that used them, the late ones counting more. Where there are too many ids,
    the one that has not occurred for longest goes.
    """

    def __init__(self, space: KeySpace, n_used: int, n_rows: int | None = None) -> None:
        """Begin knowing nothing; `n_used` experts of a layer are used by a token."""
        assert space.n_experts <= 1 << 16, space
        self._space = space
        self._n_rows = n_rows_of(space.n_layers, n_used) if n_rows is None else n_rows
        shape = (self._n_rows, space.n_layers, WIDTH * n_used)
        # Memory that was not written to yet takes no room.
        self._experts: NDArray[np.uint16] = np.zeros(shape, np.uint16)
        self._shares: NDArray[np.uint16] = np.zeros(shape, np.uint16)
        self._seen: NDArray[np.uint16] = np.zeros(self._n_rows, np.uint16)
        self._row_of: dict[int, int] = {}  # by id, the one that occurred last at the end

    def learn(self, token: int, ids: NDArray[np.uint32]) -> None:
        """Learn that the token of an id used `ids` [n_layers, n_used]."""
        row = self._row_of.get(token)
        if row is None:
            row = self._new_row()
        n_seen = min(self._seen.item(row) + 1, SLOWEST)
        _residency.learn_token(self._experts, self._shares, row, ids, n_seen)
        self._seen[row] = n_seen
        self._row_of.pop(token, None)
        self._row_of[token] = row  # at the end

    def expect(self, tokens: Iterable[int], usual: Values) -> Values:
        """Return how many of the tokens of these ids use each expert, on average: [n_keys].

        `usual` [n_keys] is the share of all tokens that use it. It stands for ids that were never
        seen, and for a third of what is expected of one that was seen once.
        """
        rows, factors, doubts = self.known(tokens)
        found = _residency.expect(self._experts, self._shares, rows, factors, self._space.n_experts)
        expected: Values = found.reshape(-1)
        expected += doubts * usual
        return expected

    def known(self, tokens: Iterable[int]) -> tuple[list[int], list[float], float]:
        """Return the rows of these ids, how much each one counts, and how much all tokens do."""
        rows, factors, doubts = [], [], 0.0
        for token in tokens:
            row = self._row_of.get(token)
            if row is None:
                doubts += 1
                continue
            n_seen = self._seen.item(row)
            rows.append(row)
            factors.append(n_seen / (n_seen + DOUBT))
            doubts += DOUBT / (n_seen + DOUBT)
        return rows, factors, doubts

    @property
    def arrays(self) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
        """Return the experts and shares of all rows [n_rows, n_layers, width], in place."""
        return self._experts, self._shares

    # ----- between runs -----

    def rows(self) -> TokenRows:
        """Return all that is known."""
        ids = np.array([*self._row_of], np.int64)
        rows = np.array([*self._row_of.values()], np.int64)
        return TokenRows(ids, self._seen[rows], self._experts[rows], self._shares[rows])

    @classmethod
    def of(cls, space: KeySpace, rows: TokenRows) -> TokenTable:
        """Begin from what an earlier run knew."""
        table = cls(space, rows.experts.shape[2] // WIDTH)
        table.restore(rows)
        return table

    def restore(self, rows: TokenRows) -> None:
        """Know what an earlier run knew; of too many ids, those that occurred last. *Mutates*.

        Must hold: nothing was learned before.
        """
        last = slice(max(0, len(rows.ids) - self._n_rows), None)
        ids = rows.ids[last].tolist()
        self._seen[: len(ids)] = rows.seen[last]
        self._experts[: len(ids)], self._shares[: len(ids)] = rows.experts[last], rows.shares[last]
        self._row_of = {token: row for row, token in enumerate(ids)}

    def _new_row(self) -> int:
        """Return an empty row: a free one, else that of the id that occurred longest ago."""
        if len(self._row_of) < self._n_rows:
            return len(self._row_of)
        row = self._row_of.pop(next(iter(self._row_of)))
        self._shares[row] = 0
        self._seen[row] = 0
        return row
