"""`vkmoe simulate`: which traces it takes and refuses, and long sweeps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.experts.invented_traces import drifting, header, trace_of
from vkmoe.experts.study.trace import Trace

from .conftest import Run
from .simulated import TRACE, document, long_path, path, write

__all__ = ["long_path", "path"]


def test_several_traces_are_one_run(run: Run, tmp_path: Path) -> None:
    first = trace_of(TRACE.routing[:50], 16, 10)
    second = trace_of(TRACE.routing[50:], 16)
    paths = [write(tmp_path / "1.jsonl", first), write(tmp_path / "2.jsonl", second)]
    alone = ("--expert-predictor", "none")  # guesses begin anew with each
    found = document(run, *paths, *alone)
    whole = document(run, write(tmp_path / "whole.jsonl"), *alone)
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
        (("PATH", "--slots", "0"), 2, "cannot have 0 slots"),
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
    assert done.err.splitlines()[1].startswith("hint: ") and len(done.err.splitlines()) == 2


def test_no_model_name_reaches_the_terminal_raw(run: Run, tmp_path: Path) -> None:
    shady = Trace(header(3, 16, 4, model="\x1b[31mred\n"), TRACE.routing, TRACE.is_prompt)
    out = run("simulate", write(tmp_path / "t.jsonl", shady), "--slots", "4").out
    assert "\x1b" not in out
    assert out.splitlines()[0].startswith("\\x1b[31mred\\n: 3 MoE layers")


# ----- long sweeps -----


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
