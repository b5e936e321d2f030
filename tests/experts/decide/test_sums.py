"""The sums in C++ against NumPy, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from vkmoe.experts import _residency


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
    rows, factors = random.normal(size=(4, 61)), random.normal(size=4)
    total = np.zeros(61)
    for row, factor in zip(rows, factors, strict=True):
        total += factor * row
    np.testing.assert_array_equal(_residency.blend(list(rows), factors.tolist()), total)
    parts = [0.0] * 8
    for i, product in enumerate((rows[0] * rows[1]).tolist()):
        parts[i % 8] += product
    assert _residency.products(list(rows))[0, 1] == sum(parts)


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
