"""This module compares a run with an earlier one: a ratio for each line, and what differs.

It owns what makes two runs comparable, and when a difference is more than noise.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vkmoe.bench.measure import Output, Summary, short
from vkmoe.errors import UsageError

DIFFERENCES = ("faster", "slower")


class _Line(NamedTuple):
    """Holds one figure of a run."""

    what: str
    unit: str
    value: Summary


class Change(NamedTuple):
    """Holds how much faster a line is than it was: above 1 is faster, whatever its unit."""

    what: str
    unit: str
    then: float
    now: float
    # The widest ratio that both intervals allow; None where noise made an overhead nothing or less.
    speed: Summary | None

    @property
    def verdict(self) -> str:
        """Name a difference where the two intervals do not overlap."""
        if self.speed is not None and self.speed.low > 1:
            return "faster"
        return "slower" if self.speed is not None and self.speed.high < 1 else ""

    def __str__(self) -> str:
        numbers = f"{short(self.then):>9} -> {short(self.now):>9} {self.unit:<5}"
        speed = "any" if self.speed is None else str(self.speed)
        return f"{speed:>26} {self.verdict:<6} {numbers} {self.what}"

    def document(self) -> dict[str, Any]:
        """Make its part of the document."""
        speed = None if self.speed is None else self.speed._asdict()
        return self._asdict() | {"speed": speed, "verdict": self.verdict}


def read_document(path: Path, benchmark: str) -> dict[str, Any]:
    """Read what --json of a benchmark printed. Raises UsageError for anything else."""
    try:
        lines = path.read_text(encoding="utf-8").strip().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} cannot be read: {error}", "give a file that --json made"
        ) from error
    try:
        found = _read(lines[-1]) if lines else None
        if not (isinstance(found, dict) and "benchmark" in found):
            found = _read("\n".join(lines))
        list(_lines(found))
        _facts(found)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} is no document of a benchmark",
            f"make one: vkmoe bench {benchmark} --json > FILE",
        ) from error
    check_alike({"benchmark": benchmark}, found, any_device=False)
    return dict(found)


def _read(text: str) -> Any:
    """Read JSON; NaN and infinities, which are none, become None."""
    return json.loads(text, parse_constant=lambda name: None)


def compare(
    now: dict[str, Any], then: dict[str, Any], any_device: bool, output: Output
) -> dict[str, Any]:
    """Write a line for each figure of both runs, and return them for the document.

    Raises UsageError where the runs are not alike; with `any_device`, device and clock may differ.
    """
    check_alike(_facts(now), then, any_device)
    found = changes(now, then)
    if not found:
        raise UsageError("the two runs have no line in common", "measure the same again")
    output.say(
        "\ncompared with an earlier run: speed now / speed then, above 1 is faster. A line is"
    )
    output.say(
        "marked where the two intervals do not overlap; they know nothing of what changed for"
    )
    output.say("all of a run, such as clocks and other programs.")
    for name in ("date", "commit", "driver", "threads", "load_average"):
        output.say(f"{name + ':':<16} {then['card'].get(name)} -> {now['card'].get(name)}")
    for change in found:
        output.say(str(change))
    counts = {name: sum(change.verdict == name for change in found) for name in DIFFERENCES}
    output.say(", ".join(f"{n} {name}" for name, n in counts.items()) + f" of {len(found)} lines")
    return {"with": then["card"], "lines": [change.document() for change in found]}


def changes(now: dict[str, Any], then: dict[str, Any]) -> list[Change]:
    """Pair the lines of two runs by what was measured, the clock included."""
    before = {line.what: line for line in _lines(then)}
    return [_change(line, before[line.what]) for line in _lines(now) if line.what in before]


def _change(now: _Line, then: _Line) -> Change:
    above, below = now.value, then.value
    if now.unit not in ("GB/s", "tok/s"):  # a time: less of it is faster
        above, below = below, above
    speed = None
    if min(above.low, below.low) > 0:
        speed = Summary(
            above.median / below.median,
            above.low / below.high,
            above.high / below.low,
            min(above.n, below.n),
        )
    return Change(now.what, now.unit, then.value.median, now.value.median, speed)


def check_alike(facts: Mapping[str, Any], then: dict[str, Any], any_device: bool) -> None:
    """Raise UsageError unless a run of these facts is one to compare with an earlier one."""
    theirs = _facts(then)
    for name, fact in facts.items():
        may_differ = name in ("device", "clock")
        if fact != theirs.get(name) and not (may_differ and any_device):
            raise UsageError(
                f"the earlier run has another {name}: {theirs.get(name)}, not {fact}",
                "--any-device compares them nevertheless"
                if may_differ
                else "compare with a run of the same command",
            )


def _facts(document: dict[str, Any]) -> dict[str, Any]:
    """List what two runs must have in common."""
    results = document["results"]
    facts = {"benchmark": document["benchmark"]}
    facts |= {name: results[name] for name in ("model", "tokens") if name in results}
    clock = results["roofline"]["latency_mode"]
    return facts | {"device": document["card"]["device"], "clock": clock}


def _lines(document: dict[str, Any]) -> Iterator[_Line]:
    """List the figures of a document: the rows of its sections, and kernels."""
    results = document["results"]
    sections = {"": results} | {k: v for k, v in results.items() if isinstance(v, dict)}
    for name, section in sections.items():
        for row in section.get("rows", ()):
            what = ": ".join(filter(None, (name, row["what"])))
            yield _Line(f"{what} ({row['mode']})", row["unit"], _summary(row["value"]))
    for kernel in results.get("kernels", ()):
        what = f"{kernel['variant']}, {kernel['model']} {kernel['shape']}"
        yield _Line(what, "us", _summary(kernel["us"]))


def _summary(found: dict[str, Any]) -> Summary:
    """Read a median with its interval. Raises TypeError, ValueError or KeyError for none."""
    low, median, high = (float(found[name]) for name in ("low", "median", "high"))
    return Summary(median, low, high, int(found["n"]))
