"""`vkmoe serve` as a process: it listens before the model is there, and ends in order."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from vkmoe.llm import LLM, demo_model_path
from vkmoe.llm.engine_thread import EngineThread

VULKAN = ("--device", "vulkan")  # where experts move, and replies take a while
LONG = {"prompt": "a", "max_tokens": 100_000, "ignore_eos": True, "stream": True}


@contextmanager
def served(*words: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """The process, its address, and the lines that it writes to stderr."""
    command = [sys.executable, "-m", "vkmoe", "serve", "--port", "0", *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ})
    assert process.stderr is not None
    lines = [process.stderr.readline()]
    reader = threading.Thread(target=lambda: lines.extend(process.stderr or ()))
    reader.start()
    try:
        found = re.search(r"listening at (http://\S+?);", lines[0])
        assert found, lines
        yield process, found[1], lines
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stderr.close()


def wait(address: str) -> list[int]:
    """The statuses of /health until the model is there."""
    statuses: list[int] = []
    while not statuses or statuses[-1] != 200:
        answer = httpx.get(f"{address}/health", timeout=60)
        statuses.append(answer.status_code)
        wanted = {"status": "ok"} if answer.status_code == 200 else "Loading model"
        assert answer.json() == wanted or answer.json()["error"]["message"] == wanted
    return statuses


def test_models_of_a_folder_come_and_go_while_it_runs(tmp_path: Path) -> None:
    """Each is loaded by its name; one whose file vanished is there until it is unloaded."""
    for name in "ab":
        shutil.copy(demo_model_path(), tmp_path / f"{name}.gguf")
    options = ["--models", str(tmp_path), "--models-max", "2", "-c", "64", "--device", "cpu"]
    with served(*options) as (process, address, lines):

        def names() -> list[str]:
            time.sleep(1.1)  # after which the server looks again
            listed = httpx.get(f"{address}/v1/models", timeout=60).json()["data"]
            return [each["id"] for each in listed]

        def ask(name: str) -> tuple[int, str]:
            body = {"prompt": "x", "max_tokens": 1, "model": name}
            answer = httpx.post(f"{address}/v1/completions", json=body, timeout=120)
            return answer.status_code, answer.json().get("model", "")

        assert names() == ["a", "b"] and [ask(x) for x in "ab"] == [(200, "a"), (200, "b")]
        shutil.copy(demo_model_path(), tmp_path / "c,d.gguf")
        for name in "ab":
            (tmp_path / f"{name}.gguf").unlink()
        assert names() == ["a", "b", "c,d"]
        assert [ask(x) for x in ("a", "c,d")] == [(200, "a"), (200, "c,d")]
        assert names() == ["a", "c,d"] and ask("b")[0] == 404
        for path in tmp_path.iterdir():
            path.unlink()
        assert names() == ["a", "c,d"], "an empty folder is not believed"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert any("models: a, b" in line for line in lines)


def test_a_model_in_parts_is_called_as_a_whole(tmp_path: Path) -> None:
    first = tmp_path / "Big-Q8_0-00001-of-00001.gguf"
    shutil.copy(demo_model_path(), first)
    with served(str(first), "--device", "cpu", "-c", "64") as (_, address, _):
        wait(address)
        (model,) = httpx.get(f"{address}/v1/models", timeout=60).json()["data"]
        assert model["id"] == "Big-Q8_0"


@pytest.mark.parametrize(  # the limit is tested with the other
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)]
)
def test_a_signal_lets_short_replies_finish(number: signal.Signals, tmp_path: Path) -> None:
    """New requests are refused; statistics are written, and the exit code is 0."""
    stats = tmp_path / "stats.json"
    options = ["--ctx-size", "2048", "--parallel", "2", "--expert-slots", "8", *VULKAN]
    with served(*options, "--expert-stats", str(stats)) as (process, address, lines):
        statuses = wait(address)
        assert set(statuses) <= {200, 503}
        with httpx.stream(
            "POST", f"{address}/v1/completions", json={**LONG, "max_tokens": 60}, timeout=60
        ) as answer:
            received = answer.iter_lines()
            next(received)
            process.send_signal(number)
            rest = [line for line in received if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert process.wait(60) == 0
        assert stats.stat().st_size > 100
        assert not any("Traceback" in line for line in lines)
        written = [line for line in lines if line.startswith("wrote the expert")]
        assert len(written) == 2 and all(str(stats.parent) in line for line in written)


def test_replies_that_are_too_long_end_with_an_event() -> None:
    """At the second signal, or after the limit."""
    with served("--ctx-size", "1024", *VULKAN) as (process, address, _):
        wait(address)
        with httpx.stream("POST", f"{address}/v1/completions", json=LONG, timeout=60) as answer:
            received = answer.iter_lines()
            next(received)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in received if line]
        assert json.loads(rest[-1][6:])["error"]["code"] == "interrupted"
        assert process.wait(60) == 0


def test_a_model_that_cannot_be_loaded_ends_it(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(100))
    command = [sys.executable, "-m", "vkmoe", "serve", "--port", "0", str(tmp_path / "x.gguf")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.count("error:") == 1, "it is said once"


def test_a_model_that_is_still_being_loaded_is_not_waited_for() -> None:
    """Large ones take minutes; what was loaded of it is freed."""
    is_loading, goes_on = threading.Event(), threading.Event()
    calls: list[int] = []

    def progress(done: int, total: int) -> None:
        calls.append(done)
        is_loading.set()
        goes_on.wait(60)
        engine.loaded(done, total)

    engine = EngineThread(lambda: LLM(None, ctx_size=256, progress=progress), 1)
    engine.start()
    assert is_loading.wait(60)
    engine.end()
    goes_on.set()
    engine.join()
    assert engine.state == "ended" and engine.error is None
    assert len(calls) == 1  # of many, where all of it is loaded


@pytest.mark.full
def test_the_limit_ends_what_runs_and_what_waits(tmp_path: Path) -> None:
    """With one signal: two replies run, thirty wait; records are written, the exit code is 0."""
    stats, profile = tmp_path / "stats.json", tmp_path / "profile.json"
    options = ["--ctx-size", "2048", "--parallel", "2", "--expert-slots", "8", *VULKAN]
    options += ["--expert-stats", str(stats), "--expert-profile", str(profile)]
    many = {**LONG, "n": 16}
    with served(*options) as (process, address, lines):
        wait(address)

        def stream(_: int) -> list[str]:
            with httpx.stream("POST", f"{address}/v1/completions", json=many, timeout=60) as answer:
                return [line for line in answer.iter_lines() if line]

        with ThreadPoolExecutor(2) as clients:
            found = clients.map(stream, range(2))
            while "vkmoe_requests_waiting 30.0" not in httpx.get(f"{address}/metrics").text:
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            ends = [json.loads(received[-1][6:]) for received in found]
        assert [each["error"]["code"] for each in ends] == ["interrupted"] * 2
        assert process.wait(60) == 0
        assert json.loads(stats.read_text()) and profile.stat().st_size > 100
        assert not any("Traceback" in line for line in lines)
