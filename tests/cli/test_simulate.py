"""`vkmoe simulate`: its tables, its values, its picture, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.tiny import model_path
from tests.experts.invented_traces import drifting, header, trace_of
from vkmoe.config import EngineConfig
from vkmoe.experts.settings import CacheSettings, make_pools
from vkmoe.experts.simulate import simulate
from vkmoe.experts.trace import Trace, TraceWriter

from .conftest import Run

TRACE = trace_of(drifting(120, 3, 16, 4), 16, n_prompt=40)


def write(path: Path, trace: Trace = TRACE) -> str:
    with TraceWriter(path, trace.header) as writer:
        for routing, is_prompt in zip(trace.routing, trace.is_prompt, strict=True):
            writer.write(routing, bool(is_prompt))
    return str(path)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return write(tmp_path / "t.jsonl")


def document(run: Run, *arguments: str) -> dict[str, Any]:
    done = run("simulate", *arguments, "--json")
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def test_values_are_those_of_the_simulator_with_the_engines_defaults(run: Run, path: str) -> None:
    found = document(run, path)
    assert (found["n_experts"], found["n_used"], found["n_tokens"]) == (16, 4, 120)
    assert (found["n_prompt_tokens"], found["main_policy"]) == (40, "slru")
    assert [rung["slots"] for rung in found["slots"]] == [4, 8, 12, 16]
    default = EngineConfig()
    for rung in found["slots"][:-1]:
        slots = [rung["slots"]] * 3
        choices = CacheSettings("slru", default.expert_half_life, 4, default.moe_warmpin_after)
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


def test_the_tables_say_the_same(run: Run, path: str) -> None:
    done, found = run("simulate", path), document(run, path)
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0] == "invented: 3 MoE layers, 4 of 16 experts per token"
    assert lines[1] == "120 tokens: 40 of prompts, 80 of replies"
    own, shared, split = (rows(done.out, start) for start in ("Hit rate", "The same", "Misses"))
    for rung in found["slots"]:
        slots, layer = rung["slots"], rung["layer"]
        assert own[slots][1:5] == [as_cell(layer[n]) for n in ("lru", "slru", "lfru", "belady")]
        both = rung["global"]
        assert shared[slots][1:] == [
            as_cell(item) for item in (layer["slru"], both["slru"], both["belady"])
        ]
        causes = layer["slru"]["misses"]
        expected = [causes["compulsory"], causes["capacity"]]
        expected += [layer[name]["misses"]["policy"] for name in ("lru", "slru", "lfru")]
        assert split[slots] == [f"{100 * n / 1440:.1f}" for n in expected]
    assert f"Recommended: --expert-slots {found['recommended_slots']} " in done.out
    assert "gives 8." in done.out
    assert all(len(line) <= 120 for line in lines)
    assert "replays took" in done.err


def rows(text: str, start: str) -> dict[int, list[str]]:
    """The cells of the table that begins with `start`, by slots; `x (y)` is one cell."""
    table = text[text.index(start) :].split("\n\n")[0]
    found = {}
    for line in table.splitlines():
        if match := re.match(r"\s*\*?\s+(\d+)  (.*)", line):
            cells = re.split(r"\s{2,}", match[2].strip())
            found[int(match[1])] = cells
    return found


def as_cell(values: dict[str, Any]) -> str:
    return f"{100 * values['hit_rate']:.1f} ({100 * values['worst_layer_hit_rate']:.1f})"


def test_options_of_the_cache_reach_it(run: Run, path: str) -> None:
    plain = document(run, path, "--slots", "8", "--moe-warmpin", "0")
    changed = {
        ("--expert-half-life", "2"): CacheSettings("slru", 2.0),
        ("--moe-warmpin", "3", "--moe-warmpin-after", "5"): CacheSettings(
            "slru", EngineConfig().expert_half_life, 3, 5
        ),
        ("--expert-resident-ids", "3,,9"): CacheSettings(
            "slru", selection="manual", n_resident=2, resident_ids=(3, 9)
        ),
        ("--expert-resident-selection", "first_n", "--expert-num-resident", "5"): CacheSettings(
            "slru", selection="first_n", n_resident=5
        ),
        ("--expert-resident-selection", "frequency", "--expert-num-resident", "5",
         "--expert-warmup-tokens", "20"): CacheSettings(
            "slru", selection="frequency", n_resident=5, warmup_tokens=20
        ),
    }  # fmt: skip
    pools = make_pools([8] * 3, TRACE.header.span_bytes, 4, "layer")
    for words, choices in changed.items():
        found = document(run, path, "--slots", "8", "--moe-warmpin", "0", *words)
        hits = found["slots"][0]["layer"]["slru"]["hits_per_layer"]
        assert hits == simulate(TRACE, choices, pools).layer_hits.tolist(), words
        assert hits != plain["slots"][0]["layer"]["slru"]["hits_per_layer"], words


def test_slots_and_policies_can_be_chosen(run: Run, path: str) -> None:
    found = document(run, path, "--slots", "9, 2,,9", "--policy", "LFRU,lru")
    assert [rung["slots"] for rung in found["slots"]] == [2, 9]
    assert set(found["slots"][0]["layer"]) == {"belady", "lru", "lfru"}
    assert found["main_policy"] == "lru"
    ids = document(run, path, "--expert-resident-ids", "1,2,3,4,5,6")
    assert [rung["slots"] for rung in ids["slots"]] == [8, 12, 16]  # those they fit in


def test_several_traces_are_one_run(run: Run, tmp_path: Path) -> None:
    first = trace_of(TRACE.routing[:50], 16, 10)
    second = trace_of(TRACE.routing[50:], 16)
    paths = [write(tmp_path / "1.jsonl", first), write(tmp_path / "2.jsonl", second)]
    found = document(run, *paths)
    whole = document(run, write(tmp_path / "whole.jsonl"))
    assert (found["n_sequences"], found["n_prompt_tokens"], found["n_tokens"]) == (2, 10, 120)
    for ours, theirs in zip(found["slots"], whole["slots"], strict=True):
        assert ours["layer"]["lru"]["hits_per_layer"] == theirs["layer"]["lru"]["hits_per_layer"]
    assert "120 tokens in 2 sequences" in run("simulate", *paths).out


def test_a_single_token_gives_tables_without_a_warning(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "one.jsonl", trace_of(TRACE.routing[:1], 16))
    done = run("simulate", path, "--plot", str(tmp_path / "one.png"))
    assert done.code == 0, done.err
    assert "nan" not in done.out
    json.loads(run("simulate", path, "--json").out, parse_constant=lambda name: pytest.fail(name))


def test_a_trace_cut_short_is_used_with_a_note(run: Run, path: str) -> None:
    content = Path(path).read_bytes()
    Path(path).write_bytes(content[:-9])
    done = run("simulate", path, "--slots", "4")
    assert done.code == 0
    assert "last line is cut short" in done.err
    assert "119 tokens" in done.out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((), 2, "TRACE"),
        (("/nowhere.jsonl",), 1, "/nowhere.jsonl cannot be read"),
        (("PATH", "--slots", "0"), 2, "0 slots"),
        (("PATH", "--slots", "17"), 2, "17 slots"),
        (("PATH", "--slots", "4,x"), 2, "'x' is not a number"),
        (("PATH", "--slots", " , "), 2, "names no number"),
        (("PATH", "--policy", "fifo"), 2, "no policy 'fifo'"),
        (("PATH", "--policy", ","), 2, "names none"),
        (("PATH", "--expert-half-life", "0"), 2, "--expert-half-life"),
        (("PATH", "--expert-resident-ids", "99"), 2, "expert 99"),
        (("PATH", "--expert-num-resident", "3"), 2, "--expert-resident-selection"),
        (("PATH", "--slots", "2", "--expert-resident-ids", "1,2,3"), 2, "do not fit"),
        (("PATH", "--plot", "x.txt"), 2, "not a picture"),
        (("PATH", "--plot", "/nowhere/x.png"), 1, "no folder"),
        (("PATH", "OTHER"), 1, "different models"),
    ],
)
def test_mistakes_are_one_clear_line(
    run: Run, path: str, tmp_path: Path, words: tuple[str, ...], code: int, message: str
) -> None:
    other = Trace(header(3, 16, 4, model="another"), TRACE.routing, TRACE.is_prompt)
    known = {"PATH": path, "OTHER": write(tmp_path / "other.jsonl", other)}
    done = run("simulate", *(known.get(word, word) for word in words))
    assert (done.code, done.out) == (code, "")
    assert message in done.err.splitlines()[0]
    assert len(done.err.splitlines()) <= 2


def test_no_model_name_reaches_the_terminal_raw(run: Run, tmp_path: Path) -> None:
    shady = Trace(header(3, 16, 4, model="\x1b[31mred\n"), TRACE.routing, TRACE.is_prompt)
    out = run("simulate", write(tmp_path / "t.jsonl", shady), "--slots", "4").out
    assert "\x1b" not in out
    assert out.splitlines()[0].startswith("\\x1b[31mred\\n: 3 MoE layers")


# ----- the picture -----


@pytest.mark.parametrize(("ending", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_picture_is_drawn(run: Run, path: str, tmp_path: Path, ending: str, start: bytes) -> None:
    target = tmp_path / f"out.{ending}"
    done = run("simulate", path, "--plot", str(target))
    assert done.code == 0, done.err
    assert f"the plot is in {target}" in done.err
    assert target.read_bytes().startswith(start)
    if ending == "svg":
        for text in ("slots per layer", "hit rate", "Belady", "2 x active", "recommended", "slru"):
            assert text in target.read_text(), text


@pytest.mark.parametrize("kind", ["link to a model", "trace", "link to a trace"])
def test_no_picture_takes_the_place_of_a_trace_or_a_model(
    run: Run, path: str, tmp_path: Path, kind: str
) -> None:
    target = tmp_path / "out.png"
    if kind == "trace":
        path = str(Path(path).rename(target))
        message = f"--plot {target} would overwrite {target}, which is read"
    elif kind == "link to a trace":
        target.symlink_to(path)
        message = f"--plot {target} would overwrite {path}, which is read"
    else:
        shutil.copy(model_path("moe_plain"), tmp_path / "blob")
        target.symlink_to(tmp_path / "blob")
        message = f"--plot {target} would overwrite a model"
    before = target.read_bytes()
    done = run("simulate", write(tmp_path / "other.jsonl"), path, "--plot", str(target))
    assert (done.code, done.out) == (2, ""), "before the work"
    assert done.err.splitlines()[0] == f"error: {message}" and len(done.err.splitlines()) == 2
    assert target.read_bytes() == before


def test_without_matplotlib_one_line_says_what_to_install(
    run: Run, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "matplotlib" else find_spec(name)
    )
    done = run("simulate", path, "--plot", str(tmp_path / "out.png"))
    assert (done.code, done.out) == (1, "")
    assert done.err == 'error: --plot needs matplotlib\nhint: pip install "vkmoe[plot]"\n'
    assert run("simulate", path, "--slots", "4").code == 0


# ----- long sweeps -----


def test_processes_give_the_results_of_one(
    run: Run, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = document(run, path, "--slots", "4,8")
    monkeypatch.setattr("vkmoe.experts.sweep.SERIAL_USES", 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert document(run, path, "--slots", "4,8") == alone


def test_ctrl_c_ends_a_long_sweep_cleanly(tmp_path: Path) -> None:
    routing = np.tile(drifting(300, 8, 64, 8), (10, 1, 1))
    path = write(tmp_path / "long.jsonl", trace_of(routing, 64))
    command = [sys.executable, "-m", "vkmoe", "simulate", path]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    ) as process:
        deadline = time.monotonic() + 60
        while len(children(process.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)
        assert process.poll() is None, "too short to be interrupted"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers get it too
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert err == "error: interrupted\n"


def children(pid: int) -> list[str]:
    """The processes that a process has started."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
