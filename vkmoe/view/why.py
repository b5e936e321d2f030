"""Says where the time of the last decoded tokens went, and which option changes the largest part.

Pure: it reads what `experts/records/timing.py` kept. A token is one run that decodes: with several
sequences at once, a token of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from vkmoe.choices import PolicyName
from vkmoe.experts.records.timing import Step
from vkmoe.modes import ExpertMode

Part = Literal["compute", "cpu", "link", "file", "copies", "host"]
PARTS: tuple[Part, ...] = ("compute", "cpu", "link", "file", "copies", "host")
MOST = 0.5  # of the total: then the largest part is most of it
NS = 1e6  # in a millisecond

_MORE_SLOTS = "more slots would help (--expert-slots, --expert-cache)"
_WHAT: dict[Part, str] = {
    "compute": "computing on the device",
    "cpu": "computing experts on the CPU",
    "link": "reading missed experts over the link",
    "file": "reading experts from the model file",
    "copies": "waiting for copies of experts",
    "host": "deciding and sampling on the host",
}


class Served(NamedTuple):
    """Says how a model runs, as far as it decides what its time is spent on."""

    mode: ExpertMode
    link_bytes_per_second: float | None  # at which missed experts are read; None: not measured
    is_cpu: bool  # the device is the CPU itself, not a GPU or a Vulkan driver
    waits: bool  # tokens wait for copies
    is_stepped: bool
    policy: PolicyName
    has_cpu_layers: bool = False  # the CPU computes experts beside the device


class _Times(NamedTuple):
    """Holds the parts of a token in nanoseconds, and whether the device timed itself."""

    total: float
    parts: dict[Part, float]
    by_device: bool


def explain(steps: Sequence[Step], served: Served) -> dict[str, Any]:
    """Return plain values: ms per token, the parts and how each is known, and a sentence.

    Without steps, none but the sentence.
    """
    if not steps:
        return {
            "n_tokens": 0,
            "ms_per_token": None,
            "parts": {},
            "largest": None,
            "sentence": "No token was decoded yet, so it is not known where time goes.",
            "unknown": [],
        }
    times = _times(steps, served)
    largest = max(PARTS, key=lambda part: times.parts[part])
    return {
        "n_tokens": len(steps),
        "rows_per_token": sum(step.n_rows for step in steps) / len(steps),
        "ms_per_token": times.total / NS,
        "parts": {
            part: {
                "ms": ns / NS,
                "share": ns / times.total if times.total else 0.0,
                "how": _how(part, times, served),
            }
            for part, ns in times.parts.items()
        },
        "largest": largest,
        "sentence": _sentence(largest, times, served),
        "unknown": _unknown(times, served),
    }


def _times(steps: Sequence[Step], served: Served) -> _Times:
    n = len(steps)
    total = sum(step.total_ns for step in steps) / n
    by_device = all(step.device_ns is not None for step in steps)
    device = sum(step.device_ns or 0 for step in steps) / n
    busy = device if by_device else sum(step.submitted_ns for step in steps) / n
    cpu = min(busy, sum(step.cpu_ns for step in steps) / n)
    link, speed = 0.0, served.link_bytes_per_second
    if speed and not served.has_cpu_layers:
        missed = sum(step.missed_bytes for step in steps) / n
        link = min(busy, 1e9 * missed / speed)
    copies = sum(step.copies_ns for step in steps) / n
    file = sum(step.file_ns for step in steps) / n
    parts: dict[Part, float] = {
        "compute": busy - cpu - link,
        "cpu": cpu,
        "link": link,
        "file": file,
        "copies": copies,
        "host": max(0.0, total - busy - file - copies),
    }
    return _Times(total, parts, by_device)


def _how(part: Part, times: _Times, served: Served) -> str:
    """Say how a part is known."""
    if part == "link":
        if served.has_cpu_layers:
            return "none: the CPU computes what misses"
        if served.link_bytes_per_second:
            return "estimated: bytes of missed experts over the measured speed of the link"
        return "not known: no link was measured; such reads count as computing"
    if part == "compute":
        clock = "the device's clock" if times.by_device else "the host's clock"
        rest = ", less what the link is estimated to take" if times.parts["link"] else ""
        return f"measured by {clock}{rest}"
    if part == "host":
        return "what is left of the total, which is measured"
    return "measured by the host's clock"


def _unknown(times: _Times, served: Served) -> list[str]:
    """List the parts that cannot be measured apart here, and why."""
    found = []
    if not times.by_device and not served.is_cpu:
        found.append(
            "the device does not time its submits: submitting and waking up count as computing"
        )
    reads = served.mode.can_miss
    if reads and not served.has_cpu_layers and not served.link_bytes_per_second:
        found.append(
            "no link to host memory was measured: reading missed experts counts as computing"
        )
    return found


def _sentence(part: Part, times: _Times, served: Served) -> str:
    """Name the largest part, and the option that changes it."""
    ns, total = times.parts[part], times.total
    share = ns / total if total else 0.0
    size = f"({_ms(ns)}, {100 * share:.0f} %)"
    how_much = "Most" if share > MOST else "The largest part"
    return f"{how_much} of a token's {_ms(total)} is {_WHAT[part]} {size}: {_remedy(part, served)}."


def _remedy(part: Part, served: Served) -> str:
    if part == "link":
        return _MORE_SLOTS
    if part == "cpu":
        if not served.mode.can_miss:
            return "fewer layers there, or more threads, would help (--n-cpu-moe, --threads)"
        return f"{_MORE_SLOTS}, or more threads (--threads)"
    if part == "file":
        return "more host memory for experts would help (--host-pool)"
    if part == "copies":
        if served.waits:
            return "copying beside tokens would help, where the device can (--expert-copies)"
        return "more slots would let fewer experts move (--expert-slots, --expert-cache)"
    if part == "host":
        if served.is_stepped:
            return (
                "one submit a token would help, where all experts fit in host memory (--executor)"
            )
        if served.policy == "forecast":
            return "deciding by less would help (--expert-policy lru)"
        return "decoding several replies at once shares it (--parallel)"
    if served.is_cpu:
        return "more threads, or a model of fewer bits per weight, would help (--threads)"
    return "tuned kernels may help (`vkmoe tune`, --tuning), or a model of fewer bits per weight"


def _ms(ns: float) -> str:
    """Write a time with two digits at least, as 41 ms or 0.63 ms."""
    value = ns / NS
    return f"{value:.0f} ms" if value >= 9.95 else f"{value:.2g} ms"
