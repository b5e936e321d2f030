"""What all benchmarks share: medians with intervals, arms taken in turns, the command line, the
report.

Owns the statistics and the form of a report: a table for people, one JSON document as the last line
of stdout. Does not know devices (environment.py) or models (models.py).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from vkmoe.errors import VkmoeError

__all__ = [
    "MIN_REPEATS",
    "Arms",
    "Mode",
    "Row",
    "Summary",
    "UnfairRatioError",
    "command_line",
    "finish",
    "percentile",
    "run_main",
    "summarise",
    "take_turns",
]

# The clock: round a submit and its wait, the device's own, the CPU time of the calling thread,
# round something larger, or none at all.
Mode = Literal["wall", "gpu_timestamp", "thread_time", "host_wall", "count"]
MIN_REPEATS = 5
N_RESAMPLES = 2000
RESULTS = Path(__file__).resolve().parent / "results"


class UnfairRatioError(VkmoeError):
    """A ratio was asked of measurements that do not allow one."""


class Summary(NamedTuple):
    """The median of `n` repeats and the 95 % interval of that median."""

    median: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.median:.4g} [{self.low:.4g} .. {self.high:.4g}]"


class Row(NamedTuple):
    """One line of a report."""

    what: str
    value: Summary
    unit: str
    mode: Mode
    note: str = ""

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        measured = f"{self.value!s:>30} {self.unit:<6} {self.mode:<13} n={self.value.n:<5}"
        return f"{measured} {self.what}{note}"


def summarise(values: Sequence[float]) -> Summary:
    """Median and its bootstrap percentile interval (Efron 1979); the same values give the same."""
    data = np.asarray(values, np.float64)
    assert data.size, "nothing was measured"
    medians = np.median(data[_resamples(data.size)], axis=1)
    low, high = np.percentile(medians, (2.5, 97.5))
    return Summary(float(np.median(data)), float(low), float(high), data.size)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` percent of the values do not exceed."""
    return float(np.percentile(np.asarray(values, np.float64), share))


def _resamples(n: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Which of n values each resample draws: [N_RESAMPLES, n]."""
    return np.random.default_rng(0).integers(0, n, (N_RESAMPLES, n))


class Arms:
    """What rivals scored, in the order it was measured."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self._taken: list[tuple[str, float]] = []

    def add(self, arm: str, value: float) -> None:
        self._taken.append((arm, value))

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for name, _ in self._taken))

    def summary(self, arm: str) -> Summary:
        return summarise(self.values(arm))

    def values(self, arm: str) -> list[float]:
        return [value for name, value in self._taken if name == arm]

    def ratio(self, above: str, below: str, card: Mapping[str, Any]) -> Summary:
        """Ratio of the medians; its interval resamples whole rounds.

        Raises UnfairRatioError unless the arms were taken in turns, at least MIN_REPEATS times, and
        `card` states clocks and link, which change what is measured.
        """
        self._check_turns((above, below))
        missing = [key for key in ("clocks", "link") if not card.get(key)]
        if missing:
            raise UnfairRatioError(
                f"no ratio: the card does not state {' and '.join(missing)}",
                "make the card with environment.describe",
            )
        tops, bottoms = np.array(self.values(above)), np.array(self.values(below))
        draws = _resamples(tops.size)
        ratios = np.median(tops[draws], axis=1) / np.median(bottoms[draws], axis=1)
        low, high = np.percentile(ratios, (2.5, 97.5))
        return Summary(
            float(np.median(tops) / np.median(bottoms)), float(low), float(high), tops.size
        )

    def _check_turns(self, wanted: tuple[str, str]) -> None:
        order, names = [name for name, _ in self._taken], self.names
        if set(wanted) - set(names):
            raise UnfairRatioError(f"no ratio: only {names} were measured", "measure both arms")
        rounds = [order[i : i + len(names)] for i in range(0, len(order), len(names))]
        if any(sorted(one) != sorted(names) for one in rounds):
            raise UnfairRatioError(
                "no ratio: the arms were not measured in turns", "measure them with take_turns"
            )
        if len(rounds) < MIN_REPEATS:
            raise UnfairRatioError(
                f"no ratio from {len(rounds)} repeats", f"use --repeats {MIN_REPEATS} or more"
            )


def take_turns(arms: Mapping[str, Callable[[], float]], repeats: int, unit: str) -> Arms:
    """Measure every arm `repeats` times, in turns, the first arm changing from round to round."""
    taken = Arms(unit)
    names = list(arms)
    for index in range(repeats):
        for name in names if index % 2 == 0 else reversed(names):
            taken.add(name, arms[name]())
    return taken


# ----- command line and report -----


def command_line(doc: str | None, repeats: int = MIN_REPEATS) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(
        description=(doc or "").split("\n\n")[0], formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--device",
        default=os.environ.get("VKMOE_DEVICE"),
        help="Vulkan device, as for vkmoe (default: VKMOE_DEVICE, else the best one)",
    )
    parser.add_argument("--repeats", type=int, default=repeats, help=f"default: {repeats}")
    parser.add_argument("--record", action="store_true", help="also write to bench/results/")
    return parser


def finish(name: str, card: dict[str, Any], results: dict[str, Any], record: bool) -> None:
    """Print the JSON document as the last line; with `record`, also keep it as a file."""
    document = {"benchmark": name, "card": card, "results": _plain(results)}
    if record:
        device = re.sub(r"[^a-z0-9]+", "-", card["device"].split("(")[0].lower()).strip("-")
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{card['date'][:10]}-{name}-{device}.json"
        path.write_text(json.dumps(document, indent=1) + "\n")
        print(f"recorded: bench/results/{path.name}")
    print(json.dumps(document), flush=True)


def _plain(value: Any) -> Any:
    """Rows and summaries as JSON objects."""
    if isinstance(value, Row | Summary):
        return {key: _plain(item) for key, item in value._asdict().items()}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def run_main(main: Callable[[], None]) -> None:
    """Run a benchmark; what the user can mend becomes one line and a hint."""
    try:
        main()
    except VkmoeError as error:
        print(f"error: {error}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
