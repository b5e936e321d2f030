"""What a table of tokens learns: beside a twin in NumPy, in bounded memory, from run to run."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from vkmoe.experts import _residency
from vkmoe.experts.decide.keys import KeySpace
from vkmoe.experts.decide.token_table import (
    DOUBT,
    MAX_BYTES,
    SLOWEST,
    WIDTH,
    TokenRows,
    TokenTable,
    n_rows_of,
    row_bytes,
)

SPACE = KeySpace(3, 16)
N_USED = 4
USUAL = np.linspace(0, 1, SPACE.n_keys)


def drawn(n: int, n_tokens: int = 9, seed: int = 0) -> list[tuple[int, NDArray[np.uint32]]]:
    """Tokens with experts of their own, and now and then one of any."""
    rng = np.random.default_rng(seed)
    own = [[rng.permutation(16)[:N_USED] for _ in range(3)] for _ in range(n_tokens)]
    found = []
    for token in rng.integers(0, n_tokens, n).tolist():
        ids = np.array(own[token], np.uint32)
        for row in ids:
            stranger = rng.integers(16)
            if rng.random() < 0.4 and stranger not in row:
                row[rng.integers(N_USED)] = stranger
        found.append((token, ids))
    return found


class Twin:
    """The same sums by the definition, one expert at a time."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}
        # By token and layer: pairs [expert, share], in the order of the entries.
        self.entries: dict[tuple[int, int], list[list[int]]] = {}

    def learn(self, token: int, ids: NDArray[np.uint32]) -> None:
        n = self.seen[token] = min(self.seen.get(token, 0) + 1, SLOWEST)
        for layer, used in enumerate(ids.tolist()):
            entries = self.entries.setdefault(
                (token, layer), [[0, 0] for _ in range(WIDTH * N_USED)]
            )
            known = {expert for expert, share in entries if share}
            for entry in entries:
                if entry[0] in used and entry[1]:
                    entry[1] += (65535 - entry[1]) // n
                else:
                    entry[1] -= -(-entry[1] // n)
            for expert in used:
                smallest = min(entries, key=lambda entry: entry[1])
                if expert not in known and smallest[1] < 65535 // n:
                    smallest[:] = expert, 65535 // n

    def expect(self, tokens: list[int]) -> NDArray[np.float64]:
        found = np.zeros(SPACE.n_keys)
        for token in tokens:
            n = self.seen.get(token, 0)
            found += DOUBT / (n + DOUBT) * USUAL
            for layer in range(SPACE.n_layers if n else 0):
                for expert, share in self.entries[token, layer]:
                    found[16 * layer + expert] += n / (n + DOUBT) * share / 65535
        return found


def test_sums_are_those_of_the_twin() -> None:
    table, twin = TokenTable(SPACE, N_USED), Twin()
    for token, ids in drawn(400):
        table.learn(token, ids)
        twin.learn(token, ids)
    for tokens in ([0], [5, 5], [1, 77, 8], [], [77]):
        assert np.allclose(table.expect(tokens, USUAL), twin.expect(tokens), atol=1e-12), tokens


def test_the_id_that_occurred_longest_ago_makes_room() -> None:
    table = TokenTable(SPACE, N_USED, n_rows=3)
    ids = drawn(1)[0][1]
    for token in (1, 2, 3, 1, 4):
        table.learn(token, ids)
    assert table.rows().ids.tolist() == [3, 1, 4]
    assert (table.expect([2], USUAL) == USUAL).all()
    fresh = TokenTable(SPACE, N_USED)
    fresh.learn(4, ids)
    assert (table.expect([4], USUAL) == fresh.expect([4], USUAL)).all(), "nothing of 2 is left"


def test_a_table_goes_on_from_what_an_earlier_run_knew() -> None:
    whole, first, tokens = TokenTable(SPACE, N_USED), TokenTable(SPACE, N_USED), drawn(300)
    for token, ids in tokens[:200]:
        first.learn(token, ids)
    second = TokenTable.of(SPACE, first.rows())
    for token, ids in tokens:
        whole.learn(token, ids)
    for token, ids in tokens[200:]:
        second.learn(token, ids)
    ours, theirs = second.rows(), whole.rows()
    for name in TokenRows._fields:
        assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name


def test_of_too_many_ids_those_that_occurred_last_are_restored() -> None:
    large, small = TokenTable(SPACE, N_USED), TokenTable(SPACE, N_USED, n_rows=4)
    for token, ids in drawn(60):
        large.learn(token, ids)
    rows = large.rows()
    small.restore(rows)
    assert small.rows().ids.tolist() == rows.ids[-4:].tolist()
    assert (small.rows().shares == rows.shares[-4:]).all()


def test_it_takes_the_bytes_that_are_planned() -> None:
    for n_layers, n_used in ((48, 8), (6, 4), (27, 6)):
        table = TokenTable(KeySpace(n_layers, 128), n_used)
        n_bytes = table._experts.nbytes + table._shares.nbytes
        n_rows = n_rows_of(n_layers, n_used)
        assert n_bytes == n_rows * row_bytes(n_layers, n_used) <= MAX_BYTES
        assert n_bytes > MAX_BYTES - row_bytes(n_layers, n_used)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"row": 2}, "no such row"),
        ({"ids": np.zeros((2, 4), np.uint32)}, "ids are not"),
        ({"ids": np.zeros((3, 9), np.uint32)}, "no room"),
        ({"ids": np.full((3, 4), 1 << 16, np.uint32)}, "16 bits"),
        ({"n": 0}, "n is not"),
        ({"n": 65536}, "n is not"),
        ({"shares": np.zeros((2, 3, 7), np.uint16)}, "shaped"),
        ({"experts": np.zeros((2, 24), np.uint16)}, "experts are not"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    arguments: dict[str, object], words: str
) -> None:
    experts, shares = np.zeros((2, 3, 8), np.uint16), np.zeros((2, 3, 8), np.uint16)
    fine: dict[str, object] = {
        "experts": experts, "shares": shares, "row": 0,
        "ids": np.array([[0, 1, 2, 3]] * 3, np.uint32), "n": 1,
    }  # fmt: skip
    with pytest.raises(ValueError, match=words):
        _residency.learn_token(**(fine | arguments))  # type: ignore[arg-type]
    assert not experts.any() and not shares.any()


def test_rows_that_name_strange_experts_are_refused() -> None:
    experts, shares = np.full((1, 3, 8), 16, np.uint16), np.zeros((1, 3, 8), np.uint16)
    with pytest.raises(ValueError, match="not below n_experts"):
        _residency.expect(experts, shares, [0], [1.0], 16)
    with pytest.raises(ValueError, match="no such row"):
        _residency.expect(experts, shares, [1], [1.0], 17)
    with pytest.raises(ValueError, match="one factor"):
        _residency.expect(experts, shares, [0], [], 17)
