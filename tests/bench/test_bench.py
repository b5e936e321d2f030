"""Every benchmark runs with its smallest settings and ends with one JSON document."""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench import long_context
from bench.arms import Arms
from bench.command import run_main
from bench.models import custom_model, shape_of
from bench.rows import rises
from tests.engine.test_context import grow_in_steps
from vkmoe.execute import recorder
from vkmoe.execute.segments import cut_at_marks
from vkmoe.llm import demo_model_path

ROOT = Path(__file__).resolve().parent.parent.parent
STUB = Path(__file__).resolve().parent / "stub"
STUBBED = os.pathsep.join([str(STUB), str(ROOT), os.environ.get("PYTHONPATH", "")])
CARD = {"device", "driver", "os", "cpu", "cores", "vkmoe", "commit", "load_average", "command"}
FULL = pytest.mark.full
TINY = ["--preset", "tiny", "--layers", "1"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return ["--cache", str(tmp_path_factory.mktemp("models"))]


class Done(NamedTuple):
    """What a benchmark left when it ended."""

    returncode: int
    stdout: str
    stderr: str


def run(name: str, *arguments: str, **environment: str) -> Done:
    """Run a benchmark in this process, which spares its start; workers have their own."""
    module, out, err, code = import_module(f"bench.{name}"), StringIO(), StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", [f"{name}.py", *arguments])
        patch.setitem(vars(recorder), "cut_at_marks", cut_at_marks)  # which SlowPrompts replaces
        for key, value in environment.items():
            patch.setenv(key, value)
        try:
            run_main(module.main)
        except SystemExit as end:
            assert isinstance(end.code, int)
            code = end.code
    return Done(code, out.getvalue(), err.getvalue())


def document(name: str, *arguments: str, **environment: str) -> dict[str, Any]:
    """The last line of stdout; the card must be whole and name no folder of this machine."""
    done = run(name, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["benchmark"].startswith(name)
    assert set(found["card"]) >= CARD | {"clocks", "link"} and str(ROOT) not in json.dumps(found)
    return found


def positive(rows: list[dict[str, Any]]) -> bool:
    return bool(rows) and all(row["value"]["median"] > 0 and row["mode"] for row in rows)


@pytest.mark.full
def test_speed_beside_llama_cpp(cache: list[str]) -> None:
    """The whole protocol, against vkmoe itself behind llama-cpp-python's names."""
    few = [*TINY, *cache, "--tokens", "2", "--lengths", "3,40", "--llama-lengths", "40"]
    results = document("speed", *few, "--llama-python", sys.executable, PYTHONPATH=STUBBED)
    results = results["results"]
    assert positive(results["rows"]) and results["bytes_per_token"] > 0
    assert results["logits_correlation"] == pytest.approx(1)
    names = ["vkmoe prompt 3", "vkmoe prompt 40", "vkmoe decode"]
    names += ["llama.cpp prompt 40", "llama.cpp decode"]
    assert [row["what"] for row in results["rows"]] == names
    assert {name: len(values) for name, values in results["values"].items()} == dict.fromkeys(
        names, 5
    )
    assert set(results["ratios"]) == {
        "vkmoe prompt 3 / vkmoe decode",
        "vkmoe prompt 40 / vkmoe decode",
        "vkmoe prompt 40 / llama.cpp prompt 40",
        "vkmoe decode / llama.cpp decode",
    }
    ratio = results["ratios"]["vkmoe decode / llama.cpp decode"]
    assert ratio["low"] <= ratio["median"] <= ratio["high"]


@pytest.mark.full
def test_speed_refuses_to_compare_other_models(cache: list[str]) -> None:
    rival = [*TINY, *cache, "--lengths", "3", "--llama-lengths", "3"]
    rival += ["--llama-python", sys.executable]
    done = run("speed", *rival, PYTHONPATH=STUBBED, STUB_WRONG_LOGITS="1")
    assert done.returncode == 1 and "different models" in done.stderr
    assert "Traceback" not in done.stderr and "decode /" not in done.stdout


@pytest.mark.full
def test_speed_names_a_worker_that_fails(cache: list[str]) -> None:
    few = [*TINY, *cache, "--lengths", "3", "--llama-lengths", "3"]
    done = run("speed", *few, "--llama-python", str(ROOT / "nothing"))
    assert done.returncode == 1 and "cannot start" in done.stderr


@pytest.mark.parametrize("lengths", ["", "0", "3,x"])
def test_speed_refuses_lengths_that_are_none(lengths: str) -> None:
    done = run("speed", "--lengths", lengths)
    assert done.returncode == 2 and "--lengths" in done.stderr


def test_speed_refuses_lengths_of_the_rival_alone(cache: list[str]) -> None:
    options = ["--lengths", "3", "--llama-lengths", "4", "--llama-python", sys.executable]
    done = run("speed", *TINY, *cache, *options)
    assert done.returncode == 2 and "--llama-lengths" in done.stderr


def test_host_time(cache: list[str]) -> None:
    few = ["--layers", "2", "--tokens", "2", "--repeats", "2", "--warm", "2"]
    results = document("host_time", *cache, *few, "--expert-slots", "8")["results"]
    assert positive(results["rows"]) and results["dispatches"] > 2 * 5
    assert set(results["targets_met"]) == {
        "in place", "with one queue", "with copies beside tokens",
    }  # fmt: skip
    assert 0 <= results["hit_rate"] < 1 and results["uploads_per_token"] > 0


@pytest.mark.full
def test_rows(cache: list[str]) -> None:
    results = document("rows", *cache, *TINY, "--repeats", "2")["results"]
    assert positive(results["rows"]) and len(results["rows"]) == 8 + 24


def test_sizes_that_cost_more_are_named() -> None:
    taken = Arms("s")
    for turn in range(5):
        for name, seconds in {
            "decode 1": 4.0,
            "decode 2": 2.0,
            "decode 3": 3.0,
            "prompt 1": 9.0,
        }.items():
            taken.add(name, seconds + turn / 100)
    assert list(rises(taken, "decode")) == ["decode 3: 1.50 x a token of decode 2"]


@pytest.mark.usefixtures("cpu_native")
def test_speed_beside_llama_bench(cache: list[str], tmp_path: Path) -> None:
    """Beside llama.cpp's benchmark in both of its ways, with another process at work."""
    rival = tmp_path / "llama-bench"
    rival.write_text("#!/bin/sh\necho '[{\"avg_ts\": 2.5}]'\n")
    rival.chmod(0o755)
    few = [*TINY, *cache, "--device", "cpu", "--lengths", "3", "--tokens", "4", "--threads", "1"]
    found = document("speed", *few, "--busy", "1", "--llama-bench", str(rival))
    assert found["card"]["device"].startswith("CPU")
    assert (found["card"]["threads"], found["card"]["busy"]) == (1, 1)
    results = found["results"]
    assert positive(results["rows"]) and len(results["rows"]) == 6
    assert set(results["ratios"]) == {"vkmoe prompt 3 / vkmoe decode"} | {
        f"vkmoe {work} / llama.cpp {way} {work}"
        for work in ("prompt 3", "decode")
        for way in ("plain", "repacked")
    }
    assert results["values"]["llama.cpp plain decode"] == [2.5] * 5


@pytest.mark.full
def test_plans(cache: list[str]) -> None:
    few = ["--only", "tiny", "--tokens", "2", "--warm", "9", "--repeats", "2"]
    (found,) = document("plans", *few, *cache)["results"]["settings"].values()
    assert found["this"]["slots"] == 4 and found["predicted"] > 0
    assert found["this"]["row"]["value"]["n"] == 2
    assert found["this"]["device_speed"] > found["this"]["link_speed"] > 0
    assert found["this"]["link_speed"] < 1e8, "the link is slowed"


@pytest.mark.full
def test_long_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caches take memory from slots, which have it back behind another text."""
    grow_in_steps(monkeypatch, first=64, step=2048)
    for name in ("STEP", "N_SHORT"):
        monkeypatch.setattr(long_context, name, 40)
    few = ["--cache", str(tmp_path), "--tokens", "200", "--picture", str(tmp_path / "made.png")]
    results = document("long_context", *few)["results"]
    first, *_, last, short = results["moments"]
    assert results["same_logits"] and positive(results["rows"])
    assert last["cache_bytes"] > first["cache_bytes"] and last["slot_bytes"] < first["slot_bytes"]
    assert short["cache_bytes"] < last["cache_bytes"] and short["slot_bytes"] > last["slot_bytes"]
    assert (tmp_path / "made.png").stat().st_size > 10_000


@pytest.mark.full
def test_file_tier(tmp_path: Path) -> None:
    """Nothing is locked where less is left than is to be; both ways read what the file has."""
    model = custom_model("tiny", shape_of("tiny", n_layers=1), "q8_0", tmp_path)
    few = ["--left", "1000000", "--lengths", "3,9", "--tokens", "2"]
    rows = document("file_tier", str(model), *few)["results"]["rows"]
    assert [(row["prompt"], row["side"]) for row in rows] == [
        (n, side) for n in (3, 9) for side in ("vkmoe", "vkmoe by faults")
    ]
    assert all(row["prompt_seconds"] > 0 and row["decode_rate"] > 0 for row in rows)


@pytest.mark.full
def test_prompt_link(tmp_path: Path) -> None:
    """An arm has its seconds on the device as it is, and then also how busy the link is."""
    few = ["--cache", str(tmp_path), "--lengths", "40", "--ubatch-size", "64", "--repeats", "1"]
    rows = document("prompt_link", *few)["results"]["rows"]
    assert positive(rows) and len(rows) == 3 + 2 * 3
    busy = [row["value"]["median"] for row in rows if row["unit"] == "%"]
    assert len(busy) == 3 and min(busy) > 5 and max(busy) <= 100


@pytest.mark.usefixtures("cpu_native")
def test_two_conversations() -> None:
    """What came back has the log-probabilities of what was computed again, or it would fail."""
    few = ["--device", "cpu", "--tokens", "40", "--turn", "4", "--repeats", "2"]
    results = document("two_conversations", *few)["results"]
    assert positive(results["rows"]) and len(results["rows"]) == 6
    assert {name: len(values) for name, values in results["seconds"].items()} == {
        "kept": 2, "thrown away": 2, "never left": 2,
    }  # fmt: skip


@pytest.mark.usefixtures("cpu_native")
@pytest.mark.parametrize("names", [["demo"], pytest.param(["demo", "smallest"], marks=FULL)])
def test_server_overhead(cache: list[str], names: list[str]) -> None:
    few = ["--device", "cpu", "--requests", "2", "--tokens", "4", "--repeats", "2", *cache]
    few += ["--model", str(demo_model_path())] if len(names) == 1 else []
    found = document("server_overhead", *few)["results"]["models"]
    assert [*found] == names
    results = found[names[-1]]
    rows = {row["what"]: row["value"] for row in results["rows"]}
    assert len(rows) == 2 * 4 + 2 * 3 and results["met"].keys() == {"request", "token"}
    of_requests = [value for what, value in rows.items() if "a request" in what]
    assert [value["n"] for value in of_requests] == [2] * 8
    assert all(value["median"] > 0 for value in of_requests)
    of_tokens = [value["median"] for what, value in rows.items() if what.endswith("token")]
    assert len(of_tokens) == 3 and min(of_tokens) > 0


def test_a_server_that_does_not_start_is_named(tmp_path: Path) -> None:
    done = run("server_overhead", "--device", "cpu", "--model", str(tmp_path / "none.gguf"))
    assert done.returncode == 1 and "the server does not start" in done.stderr
    assert "Traceback" not in done.stderr
