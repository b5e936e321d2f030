"""Where time went: the parts add up, the largest is named, and so is the option that changes it."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import Any

import pytest

from tests.samples import sampled
from tests.view.ways import SAMPLE, WAYS, opened, random_tokens
from vkmoe.config import EngineConfig
from vkmoe.execute.recorder import TokenPrograms
from vkmoe.experts.records.timing import Step
from vkmoe.gpu.link_speed import LinkSpeed
from vkmoe.modes import Cache, CpuLayers, Hybrid, Resident
from vkmoe.option_fields import flags_of
from vkmoe.view.experts import ExpertView
from vkmoe.view.why import PARTS, Served, explain

MS = 1_000_000
CACHE = Cache()


def step(total: int = 41, **parts: Any) -> Step:
    """A token of so many milliseconds, of which the device computes ten."""
    values = {
        "n_rows": 1,
        "device_ns": 10,
        "submitted_ns": 12,
        "cpu_ns": 0,
        "copies_ns": 0,
        "file_ns": 0,
    } | {key: value for key, value in parts.items() if key != "missed_bytes"}
    in_ns = {k: v * MS if v is not None and k.endswith("ns") else v for k, v in values.items()}
    return Step(total_ns=total * MS, missed_bytes=parts.get("missed_bytes", 0), **in_ns)


def served(**changes: Any) -> Served:
    plain = Served(CACHE, 1e9, is_cpu=False, waits=False, is_stepped=False, policy="forecast")
    return plain._replace(**changes)


LINK = step(41, device_ns=33, submitted_ns=34, missed_bytes=23_400_000)
ON_CPU, HYBRID = CpuLayers(), Hybrid()
MORE_SLOTS = "more slots would help (--expert-slots, --expert-cache)"
SENTENCES: dict[str, tuple[Step, Served, str]] = {
    "link": (
        LINK,
        served(),
        "Most of a token's 41 ms is reading missed experts over the link (23 ms, 57 %): "
        f"{MORE_SLOTS}.",
    ),
    "compute": (
        step(20, device_ns=15),
        served(mode=Resident()),
        "Most of a token's 20 ms is computing on the device (15 ms, 75 %): tuned kernels may help "
        "(`vkmoe tune`, --tuning), or a model of fewer bits per weight.",
    ),
    "compute, CPU": (
        step(20, device_ns=None, submitted_ns=15),
        served(mode=Resident(), is_cpu=True),
        "Most of a token's 20 ms is computing on the device (15 ms, 75 %): more threads, or a "
        "model of fewer bits per weight, would help (--threads).",
    ),
    "cpu": (
        step(20, device_ns=16, cpu_ns=9),
        served(mode=HYBRID, has_cpu_layers=True),
        "The largest part of a token's 20 ms is computing experts on the CPU (9 ms, 45 %): "
        f"{MORE_SLOTS}, or more threads (--threads).",
    ),
    "cpu, layers": (
        step(20, device_ns=16, cpu_ns=12),
        served(mode=ON_CPU, has_cpu_layers=True),
        "Most of a token's 20 ms is computing experts on the CPU (12 ms, 60 %): fewer layers "
        "there, or more threads, would help (--n-cpu-moe, --threads).",
    ),
    "file": (
        step(100, file_ns=70),
        served(is_stepped=True),
        "Most of a token's 100 ms is reading experts from the model file (70 ms, 70 %): more host "
        "memory for experts would help (--host-pool).",
    ),
    "copies": (
        step(40, copies_ns=25),
        served(waits=True),
        "Most of a token's 40 ms is waiting for copies of experts (25 ms, 62 %): copying beside "
        "tokens would help, where the device can (--expert-copies).",
    ),
    "copies, beside": (
        step(40, copies_ns=25),
        served(),
        "Most of a token's 40 ms is waiting for copies of experts (25 ms, 62 %): more slots would "
        "let fewer experts move (--expert-slots, --expert-cache).",
    ),
    "host": (
        step(3, device_ns=1, submitted_ns=1),
        served(),
        "Most of a token's 3 ms is deciding and sampling on the host (2 ms, 67 %): deciding by "
        "less would help (--expert-policy lru).",
    ),
    "host, stepped": (
        step(30, device_ns=10),
        served(is_stepped=True),
        "Most of a token's 30 ms is deciding and sampling on the host (20 ms, 67 %): one submit a "
        "token would help, where all experts fit in host memory (--executor).",
    ),
    "host, alone": (
        step(30, device_ns=10),
        served(policy="lru"),
        "Most of a token's 30 ms is deciding and sampling on the host (20 ms, 67 %): decoding "
        "several replies at once shares it (--parallel).",
    ),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_the_largest_part_is_named_with_what_changes_it(name: str) -> None:
    one, way, wanted = SENTENCES[name]
    found = explain([one, one], way)
    assert found["sentence"] == wanted and found["largest"] == name.split(",")[0]
    flags = {flag for item in fields(EngineConfig) for flag in flags_of(item)}
    named = re.findall(r"--[a-z-]+", wanted)
    assert named and set(named) <= {part for flag in flags for part in flag.split("/")}
    json.dumps(found, allow_nan=False)


def test_every_part_is_the_largest_somewhere() -> None:
    assert {name.split(",")[0] for name in SENTENCES} == set(PARTS)


@pytest.mark.parametrize("name", SENTENCES)
def test_parts_add_up_to_the_total(name: str) -> None:
    one, way, _ = SENTENCES[name]
    found = explain([one, step(50), one], way)
    parts = found["parts"].values()
    assert sum(part["ms"] for part in parts) == pytest.approx(found["ms_per_token"])
    assert sum(part["share"] for part in parts) == pytest.approx(1)
    assert all(part["how"] for part in parts) and min(part["ms"] for part in parts) >= 0


def test_the_link_is_an_estimate_and_never_more_than_what_was_computed() -> None:
    found = explain([step(41, missed_bytes=90_000_000)], served())
    assert found["parts"]["link"]["ms"] == 10 and found["parts"]["compute"]["ms"] == 0
    assert found["parts"]["link"]["how"].startswith("estimated")
    assert found["unknown"] == []


def test_what_is_not_known_is_said() -> None:
    """A device without timestamps, and one whose link was not measured."""
    found = explain([step(41, device_ns=None)], served(link_bytes_per_second=None))
    assert found["parts"]["compute"] == {
        "ms": 12,
        "share": pytest.approx(12 / 41),
        "how": "measured by the host's clock",
    }
    assert found["parts"]["link"]["how"].startswith("not known")
    assert [text.split(":")[0] for text in found["unknown"]] == [
        "the device does not time its submits",
        "no link to host memory was measured",
    ]


def test_without_tokens_nothing_is_claimed() -> None:
    found = explain([], served())
    assert found["largest"] is None and "not known" in found["sentence"]


@pytest.mark.usefixtures("one_device", "cpu_native")
@pytest.mark.parametrize("way", sampled(WAYS, SAMPLE.__contains__))
@pytest.mark.sample(2)
def test_an_engine_says_where_its_time_went(way: str) -> None:
    with opened(way) as engine:
        view, tokens = ExpertView(engine), random_tokens(engine.n_vocab, 30)
        engine.run_prompt(tokens[:10])
        for position, token in enumerate(tokens[10:], 10):
            engine.run_token(token, position)
        found = view.why()
        json.dumps(found, allow_nan=False)
        assert found["n_tokens"] == 20 and found["rows_per_token"] == 1
        ms = {name: part["ms"] for name, part in found["parts"].items()}
        assert sum(ms.values()) == pytest.approx(found["ms_per_token"], rel=0.05)
        assert ms["compute"] > 0
        assert (ms["cpu"] > 0) == (way in ("hybrid", "cpu experts"))
        assert (ms["file"] > 0) == (way in ("host pool", "pool alone"))


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize(("way", "speed"), [("landing", 2e9), ("gathered", 4e9)])
def test_the_link_is_counted_by_the_speed_of_the_way_that_misses_take(
    way: str, speed: float
) -> None:
    with opened(way) as engine:
        engine.link = LinkSpeed(2e9, 8e9, 4e9)
        engine.run_tokens(random_tokens(engine.n_vocab, 12), 0)
        found = ExpertView(engine).why()["parts"]["link"]
        steps = engine.times.steps()
        wanted = sum(step.missed_bytes for step in steps) / len(steps) / speed
        assert found["ms"] == pytest.approx(1e3 * wanted) and wanted > 0


@pytest.mark.usefixtures("one_device")
def test_a_device_without_timestamps_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenPrograms, "intervals", lambda programs: [])
    with opened("cache") as engine:
        engine.run_tokens(random_tokens(engine.n_vocab, 6), 0)
        found = ExpertView(engine).why()
        assert any("does not time its submits" in text for text in found["unknown"])
        assert found["parts"]["compute"]["ms"] > 0
