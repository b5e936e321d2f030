"""Runs a case of any kernel on a device, and compares what it left with its twin's values.

Errors are shares of what rounding may do. A check never raises; `Checks.verify` does, for tests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vkmoe.gpu.program import Program, TensorRef
from vkmoe.gpu.runner import SENTINEL, Runner

SUM_LIMIT = 1e-5  # of the sum of |w * x|: what float32 sums in any order may differ by

Numbers = NDArray[np.generic]
Words = NDArray[np.uint32]
Inputs = Mapping[TensorRef, Numbers]


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
        self.n_left_out = 0  # most values of an output that damaged weights decide

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

    def close_where_finite(
        self, what: str, found: Numbers, wanted: NDArray[np.float64], magnitude: Numbers
    ) -> None:
        """Compare as `close` does; values that are not finite in the twin are left out."""
        sound = np.isfinite(wanted)
        self.n_left_out = max(self.n_left_out, int(np.count_nonzero(~sound)))
        self.close(what, found[sound], wanted[sound], magnitude[sound])

    def untouched(self, what: str, found: Words) -> None:
        """Check that nothing was written to words of an output."""
        self.equal(what, found, np.full_like(found, SENTINEL))

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


Compare = Callable[[Checks, Sequence[Words]], None]  # the outputs


class Prepared(NamedTuple):
    """Holds a case on a device: one program, and rounds of inputs and what compares the outputs."""

    program: Program
    outputs: Sequence[TensorRef]
    rounds: Sequence[tuple[Inputs, Compare]]


class KernelCase(ABC):
    """Checks kernels in one configuration. A runner must not have run another configuration."""

    @abstractmethod
    def prepare(self, runner: Runner) -> Prepared:
        """Place random data on the device, and make the program that reads it."""

    def run(self, runner: Runner) -> Checks:
        """Compare all rounds."""
        ready, checks = self.prepare(runner), Checks()
        for inputs, compare in ready.rounds:
            compare(checks, runner.run(ready.program, inputs, *ready.outputs))
        return checks

    def words(self, runner: Runner) -> tuple[Words, ...]:
        """Return the outputs of the first round, nothing compared."""
        ready = self.prepare(runner)
        return runner.run(ready.program, ready.rounds[0][0], *ready.outputs)


def _element(found: Numbers, wanted: Numbers, at: int) -> str:
    """Name a value of an array that is wrong by its index."""
    if found.shape != wanted.shape:
        return f"; shape {list(found.shape)}, expected {list(wanted.shape)}"
    index = [int(i) for i in np.unravel_index(at, found.shape)]
    return f"; element {index}: expected {wanted.flat[at]}, found {found.flat[at]}"
