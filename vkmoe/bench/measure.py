"""This module holds what all benchmarks share: medians with their intervals, and the document.

It owns the statistics and the form of what a benchmark says: lines for people, and one document.
It knows neither devices (environment.py) nor command lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

# The clock: round a submit and its wait, the device's own, the CPU time of the calling thread,
# round something larger, or none at all.
Mode = Literal["wall", "gpu_timestamp", "thread_time", "host_wall", "count"]
MIN_REPEATS = 5
N_RESAMPLES = 2000


class Summary(NamedTuple):
    """Holds the median of `n` repeats and the 95 % interval of that median."""

    median: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{short(self.median)} [{short(self.low)} .. {short(self.high)}]"


class Row(NamedTuple):
    """Holds one line of a report."""

    what: str
    value: Summary
    unit: str
    mode: Mode
    note: str = ""

    def __str__(self) -> str:
        return self.line()

    def line(self, share: str = "") -> str:
        """Write it for people, with its share of something, such as "25%"."""
        note = f" ({self.note})" if self.note else ""
        measured = f"{self.value!s:>28} {self.unit:<5} {self.mode:<13} n={self.value.n:<4}"
        return f"{measured} {share + ' ':>5}{self.what}{note}"


class Output(NamedTuple):
    """Says where a benchmark writes while it runs."""

    say: Callable[[str], None]  # lines of the report
    progress: Callable[[str], None] = lambda text: None  # what is under way
    # What is known before the measuring; it raises where that does not fit an earlier run.
    known: Callable[[Mapping[str, Any]], None] = lambda facts: None


def summarise(values: Sequence[float]) -> Summary:
    """Return the median and its bootstrap interval (Efron 1979); same values, same interval."""
    data = np.asarray(values, np.float64)
    assert data.size, "nothing was measured"
    medians = np.median(data[resamples(data.size)], axis=1)
    low, high = np.percentile(medians, (2.5, 97.5))
    return Summary(float(np.median(data)), float(low), float(high), data.size)


def short(value: float) -> str:
    """Write a number with the digits that matter."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` percent of the values do not exceed."""
    return float(np.percentile(np.asarray(values, np.float64), share))


def resamples(n: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Draw n of n values for each resample: [N_RESAMPLES, n]."""
    return np.random.default_rng(0).integers(0, n, (N_RESAMPLES, n))


def document(name: str, card: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, Any]:
    """Make what a benchmark leaves, as values for JSON."""
    return {"benchmark": name, "card": dict(card), "results": _plain(results)}


def _plain(value: Any) -> Any:
    """Turn rows and summaries into values for JSON, at any depth."""
    if isinstance(value, Row | Summary):
        return {key: _plain(item) for key, item in value._asdict().items()}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
