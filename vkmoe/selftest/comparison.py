"""Compares what a kernel left with its twin's values; errors are shares of what rounding may do.

Knows no kernel. A check never raises; `Checks.verify` does, for tests.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["SUM_LIMIT", "Check", "Checks"]

SUM_LIMIT = 1e-5  # of the sum of |w * x|: what float32 sums in any order may differ by

Numbers = NDArray[np.generic]


class Check(NamedTuple):
    """Holds one comparison: the largest error found and the largest allowed, in the same unit."""

    what: str
    error: float
    limit: float
    where: str = ""  # of what is wrong, the place that is furthest off

    @property
    def ok(self) -> bool:
        return self.error <= self.limit

    @property
    def badness(self) -> float:
        """Return how far beyond its limit an error is; for choosing the worst of several."""
        if self.limit == 0.0:
            return 0.0 if self.ok else np.inf
        return self.error / self.limit


class Checks:
    """Collects the comparisons of one kernel run."""

    def __init__(self) -> None:
        self.checks: list[Check] = []
        self.n_left_out = 0  # values not compared because damaged weights decide them

    def close(
        self,
        what: str,
        found: Numbers,
        wanted: Numbers,
        magnitude: Numbers | float,
        limit: float = SUM_LIMIT,
    ) -> None:
        """Compare: |found - wanted| <= limit * magnitude everywhere; equal where magnitude is 0.

        Floats of one shape. NaN is an error wherever it is found.
        """
        assert found.shape == wanted.shape, (what, found.shape, wanted.shape)
        with np.errstate(all="ignore"):
            difference = np.abs(found.astype(np.float64) - wanted.astype(np.float64))
            share = np.where(difference == 0.0, 0.0, difference / magnitude)
        share = np.where(np.isnan(share), np.inf, share)
        worst = float(np.max(share, initial=0.0))
        where = _element(found, wanted, int(np.argmax(share))) if worst > limit else ""
        self.checks.append(Check(what, worst, limit, where))

    def equal(self, what: str, found: Numbers, wanted: Numbers) -> None:
        """Compare values that must be equal; the error is the share of places that differ."""
        same = found.shape == wanted.shape
        differing = float(np.mean(found != wanted)) if same and found.size else float(not same)
        where = _element(found, wanted, int(np.argmax(found != wanted))) if differing else ""
        self.checks.append(Check(what, differing, 0.0, where))

    @property
    def worst(self) -> Check:
        """Find the check furthest beyond (or nearest to) its limit."""
        assert self.checks, "nothing was compared"
        return max(self.checks, key=lambda check: check.badness)

    def verify(self) -> None:
        """Raise AssertionError that names every failed check."""
        assert self.checks, "nothing was compared"
        failed = [check for check in self.checks if not check.ok]
        assert not failed, "; ".join(
            f"{check.what}: error {check.error:.2e}, allowed {check.limit:.2e}{check.where}"
            for check in failed
        )


def _element(found: Numbers, wanted: Numbers, at: int) -> str:
    """Name a value of an array that is wrong by its index."""
    if found.shape != wanted.shape:
        return f"; shape {list(found.shape)}, expected {list(wanted.shape)}"
    index = [int(i) for i in np.unravel_index(at, found.shape)]
    return f"; element {index}: expected {wanted.flat[at]}, found {found.flat[at]}"
