"""`vkmoe simulate`: its table, its values, and what it suggests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.experts.invented_traces import drifting, header, trace_of
from tests.experts.pins import warm
from vkmoe.config import EngineConfig
from vkmoe.experts.decide.settings import CacheSettings, make_pools
from vkmoe.experts.study.replay import simulate
from vkmoe.experts.study.trace import Trace

from .conftest import Run
from .simulated import MOVING, TRACE, document, long_path, path, rows, write

__all__ = ["long_path", "path"]


def test_values_are_those_of_the_simulator_with_the_engines_defaults(run: Run, path: str) -> None:
    found = document(run, path)
    assert (found["n_experts"], found["n_used"], found["n_tokens"]) == (16, 4, 120)
    assert (found["n_prompt_tokens"], found["main_policy"]) == (40, "slru")
    assert [rung["slots"] for rung in found["slots"]] == [4, 8, 12, 16]
    default = EngineConfig()
    for rung in found["slots"][:-1]:
        slots = [rung["slots"]] * 3
        choices = CacheSettings(
            "slru", default.expert_half_life, (warm(4, default.moe_warmpin_after),), **MOVING
        )
        for allocation in ("layer", "global"):
            pools = make_pools(slots, TRACE.header.span_bytes, 4, allocation)
            result = simulate(TRACE, choices, pools)
            values = rung[allocation]["slru"]
            assert values["hits_per_layer"] == result.layer_hits.tolist()
            assert values["hit_rate"] == pytest.approx(result.hit_rate)
            assert values["worst_layer_hit_rate"] == pytest.approx(result.worst_rate)
            assert values["decode_hit_rate"] == pytest.approx(result.decode_rate)
            assert values["read_bytes_per_token"] == pytest.approx(result.read_bytes)
            n_missed = 120 * 4 * 3 - result.layer_hits.sum()
            assert sum(values["misses"].values()) == n_missed
    everything = found["slots"][-1]["layer"]
    assert {item["hit_rate"] for item in everything.values()} == {1.0}


def test_the_best_is_above_every_policy_without_pins(run: Run, path: str) -> None:
    for rung in document(run, path, "--moe-warmpin", "0")["slots"]:
        for results in (rung["layer"], rung["global"]):
            best = results["belady"]["hit_rate"]
            assert all(values["hit_rate"] <= best for values in results.values())
        assert set(rung["layer"]) == {"belady", "lru", "slru", "lfru"}


def test_the_table_says_the_same(run: Run, path: str) -> None:
    done, found = run("simulate", path), document(run, path)
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0] == "invented: 3 MoE layers, 4 of 16 experts per token"
    assert lines[1] == "120 tokens: 40 of prompts, 80 of replies"
    table = rows(done.out)
    for rung in found["slots"]:
        layer, slru = rung["layer"], rung["layer"]["slru"]
        rates = [layer[name]["hit_rate"] for name in ("lru", "slru", "lfru", "belady")]
        rates.append(rung["global"]["slru"]["hit_rate"])
        cells = [f"{100 * rate:.1f}" for rate in rates]
        cells += [
            f"{slru[f'{name}_bytes_per_token'] / 1024:.1f} KiB" for name in ("read", "copied")
        ]
        assert table[rung["slots"]] == [f"{100 * rung['slots'] / 16:.0f} %", *cells]
    assert "* twice the experts" in done.out and "  *   8  " in done.out
    assert 'The "recommended at least 8"' in done.out
    assert done.err == "", "only a terminal shows how long it took"
    assert "*" not in run("simulate", path, "--slots", "9").out


def test_lines_fit_on_a_terminal(run: Run, long_path: str) -> None:
    """With the widest cells there are: sizes of three digits, and misses below zero."""
    head = header(9, 64, 8, model="a name that goes on " * 5, span_bytes=(40 << 20,) * 9)
    big = Trace(head, drifting(61, 9, 64, 8), np.arange(61) < 9)
    done = run("simulate", write(Path(long_path), big), "--slots", "8,60,64")
    assert "Suggested" in done.out and "GiB" in done.out
    assert max(map(len, done.out.splitlines())) <= 80


def test_the_suggestion_is_the_same_whatever_sizes_are_tried(run: Run, long_path: str) -> None:
    path = long_path
    whole = document(run, path)
    by_slots = {rung["slots"]: rung["layer"]["slru"]["hit_rate"] for rung in whole["slots"]}
    bend = max(by_slots, key=lambda n: by_slots[n] - n / 16)
    assert bend == whole["bend_of_curve"] == 4
    for slots in ("4", "15,16"):
        text = " ".join(run("simulate", path, "--slots", slots).out.split())
        rate = f"{100 * by_slots[bend]:.0f} % hits with slru"
        assert f"Suggested by this trace: --expert-slots 4 (11.7 KiB), {rate}." in text


def test_without_a_bend_none_is_suggested(run: Run, long_path: str) -> None:
    """Experts in turn: recency is of no use until all have a slot."""
    ids = np.array([[[n % 16]] for n in range(60)], np.uint32)
    path = write(Path(long_path), trace_of(ids, 16))
    done = run("simulate", path, "--moe-warmpin", "0", "--policy", "lru", "--slots", "4",
               "--no-expert-admission", "--no-moe-predict-prefetch")  # fmt: skip
    assert "No number of slots stands out" in done.out and "Suggested" not in done.out


def test_a_short_trace_suggests_nothing(run: Run, path: str) -> None:
    few = (path, "--slots", "4", "--policy", "slru")
    assert document(run, *few)["bend_of_curve"] is None
    text = " ".join(run("simulate", *few).out.split())
    assert "120 tokens: too short a trace to suggest a number of slots. Record 500" in text
