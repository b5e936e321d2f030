"""Options of the expert cache: what a start says of them, and what only a plan can refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vkmoe.experts.decide.settings import size_cache
from vkmoe.facts import MemoryPlan
from vkmoe.kv_types import both
from vkmoe.modes import AtHome, Cache, Resident

from .conftest import FakeLLM, Run

MIB = 1 << 20


def line_of(run: Run, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, plan: MemoryPlan,
            *flags: str) -> list[str]:  # fmt: skip
    """The lines about the cache on stderr of a run with this plan."""
    make = fake.__init__

    def init(self: FakeLLM, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        self.plan = plan

    monkeypatch.setattr(fake, "__init__", init)
    done = run("generate", "-p", "x", *flags)
    assert done.code == 0
    return [line for line in done.err.splitlines() if line.startswith("expert cache")]


SIZING = size_cache((40, 40), (MIB, MIB), 128, 8)
CACHED = MemoryPlan(64, both("f16"), Cache(), (), (40, 40), SIZING)


def test_a_start_says_how_much_is_cached(
    run: Run, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = line_of(run, fake, monkeypatch, CACHED)
    assert lines == [
        "expert cache: 40 of 128 experts per layer (31 %) on the device, 80.0 MiB; "
        "recommended at least 16: ok"
    ]
    assert line_of(run, fake, monkeypatch, CACHED, "--quiet") == []


def test_a_start_says_that_nothing_could_be_cached(
    run: Run, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(CACHED, mode=AtHome(), sizing=size_cache((0,), (MIB,), 128, 8))
    (line,) = line_of(run, fake, monkeypatch, plan)
    assert "budget exhausted" in line


def test_a_start_with_all_experts_on_the_device_says_nothing(
    run: Run, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(CACHED, mode=Resident(), sizing=size_cache((128,), (MIB,), 128, 8))
    assert line_of(run, fake, monkeypatch, plan) == []


# ----- what only a plan knows -----


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--expert-resident-ids", "1,32"], ["--expert-resident-ids", "expert 32", "from 0 to 31"]),
        (
            ["--expert-slots", "3", "--expert-resident-ids", "1,2,3,4"],
            ["4 experts of --expert-resident-ids", "3 slots"],
        ),
        (
            ["--expert-slots", "8", "--expert-resident-ids", "1,2,3,4", "--moe-warmpin", "2"],
            ["--moe-warmpin 2", "--expert-resident-ids", "8"],
        ),
    ],
)
def test_the_plan_refuses_residents_it_has_no_room_for(
    run: Run, flags: list[str], words: list[str]
) -> None:
    done = run("info", *flags)
    assert done.code == 2
    assert all(word in done.err.splitlines()[0] for word in words), done.err


def test_info_shows_slots_and_their_verdict(run: Run) -> None:
    done = run("info", "--expert-slots", "4")
    assert done.code == 0
    assert "expert slots, 4 of 32 in each layer (as --expert-slots)" in done.out
    assert "host pool, all experts" in done.out
    assert done.out.splitlines()[-1].startswith("expert cache: 4 of 32 experts per layer (12 %)")
    resident = run("info", "--expert-slots", "32").out
    assert "expert slots" not in resident and "32 of 32 experts per layer (100 %)" in resident
