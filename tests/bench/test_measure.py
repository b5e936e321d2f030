"""The harness: medians and intervals, and the ratios it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from bench import command
from bench.arms import Arms, UnfairRatioError, take_turns
from vkmoe.bench.copies import fit_line
from vkmoe.bench.measure import MIN_REPEATS, Row, Summary, summarise

CARD = {"clocks": "pinned", "link": "PCIe 4 x16"}


def counter(start: float, step: float) -> Iterator[float]:
    while True:
        yield start
        start += step


def turns(repeats: int = MIN_REPEATS) -> Arms:
    fast, slow = counter(20, 0.2), counter(10, 0.1)
    return take_turns({"fast": lambda: next(fast), "slow": lambda: next(slow)}, repeats, "tok/s")


def test_the_interval_holds_the_median_of_the_population() -> None:
    """About 95 of 100 intervals of 15 draws must hold it."""
    rng = np.random.default_rng(1)
    found = [summarise(rng.normal(5, 1, 15).tolist()) for _ in range(100)]
    assert 85 <= sum(summary.low <= 5 <= summary.high for summary in found) <= 100
    assert all(summary.low <= summary.median <= summary.high for summary in found)
    assert summarise([1.0, 2.0, 30.0]).median == 2 and summarise([3.0]) == Summary(3, 3, 3, 1)


def test_the_same_values_give_the_same_interval() -> None:
    values = [1.0, 5.0, 2.0, 4.0, 4.5]
    assert summarise(values) == summarise(values)


def test_ratio_of_arms_in_turns() -> None:
    ratio = turns().ratio("fast", "slow", CARD)
    assert ratio[:3] == pytest.approx((2, 2, 2)) and ratio.n == MIN_REPEATS


def test_the_first_arm_changes() -> None:
    taken: list[str] = []

    def arm(name: str) -> Callable[[], float]:
        def once() -> float:
            taken.append(name)
            return 1.0

        return once

    take_turns({"a": arm("a"), "b": arm("b")}, 3, "")
    assert "".join(taken) == "abbaab"


def test_no_ratio_of_too_few_repeats() -> None:
    with pytest.raises(UnfairRatioError, match="4 repeats"):
        turns(MIN_REPEATS - 1).ratio("fast", "slow", CARD)


def test_no_ratio_of_arms_one_after_the_other() -> None:
    arms = Arms("tok/s")
    for name in ("fast", "slow"):
        for _ in range(MIN_REPEATS):
            arms.add(name, 1.0)
    with pytest.raises(UnfairRatioError, match="in turns"):
        arms.ratio("fast", "slow", CARD)


def test_no_ratio_with_a_round_cut_short() -> None:
    arms = turns()
    arms.add("fast", 20.0)
    with pytest.raises(UnfairRatioError, match="in turns"):
        arms.ratio("fast", "slow", CARD)


def test_no_ratio_to_an_arm_that_was_not_measured() -> None:
    with pytest.raises(UnfairRatioError, match="measured"):
        turns().ratio("fast", "absent", CARD)


@pytest.mark.parametrize("missing", ["clocks", "link"])
def test_no_ratio_without_clocks_and_link(missing: str) -> None:
    with pytest.raises(UnfairRatioError, match=missing):
        turns().ratio("fast", "slow", CARD | {missing: ""})


def test_line_through_times() -> None:
    sizes = [1e5, 1e6, 1e7, 1e8]
    fit = fit_line(sizes, [20e-6 + size / 25e9 for size in sizes])
    assert fit.fixed_us == pytest.approx(20) and fit.gb_per_s == pytest.approx(25)


def test_the_document_is_the_last_line_and_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results")
    card = {"device": "Example GPU (driver 1)", "date": "2026-01-02T03:04:05+00:00"}
    row = Row("a copy", summarise([1.0, 2.0]), "GB/s", "wall")
    command.finish("copies", card, {"rows": [row]}, record=True)
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    recorded = tmp_path / "results" / "2026-01-02-copies-example-gpu.json"
    assert printed == json.loads(recorded.read_text())
    assert printed["results"]["rows"][0]["value"]["median"] == 1.5
