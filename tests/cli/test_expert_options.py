"""Options of the expert cache: sizes and ids as text, contradictions, what a start says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vkmoe.config import EngineConfig, environment_name, parse_ids, parse_size
from vkmoe.errors import UsageError
from vkmoe.experts.sizing import size_cache
from vkmoe.facts import MemoryPlan

from .conftest import FakeLLM, Run

KIB, MIB, GIB, TIB = (1 << shift for shift in (10, 20, 30, 40))

# ----- sizes -----


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("6GiB", 6 * GIB), ("500MiB", 500 * MIB), ("3KiB", 3 * KIB), ("2TiB", 2 * TIB),
        ("6GB", 6 * 10**9), ("500MB", 500 * 10**6), ("3kB", 3000), ("1TB", 10**12),
        ("6G", 6 * GIB), ("500m", 500 * MIB), ("3k", 3 * KIB), ("1t", TIB),
        ("1048576", MIB), ("7b", 7), ("7 B", 7), (" 6 gib ", 6 * GIB), ("1.5 GiB", 3 * GIB // 2),
        (".5g", GIB // 2), ("2.g", 2 * GIB), ("0.001kb", 1), ("1.9", 1),
        ("4611686018427387904", 1 << 62),
    ],
)  # fmt: skip
def test_sizes(text: str, n_bytes: int) -> None:
    assert parse_size(text) == n_bytes


@pytest.mark.parametrize(
    "text",
    ["", " ", "GiB", "0", "0GiB", "0.4", "-1", "-1GiB", "nan", "nanGiB", "inf", "1e9", "1_000",
     "6 Gi B", "6GiBs", "6EiB", "1,5GiB", "0x10", "5 5", "1.2.3", "٣GiB", "99999999TiB",
     "9" * 500, "9" * 500 + ".5", "1" + "0" * 5000],
)  # fmt: skip
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text)
    assert str(caught.value).startswith("--expert-cache is ")
    assert repr(text)[:80] in str(caught.value) and caught.value.hint
    with pytest.raises(UsageError, match=r"^--other is "):
        parse_size(text, "--other")


# ----- ids -----


@pytest.mark.parametrize(
    ("text", "ids"),
    [("1, 2,,3,", (1, 2, 3)), ("0", (0,)), (" 7 ,7,, 2,7", (7, 2)), (",,5", (5,)), ("007", (7,))],
)
def test_ids(text: str, ids: tuple[int, ...]) -> None:
    assert parse_ids(text) == ids


@pytest.mark.parametrize(
    ("text", "piece"),
    [("1,two", "two"), ("1;2", "1;2"), ("1,-2", "-2"), ("1.5", "1.5"), ("1 2", "1 2"), ("²", "²"),
     ("1," + "9" * 30, "9" * 30)],
)  # fmt: skip
def test_what_is_no_id_is_named(text: str, piece: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_ids(text)
    assert f"{piece!r} is not an expert's id" in str(caught.value)
    assert "--expert-resident-ids" in str(caught.value)


@pytest.mark.parametrize("text", ["", " ", ",", " , ,"])
def test_a_list_without_ids_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--expert-resident-ids .* names no expert"):
        parse_ids(text)


# ----- what makes a config wrong -----

CONTRADICTIONS: list[tuple[dict[str, Any], list[str]]] = [
    ({"expert_cache": "1GiB", "expert_slots": 3}, ["--expert-cache", "--expert-slots"]),
    *(
        (
            {"expert_resident_ids": "1,2", "expert_resident_selection": selection},
            ["--expert-resident-ids", f"--expert-resident-selection {selection}"],
        )
        for selection in ("first_n", "frequency")
    ),
    ({"expert_num_resident": 3}, ["--expert-num-resident 3", "--expert-resident-selection"]),
    (
        {"expert_resident_selection": "manual"},
        ["--expert-resident-selection manual", "--expert-resident-ids"],
    ),
    (
        {"expert_resident_selection": "manual", "expert_num_resident": 2},
        ["--expert-resident-selection manual", "--expert-resident-ids"],
    ),
    *(
        (
            {"expert_resident_ids": "1,2,2", "expert_num_resident": 3, **more},
            ["--expert-num-resident 3", "2 experts", "--expert-resident-ids"],
        )
        for more in ({}, {"expert_resident_selection": "manual"})
    ),
]


@pytest.mark.parametrize(("asked", "words"), CONTRADICTIONS, ids=lambda item: ",".join(item))
def test_contradictions_name_both_flags(
    run: Run, fake: type[FakeLLM], asked: dict[str, Any], words: list[str]
) -> None:
    """In Python, as flags and as variables."""
    with pytest.raises(UsageError) as caught:
        EngineConfig(**asked)
    assert caught.value.hint
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in asked.items()]
    variables = {environment_name(name): str(value) for name, value in asked.items()}
    for done in (run("generate", "-p", "x", *flags), run("generate", "-p", "x", **variables)):
        assert done.code == 2 and not fake.calls
        first = done.err.splitlines()[0]
        assert first == f"error: {caught.value}"
        assert all(word in first for word in words)


@pytest.mark.parametrize(
    "asked",
    [
        {"expert_resident_ids": "1,2"},
        {"expert_resident_ids": "1,2,2", "expert_num_resident": 2},
        {"expert_resident_ids": "1,2", "expert_resident_selection": "manual"},
        {"expert_resident_selection": "first_n"},
        {"expert_resident_selection": "frequency", "expert_num_resident": 5},
        {"expert_slots": 3, "moe_warmpin": 2, "expert_resident_selection": "first_n"},
    ],
)
def test_what_goes_together(asked: dict[str, Any]) -> None:
    assert EngineConfig(**asked)


def test_slots_have_two_names(run: Run, fake: type[FakeLLM]) -> None:
    for flag in ("--expert-slots", "--moe-expert-cache-size"):
        fake.calls.clear()
        assert run("generate", "-p", "x", flag, "5").code == 0
        assert fake.calls[0]["config"].expert_slots == 5


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"expert_policy": "fifo"}, "expert_policy is 'fifo'"),
        ({"expert_policy": None}, "expert_policy is None"),
        ({"expert_policy": ["lru"]}, r"expert_policy is \['lru'\]"),
        ({"expert_allocation": "LAYER"}, "expert_allocation is 'LAYER'"),
        ({"expert_resident_selection": "all"}, "expert_resident_selection is 'all'"),
        ({"kv_type": "f64"}, "kv_type is 'f64'"),
        ({"expert_cache": 5}, "expert_cache is 5, not text"),
        ({"expert_cache": "lots"}, "--expert-cache is 'lots', not a size"),
        ({"expert_resident_ids": (1, 2)}, r"expert_resident_ids is \(1, 2\), not text"),
        ({"expert_resident_ids": "1,x"}, "--expert-resident-ids is '1,x': 'x'"),
        ({"expert_slots": 0}, "expert_slots is 0, must be at least 1"),
        ({"moe_warmpin": -1}, "moe_warmpin is -1"),
        ({"moe_warmpin": 1.0}, "moe_warmpin is 1.0, not a whole number"),
        ({"expert_half_life": 0.5}, "expert_half_life is 0.5"),
    ],
)
def test_values_made_in_python_are_checked(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=f"^{words}") as caught:
        EngineConfig(**asked)
    assert caught.value.hint


def test_choices_are_all_named() -> None:
    asked: Any = {"expert_policy": "fifo"}
    with pytest.raises(UsageError) as caught:
        EngineConfig(**asked)
    assert caught.value.hint == "use lru, slru or lfru"


@pytest.mark.parametrize("text", ["LFRU", " lfru", "Lfru "])
def test_words_are_taken_in_capitals_and_with_blanks(
    run: Run, fake: type[FakeLLM], text: str
) -> None:
    assert run("generate", "-p", "x", VKMOE_EXPERT_POLICY=text).code == 0
    assert fake.calls[0]["config"].expert_policy == "lfru"


# ----- what a start says -----


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


CACHED = MemoryPlan(64, "f16", "cache", (), (40, 40), size_cache((40, 40), (MIB, MIB), 128, 8))


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
    plan = replace(CACHED, experts_in="host", sizing=size_cache((0,), (MIB,), 128, 8))
    (line,) = line_of(run, fake, monkeypatch, plan)
    assert "budget exhausted" in line


def test_a_start_with_all_experts_on_the_device_says_nothing(
    run: Run, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(CACHED, experts_in="device", sizing=size_cache((128,), (MIB,), 128, 8))
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
            ["--expert-slots", "8", "--expert-resident-selection", "first_n", "--moe-warmpin", "2"],
            ["--moe-warmpin 2", "--expert-resident-selection", "8"],
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
