"""The sums in C++ against NumPy, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from vkmoe.experts import _residency

Floats = NDArray[np.float32]
Ids = NDArray[np.uint32]

# Layers, experts, experts used: of one layer, one of them used, few, no multiple of a power of 2.
SIZES = [(48, 128, 8), (1, 8, 2), (3, 7, 1), (5, 61, 6), (2, 1, 1), (2, 16, 16)]


class Known:
    """Random counts of pairs, and ids; the last expert of the last layer is among them."""

    def __init__(self, n_layers: int, n_experts: int, n_used: int) -> None:
        self.random = np.random.default_rng(n_layers * 1000 + n_experts)
        self.shape, self.n_used = (n_layers, n_experts), n_used
        self.pairs = self.random.random((*self.shape, n_experts)).astype(np.float32)
        self.seen = self.random.random(self.shape).astype(np.float32) * 9

    def ids(self, first: int = 0) -> Ids:
        n_layers, n_experts = self.shape
        rows = [self.random.permutation(n_experts)[: self.n_used] for _ in range(first, n_layers)]
        rows[-1] = (rows[-1] - rows[-1][0] - 1) % n_experts
        return np.array(rows, np.uint32)

    def layers(self, first: int) -> NDArray[np.int64]:
        return np.arange(first, self.shape[0])[:, None]


@pytest.fixture(params=SIZES, ids=str)
def known(request: pytest.FixtureRequest) -> Known:
    return Known(*request.param)


@pytest.fixture(params=["all layers", "the last layer"])
def first(request: pytest.FixtureRequest, known: Known) -> int:
    """The first layer that a call is about."""
    return 0 if request.param == "all layers" else known.shape[0] - 1


def test_each_expert_is_noted_behind_each_before_it(known: Known, first: int) -> None:
    before, after, layers = known.ids(first), known.ids(first), known.layers(first)
    pairs, seen = known.pairs.copy(), known.seen.copy()
    pairs[layers[:, :, None], before[:, :, None], after[:, None, :]] += np.float32(1.5)
    seen[layers, before] += np.float32(1.5)
    _residency.learn(known.pairs, known.seen, before, after, first, 1.5)
    np.testing.assert_array_equal(known.pairs, pairs)
    np.testing.assert_array_equal(known.seen, seen)


def test_shares_are_averaged_over_those_before(known: Known, first: int) -> None:
    ids, layers = known.ids(first), known.layers(first)
    factors = 1 / ((known.seen[layers, ids] + np.float32(1.5)) * known.n_used)
    expected = (known.pairs[layers, ids] * factors[:, :, None]).sum(axis=1, dtype=np.float64)
    found = _residency.follow(known.pairs, known.seen, ids, first, 1.5)
    assert found.dtype == np.float64 and found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=2e-6)


def test_a_view_with_gaps_is_read_as_it_is(known: Known) -> None:
    ids = known.ids()
    spread = np.full((2 * len(ids), known.n_used + 3), 2**32 - 1, np.uint32)
    spread[::2, 1:-2] = ids
    found = _residency.follow(known.pairs, known.seen, spread[::2, 1:-2], 0, 1.5)
    np.testing.assert_array_equal(found, _residency.follow(known.pairs, known.seen, ids, 0, 1.5))


def test_no_layers_are_nothing_to_do(known: Known) -> None:
    nobody, pairs = np.zeros((0, 2), np.uint32), known.pairs.copy()
    n_layers, n_experts = known.shape
    _residency.learn(known.pairs, known.seen, nobody, nobody, n_layers, 1.5)
    assert np.array_equal(known.pairs, pairs)
    found = _residency.follow(known.pairs, known.seen, nobody, n_layers, 1.5)
    assert found.shape == (0, n_experts)


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 61, 6144])
@pytest.mark.parametrize("n_rows", [1, 3, 4])
def test_rows_are_blended_and_multiplied(n: int, n_rows: int) -> None:
    random = np.random.default_rng(n)
    rows, factors = random.normal(size=(n_rows, n)), random.normal(size=n_rows)
    blend = _residency.blend(list(rows), factors.tolist())
    np.testing.assert_allclose(blend, factors @ rows, rtol=1e-12, atol=1e-12)
    products = _residency.products(list(rows))
    np.testing.assert_allclose(products, rows @ rows.T, rtol=1e-12, atol=1e-9)
    np.testing.assert_array_equal(products, products.T)


def test_the_order_of_summing_is_fixed() -> None:
    """As the loops say it, product by product; a fused multiply-add would round only once."""
    random = np.random.default_rng(1)
    known = Known(3, 61, 6)
    ids, expected = known.ids(), np.zeros((3, 61), np.float32)
    for layer, used in enumerate(ids):
        for expert in used:
            factor = 1 / ((known.seen[layer, expert] + np.float32(1.5)) * np.float32(6))
            expected[layer] += known.pairs[layer, expert] * factor
    found = _residency.follow(known.pairs, known.seen, ids, 0, 1.5)
    np.testing.assert_array_equal(found, expected)
    rows, factors = random.normal(size=(4, 61)), random.normal(size=4)
    total = np.zeros(61)
    for row, factor in zip(rows, factors, strict=True):
        total += factor * row
    np.testing.assert_array_equal(_residency.blend(list(rows), factors.tolist()), total)
    parts = [0.0] * 8
    for i, product in enumerate((rows[0] * rows[1]).tolist()):
        parts[i % 8] += product
    assert _residency.products(list(rows))[0, 1] == sum(parts)


# ----- what is refused -----

GOOD: Ids = np.zeros((3, 2), np.uint32)
BAD: list[tuple[str, Ids, int]] = [
    ("not below n_experts", np.full((3, 2), 8, np.uint32), 0),
    ("not below n_experts", np.array([[0, 1], [2, 3], [4, 2**32 - 1]], np.uint32), 0),
    ("more layers", np.zeros((4, 2), np.uint32), 0),
    ("more layers", GOOD, 1),
    ("more layers", GOOD, 2**63),
    (r"\[n, n_used\]", np.zeros(3, np.uint32), 0),
]


@pytest.mark.parametrize(("message", "ids", "first"), BAD)
def test_ids_that_do_not_fit_change_nothing(message: str, ids: Ids, first: int) -> None:
    pairs, seen = np.zeros((3, 8, 8), np.float32), np.zeros((3, 8), np.float32)
    good = GOOD[: max(3 - first, 0)]
    for before, after in ((ids, ids), (good, ids), (ids, good)):
        with pytest.raises(ValueError, match=message):
            _residency.learn(pairs, seen, before, after, first, 1.0)
    with pytest.raises(ValueError, match=message):
        _residency.follow(pairs, seen, ids, first, 1.0)
    assert not pairs.any() and not seen.any()


def test_before_and_after_are_of_the_same_layers() -> None:
    pairs, seen = np.zeros((3, 8, 8), np.float32), np.zeros((3, 8), np.float32)
    with pytest.raises(ValueError, match="as many layers"):
        _residency.learn(pairs, seen, GOOD, GOOD[:2], 0, 1.0)
    assert not pairs.any() and not seen.any()


@pytest.mark.parametrize(
    ("pairs", "seen"),
    [((3, 8, 7), (3, 8)), ((3, 8), (3, 8)), ((3, 8, 8), (3, 7)), ((3, 8, 8), (2, 8))],
)
def test_counts_of_another_shape_are_refused(pairs: tuple[int], seen: tuple[int]) -> None:
    counts = np.zeros(pairs, np.float32), np.zeros(seen, np.float32)
    with pytest.raises(ValueError, match=r"are not|is not"):
        _residency.learn(*counts, GOOD[:2], GOOD[:2], 0, 1.0)
    with pytest.raises(ValueError, match=r"are not|is not"):
        _residency.follow(*counts, GOOD[:2], 0, 1.0)


def test_counts_are_learned_in_place_or_not_at_all() -> None:
    """A copy, converted or without gaps, would learn what nobody reads."""
    seen = np.zeros((3, 8), np.float32)
    for pairs in (np.zeros((3, 8, 8)), np.zeros((3, 8, 16), np.float32)[:, :, ::2]):
        with pytest.raises(TypeError):
            _residency.learn(pairs, seen, GOOD, GOOD, 0, 1.0)  # type: ignore[arg-type]
    frozen = np.zeros((3, 8, 8), np.float32)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="not writeable"):
        _residency.learn(frozen, seen, GOOD, GOOD, 0, 1.0)
    assert not seen.any()


@pytest.mark.parametrize("kind", [np.int64, np.float32])
def test_ids_that_could_lose_digits_are_refused(kind: type) -> None:
    counts = np.zeros((3, 8, 8), np.float32), np.zeros((3, 8), np.float32)
    with pytest.raises(TypeError):
        _residency.follow(*counts, np.zeros((3, 2), kind), 0, 1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: _residency.blend([], []), "no rows"),
        (lambda: _residency.products([]), "no rows"),
        (lambda: _residency.blend([np.ones(3), np.ones(4)], [1.0, 1.0]), "all as long"),
        (lambda: _residency.products([np.ones(3), np.ones((3, 1))]), "all as long"),
        (lambda: _residency.blend([np.ones(3)], [1.0, 1.0]), "one factor for each"),
    ],
)
def test_rows_that_do_not_fit_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
