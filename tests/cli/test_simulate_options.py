"""`vkmoe simulate`: its options, which are those of the cache and more."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.experts.pins import first_n, most_used, named, warm
from vkmoe.config import DEFAULT_PREDICTOR, EngineConfig
from vkmoe.experts.decide.settings import CacheSettings, make_pools
from vkmoe.experts.study.replay import Transfers, simulate

from .conftest import Run
from .simulated import MOVING, TRACE, document, long_path, path

__all__ = ["long_path", "path"]


def test_the_engines_variables_are_read(run: Run, path: str) -> None:
    plain = document(run, path, "--slots", "8", "--expert-policy", "lfru", "--moe-warmpin", "2")
    done = run("simulate", path, "--slots", "8", "--json",
               VKMOE_EXPERT_POLICY="lfru", VKMOE_MOE_WARMPIN="2")  # fmt: skip
    assert json.loads(done.out) == plain
    assert plain["main_policy"] == "lfru"
    assert set(plain["slots"][0]["layer"]) == {"belady", "lru", "slru", "lfru"}
    assert list(plain["slots"][0]["global"]) == ["belady", "lfru"]


def test_quiet_prints_the_result_alone(run: Run, path: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    Path(path).write_bytes(Path(path).read_bytes()[:-9])
    options = ("simulate", path, "--slots", "4", "--plot", path + ".png")
    told, quiet = run(*options), run(*options, "-q")
    assert (quiet.out, quiet.err) == (told.out, "")
    for line in ("replays took", "cut short", "the plot is in"):
        assert line in told.err


def test_options_without_effect_are_told_unless_quiet(run: Run, path: str) -> None:
    idle = ("--moe-warmpin", "0", "--moe-warmpin-after", "3", "--policy", "lru", "--expert-policy")
    done = run("simulate", path, "--slots", "4", *idle, "lfru")
    assert done.err.splitlines() == [
        "with --moe-warmpin 0: --moe-warmpin-after has no effect",
        "--expert-policy lfru has no effect: it is not one of --policy",
    ]
    assert run("simulate", path, "--slots", "4", *idle, "lfru", "-q").err == ""
    assert run("simulate", path, "--slots", "4", "--policy", "lru").err == ""


def test_options_of_the_cache_reach_it(run: Run, path: str) -> None:
    fixed = ("--slots", "8", "--policy", "slru", "--moe-warmpin", "0")
    plain = document(run, path, *fixed)
    changed = {
        ("--expert-half-life", "2"): CacheSettings("slru", 2.0, **MOVING),
        ("--moe-warmpin", "4", "--moe-warmpin-after", "3"): CacheSettings(
            "slru", EngineConfig().expert_half_life, (warm(4, 3),), **MOVING
        ),
        ("--expert-resident-ids", "3,,9"): CacheSettings(
            "slru", pins=(named(3, 9),), **MOVING
        ),
        ("--expert-resident-selection", "first_n", "--expert-num-resident", "5"): CacheSettings(
            "slru", pins=(first_n(5),), **MOVING
        ),
        ("--expert-resident-selection", "frequency", "--expert-num-resident", "5",
         "--expert-warmup-tokens", "20"): CacheSettings(
            "slru", pins=(most_used(5, 20),), **MOVING
        ),
        ("--moe-warmpin", "0", "--no-moe-predict-prefetch"): CacheSettings(
            "slru", admission=True
        ),
        ("--no-expert-admission",): CacheSettings("slru", predictor=DEFAULT_PREDICTOR),
        ("--executor", "stepped"): CacheSettings("slru", **MOVING, executor="stepped"),
    }  # fmt: skip
    pools = make_pools([8] * 3, TRACE.header.span_bytes, 4, "layer")
    for words, choices in changed.items():
        found = document(run, path, *fixed, *words)
        hits = found["slots"][0]["layer"]["slru"]["hits_per_layer"]
        assert hits == simulate(TRACE, choices, pools).layer_hits.tolist(), words
        assert hits != plain["slots"][0]["layer"]["slru"]["hits_per_layer"], words


def test_copies_can_be_late_and_experts_land_while_they_are_read(run: Run, path: str) -> None:
    words = ("--slots", "8", "--moe-warmpin", "0", "--expert-copies", "overlap",
             "--promote-on-read")  # fmt: skip
    found = document(run, path, *words)["slots"][0]
    pools = make_pools([8] * 3, TRACE.header.span_bytes, 4, "layer")
    choices = CacheSettings("slru", admission=True, lag=2)  # so late nothing is guessed
    result = simulate(TRACE, choices, pools, transfers=Transfers(late=True, n_landing=2))
    assert found["layer"]["slru"]["hits_per_layer"] == result.layer_hits.tolist()
    assert found["layer"]["slru"]["n_landed"] == result.n_landed > 0
    asked = document(run, path, *words, "--moe-predict-prefetch")["slots"][0]
    guessing = replace(choices, predictor=DEFAULT_PREDICTOR)
    result = simulate(TRACE, guessing, pools, transfers=Transfers(late=True, n_landing=2))
    assert asked["layer"]["slru"]["hits_per_layer"] == result.layer_hits.tolist()


def test_slots_and_policies_can_be_chosen(run: Run, path: str) -> None:
    found = document(run, path, "--slots", "9, 2,,9", "--policy", "LFRU,lru")
    assert [rung["slots"] for rung in found["slots"]] == [2, 9]
    assert set(found["slots"][0]["layer"]) == {"belady", "lru", "lfru"}
    assert found["main_policy"] == "lru"
    ids = document(run, path, "--expert-resident-ids", "1,2,3,4,5,6")
    assert [rung["slots"] for rung in ids["slots"]] == [8, 12, 16]  # those they fit in


def test_only_sizes_that_are_asked_for_must_have_room_for_pins(run: Run, long_path: str) -> None:
    path = long_path
    options = ("--expert-resident-ids", "1,2,3,4", "--moe-warmpin", "1")
    assert [rung["slots"] for rung in document(run, path, *options)["slots"]] == [12, 16]
    found = document(run, path, *options, "--slots", "15")
    assert found["bend_of_curve"] == 12
    assert run("simulate", path, *options, "--slots", "8").code == 2
