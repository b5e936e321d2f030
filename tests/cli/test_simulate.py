"""`vkmoe simulate`: its table, its values, its options, its picture, and what it suggests."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from tests.experts.invented_traces import drifting, header, trace_of
from tests.experts.pins import named, warm
from vkmoe.choices import PolicyName, SlotSharing
from vkmoe.config import EngineConfig
from vkmoe.experts.decide.settings import CacheSettings, make_pools
from vkmoe.experts.records.trace import Trace, TraceWriter
from vkmoe.experts.study.replay import Transfers, simulate

from .conftest import Run

DEFAULT = EngineConfig().expert_policy
TRACE = trace_of(drifting(120, 3, 16, 4), 16, n_prompt=40)


def write(path: Path, trace: Trace = TRACE, salt: bytes = b"salt") -> str:
    named = trace.ids is not None
    ids = trace.ids if trace.ids is not None else np.zeros(trace.n_tokens, np.int64)
    with TraceWriter(path, trace.header, salt if named else None) as writer:
        tokens = zip(trace.routing, trace.is_prompt.tolist(), ids.tolist(), strict=True)
        for routing, is_prompt, token in tokens:
            writer.write(routing, is_prompt, token)
    return str(path)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return write(tmp_path / "t.jsonl")


@pytest.fixture
def long_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A trace long enough for a suggestion, by a lower mark: a replay of 200 tokens takes long."""
    monkeypatch.setattr("vkmoe.experts.study.replay.ENOUGH_TOKENS", 60)
    return write(tmp_path / "long.jsonl", trace_of(drifting(60, 3, 16, 4), 16))


def document(run: Run, *arguments: str) -> dict[str, Any]:
    done = run("simulate", *arguments, "--json")
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def rows(text: str) -> dict[int, list[str]]:
    """The cells of the table, by slots."""
    found = {}
    for line in text.splitlines():
        if match := re.match(r"\s*\*?\s+(\d+)  (.*)", line):
            found[int(match[1])] = re.split(r"\s{2,}", match[2].strip())
    return found


def percent(values: dict[str, Any]) -> str:
    return f"{100 * values['hit_rate']:.1f}"


def test_values_are_those_of_the_simulator_with_the_engines_defaults(run: Run, path: str) -> None:
    found = document(run, path)
    assert (found["n_experts"], found["n_used"], found["n_tokens"]) == (16, 4, 120)
    assert (found["n_prompt_tokens"], found["main_policy"]) == (40, DEFAULT)
    assert [rung["slots"] for rung in found["slots"]] == [4, 8, 12, 16]
    for rung in found["slots"][:-1]:
        slots = [rung["slots"]] * 3
        choices = CacheSettings(DEFAULT)
        shared = rung["global"]["chosen"]
        kinds: dict[SlotSharing, Any] = {"layer": rung["chosen"], "global": shared}
        for allocation, values in kinds.items():
            pools = make_pools(slots, TRACE.header.span_bytes, 4, allocation)
            result = simulate(TRACE, choices, pools)
            assert values["hits_per_layer"] == result.layer_hits.tolist()
            assert values["hit_rate"] == pytest.approx(result.hit_rate)
            assert values["worst_layer_hit_rate"] == pytest.approx(result.worst_rate)
            assert values["read_bytes_per_token"] == pytest.approx(result.read_bytes)
            n_missed = 120 * 4 * 3 - result.layer_hits.sum()
            assert sum(values["misses"].values()) == n_missed
    everything = [*found["slots"][-1]["layer"].values(), found["slots"][-1]["exact"]]
    assert {item["hit_rate"] for item in everything} == {1.0}


def test_the_best_is_above_every_policy(run: Run, path: str) -> None:
    for rung in document(run, path)["slots"]:
        for results in (rung["layer"], rung["global"]):
            best = results["belady"]["hit_rate"]
            assert all(values["hit_rate"] <= best for values in results.values())
        assert set(rung["layer"]) == {"belady", *get_args(PolicyName)}


def test_the_table_says_the_same(run: Run, path: str) -> None:
    done, found = run("simulate", path), document(run, path)
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0] == "invented: 3 MoE layers, 4 of 16 experts per token"
    assert lines[1] == "120 tokens: 40 of prompts, 80 of replies"
    policies, chosen = map(rows, done.out.split("\n\n")[1:3])
    for rung in found["slots"]:
        n, best, share = rung["slots"], rung["layer"]["belady"], rung["slots"] / 16
        columns = [*(rung["layer"][name] for name in get_args(PolicyName)), rung["exact"], best]
        assert policies[n] == [f"{100 * share:.0f} %", *map(percent, columns)]
        sizes = [f"{rung['chosen'][f'{name}_bytes_per_token'] / 1024:.1f} KiB"
                 for name in ("read", "copied")]  # fmt: skip
        hits = [percent(rung["chosen"]), percent(rung["global"]["chosen"])]
        assert chosen[n] == [*hits, *sizes]
    assert "These traces do not name their tokens" in done.out
    assert "* twice the experts" in done.out and "  *   8  " in done.out
    assert done.err == ""
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
    by_slots = {rung["slots"]: rung["chosen"]["hit_rate"] for rung in whole["slots"]}
    bend = max(by_slots, key=lambda n: by_slots[n] - n / 16)
    assert bend == whole["bend_of_curve"] == 4
    for slots in ("8", "15,16"):
        text = " ".join(run("simulate", path, "--slots", slots).out.split())
        rate = f"{100 * by_slots[bend]:.0f} % hits with {DEFAULT}"
        assert f"Suggested by this trace: --expert-slots 4 (11.7 KiB), {rate}." in text


def test_without_a_bend_none_is_suggested(run: Run, long_path: str) -> None:
    """Experts in turn: recency is of no use until all have a slot."""
    ids = np.array([[[n % 16]] for n in range(60)], np.uint32)
    path = write(Path(long_path), trace_of(ids, 16))
    done = run("simulate", path, "--moe-warmpin", "0", "--policy", "lru", "--slots", "4")
    assert "No number of slots stands out" in done.out and "Suggested" not in done.out


def test_a_short_trace_suggests_nothing(run: Run, path: str) -> None:
    few = (path, "--slots", "4", "--policy", "slru")
    assert document(run, *few)["bend_of_curve"] is None
    text = " ".join(run("simulate", *few).out.split())
    assert "120 tokens: too short a trace to suggest a number of slots. Record 500" in text


# ----- options -----


def test_the_engines_variables_are_read(run: Run, path: str) -> None:
    plain = document(run, path, "--slots", "8", "--expert-policy", "lfru", "--moe-warmpin", "2")
    done = run("simulate", path, "--slots", "8", "--json",
               VKMOE_EXPERT_POLICY="lfru", VKMOE_MOE_WARMPIN="2")  # fmt: skip
    assert json.loads(done.out) == plain
    assert plain["main_policy"] == "lfru"
    assert set(plain["slots"][0]["layer"]) == {"belady", *get_args(PolicyName)}
    assert list(plain["slots"][0]["global"]) == ["belady", "chosen"]


def test_quiet_prints_the_result_alone(run: Run, path: str) -> None:
    Path(path).write_bytes(Path(path).read_bytes()[:-9])
    options = ("simulate", path, "--slots", "4", "--plot", path + ".png")
    told, quiet = run(*options), run(*options, "-q")
    assert (quiet.out, quiet.err) == (told.out, "")
    for line in ("cut short", "the plot is in"):
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
    fixed = ("--slots", "8", "--policy", "slru", "--expert-policy", "slru", "--moe-warmpin", "0")
    plain = document(run, path, *fixed)
    changed = {
        ("--moe-warmpin", "4", "--moe-warmpin-after", "3"): CacheSettings("slru", (warm(4, 3),)),
        ("--expert-resident-ids", "3,,9"): CacheSettings("slru", (named(3, 9),)),
        ("--policy", "lru"): CacheSettings("lru"),
        ("--policy", "forecast", "--expert-policy", "forecast"): CacheSettings("forecast"),
    }
    pools = make_pools([8] * 3, TRACE.header.span_bytes, 4, "layer")
    for words, choices in changed.items():
        found = document(run, path, *fixed, *words)
        hits = found["slots"][0]["chosen"]["hits_per_layer"]
        assert hits == simulate(TRACE, choices, pools).layer_hits.tolist(), words
        assert hits != plain["slots"][0]["chosen"]["hits_per_layer"], words


def test_copies_can_be_late_and_experts_land_while_they_are_read(run: Run, path: str) -> None:
    words = ("--slots", "8", "--moe-warmpin", "0", "--expert-copies", "overlap",
             "--promote-on-read")  # fmt: skip
    found = document(run, path, *words)["slots"][0]
    pools = make_pools([8] * 3, TRACE.header.span_bytes, 4, "layer")
    choices = CacheSettings(DEFAULT, lag=2)
    result = simulate(TRACE, choices, pools, transfers=Transfers(late=True, n_landing=2))
    assert found["chosen"]["hits_per_layer"] == result.layer_hits.tolist()
    assert found["chosen"]["n_landed"] == result.n_landed > 0


def test_traces_that_name_their_tokens_tell_what_knowing_them_is_worth(
    run: Run, tmp_path: Path
) -> None:
    """Names differ between salts, and mean the same."""
    ids = np.arange(120) % 7
    routing = np.stack([TRACE.routing[n] for n in ids])
    named = replace(trace_of(routing, 16, n_prompt=40), ids=ids)
    (eight,) = document(run, write(tmp_path / "n.jsonl", named), "--slots", "6")["slots"]
    (other,) = document(run, write(tmp_path / "o.jsonl", named, b"p"), "--slots", "6")["slots"]
    assert eight == other
    pools = make_pools([6] * 3, TRACE.header.span_bytes, 4, "layer")
    chosen = simulate(named, CacheSettings(DEFAULT), pools)
    assert eight["chosen"]["hits_per_layer"] == chosen.layer_hits.tolist()
    rates = {name: values["hit_rate"] for name, values in eight["layer"].items()}
    assert rates["slru"] < rates["forecast"] <= eight["exact"]["hit_rate"]
    assert "do not name" not in run("simulate", str(tmp_path / "n.jsonl"), "--slots", "6").out


def test_guesses_bring_experts_of_their_own(run: Run, path: str) -> None:
    """Bytes count for tokens of the text, which wrong guesses are not."""
    read = {}
    for name, flags in {"none": (), "mtp": ("--draft", "mtp", "--draft-tokens", "3")}.items():
        found = document(run, path, "--slots", "8", *flags)["slots"][0]
        read[name] = found["chosen"]["read_bytes_per_token"]
    assert read["mtp"] > 1.1 * read["none"]
    text = run("simulate", path, "--slots", "8", "--draft", "mtp").out
    assert "are guesses that are wrong" in text
    for flags, words in {
        ("--draft", "lookup"): "what --draft lookup finds",
        ("--draft", "mtp", "--executor", "stepped"): "--executor stepped cannot replay",
    }.items():
        done = run("simulate", path, *flags)
        assert done.code == 2 and words in done.err


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


# ----- traces and long sweeps -----


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


def test_a_single_token_gives_a_table_without_a_warning(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "one.jsonl", trace_of(TRACE.routing[:1], 16))
    done = run("simulate", path, "--plot", str(tmp_path / "one.png"))
    assert done.code == 0, done.err
    assert "nan" not in done.out
    assert done.out.splitlines()[1] == "1 token: 0 of prompts, 1 of replies"
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
        (("PATH", "--slots", "0"), 2, "'0' is not possible"),
        (("PATH", "--slots", "17"), 2, "'17' is not possible"),
        (("PATH", "--slots", "4,x"), 2, "'x' is not possible"),
        (("PATH", "--slots", " , "), 2, "names none"),
        (("PATH", "--policy", "fifo"), 2, "'fifo' is not possible"),
        (("PATH", "--policy", ","), 2, "names none"),
        (("PATH", "--expert-resident-ids", "99"), 2, "expert 99"),
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
    assert done.err.splitlines()[1].startswith("hint: ") and len(done.err.splitlines()) == 2


def test_no_model_name_reaches_the_terminal_raw(run: Run, tmp_path: Path) -> None:
    shady = Trace(header(3, 16, 4, model="\x1b[31mred\n"), TRACE.routing, TRACE.is_prompt)
    out = run("simulate", write(tmp_path / "t.jsonl", shady), "--slots", "4").out
    assert "\x1b" not in out
    assert out.splitlines()[0].startswith("\\x1b[31mred\\n: 3 MoE layers")


def test_processes_give_the_results_of_one(
    run: Run, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = document(run, path, "--slots", "4,8")
    monkeypatch.setattr("vkmoe.experts.study.replay.SERIAL_USES", 0)
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


# ----- the picture -----


@pytest.mark.parametrize(("ending", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_picture_is_drawn(run: Run, path: str, tmp_path: Path, ending: str, start: bytes) -> None:
    target = tmp_path / f"out.{ending}"
    done = run("simulate", path, "--plot", str(target))
    assert done.code == 0, done.err
    assert f"the plot is in {target}" in done.err
    assert target.read_bytes().startswith(start)
    if ending == "svg":
        for text in ("slots per layer", "hit rate", "Belady", "2 x active", "slru"):
            assert text in target.read_text(), text


def test_no_picture_takes_the_place_of_a_trace(run: Run, path: str, tmp_path: Path) -> None:
    target = Path(path).rename(tmp_path / "out.png")
    before = target.read_bytes()
    others = (write(tmp_path / "other.jsonl"), str(target))
    done = run("simulate", *others, "--plot", str(target))
    assert (done.code, done.out) == (2, ""), "before the work"
    message = f"--plot {target} would overwrite {target}, which is read"
    assert done.err.splitlines()[0] == f"error: {message}" and len(done.err.splitlines()) == 2
    assert target.read_bytes() == before


def test_a_picture_is_drawn_whatever_backend_is_asked_for(tmp_path: Path) -> None:
    target = tmp_path / "out.svg"
    # Long enough for a suggestion, with one layer of few experts.
    trace = trace_of(drifting(200, 1, 8, 2), 8)
    path = write(tmp_path / "long.jsonl", trace)
    command = [sys.executable, "-m", "vkmoe", "simulate", path, "--slots", "4", "--policy", "slru"]
    done = subprocess.run(
        [*command, "--plot", str(target)],
        env={**os.environ, "MPLBACKEND": "none.such"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, f"the plot is in {target}\n")
    assert "suggested" in target.read_text()


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
