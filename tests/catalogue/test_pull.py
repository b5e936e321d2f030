"""The command line downloads models: by `pull`, and wherever one is named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.catalogue.conftest import NAME
from tests.catalogue.hub_server import FakeHub
from tests.catalogue.test_download import Q8, REPOSITORY
from vkmoe.cli import main


def run(*words: str) -> int:
    return main([*words, "--device", "cpu"])


def test_pull_says_what_it_downloads_and_what_it_has(
    hub: FakeHub, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("pull", NAME) == 0
    out, err = capsys.readouterr()
    assert f"{NAME}:Q8_0 was chosen for this machine, of Q4_K_M, Q8_0" in err
    assert f"downloading {NAME}:Q8_0, 0.0 GB, to {home / REPOSITORY}" in err
    line, path = out.splitlines()
    assert line.startswith(f"{NAME}:Q8_0 ") and " GB " in line and "tok/s" in line
    assert Path(path).read_bytes() == hub.files[Q8]
    n_asked = len(hub.asked)
    assert run("pull", f"{NAME}:q8_0", "--json") == 0
    out, err = capsys.readouterr()
    assert err == f"{NAME}:Q8_0 is there already, kept by Hugging Face\n"
    assert json.loads(out)["path"] == path and json.loads(out)["tokens_per_second"] > 0
    assert len(hub.asked) == n_asked


def test_other_commands_download_what_they_name(
    hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("generate", "-hf", f"{NAME}:Q4_K_M", "-p", "a", "-n", "1", "-c", "32") == 0
    assert f"downloading {NAME}:Q4_K_M" in capsys.readouterr().err
    assert run("generate", f"{NAME}:Q8_0", "-p", "a", "-n", "1", "-c", "32", "-q") == 0
    assert capsys.readouterr().err == ""
    assert len(hub.starts()) == 4


def test_wrong_names_and_errors_are_two_lines(
    hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, code, error, hint in (
        (["pull"], 2, "no repository named", "names are like owner/repo:Q4_K_M"),
        (["pull", "x.gguf"], 2, "x.gguf is not the name of a repository", "names are like"),
        (["pull", f"{NAME}:Q2_K"], 1, f"{NAME} has no Q2_K", "it has Q4_K_M, Q8_0"),
        (["info", "some-one/Other"], 1, "127.0.0.1 has no repository some-one/Other", "check the"),
    ):
        assert run(*words) == code
        out, err = capsys.readouterr()
        assert out == ""
        first, second = err.splitlines()
        assert first.startswith(f"error: {error}") and second.startswith(f"hint: {hint}")


@contextmanager
def pulling(hub: FakeHub, home: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """`vkmoe pull` in a process of its own, led by variables alone."""
    variables = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home / "elsewhere"),
        "HF_TOKEN": "secret",
        "HF_HUB_OFFLINE": "0",
    }
    command = [sys.executable, "-m", "vkmoe", "pull", f"{NAME}:Q8_0", "--device", "cpu", *words]
    pipe = subprocess.PIPE
    environment = os.environ | variables
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        yield process


def test_ctrl_c_ends_a_download_and_the_next_one_goes_on(hub: FakeHub, home: Path) -> None:
    hub.pause_s = 0.02
    hub.files[Q8] += bytes(8 << 20)  # it is longer than its tensors are
    with pulling(hub, home) as process:
        while not any(x.stat().st_size >= 1 << 17 for x in home.rglob("*.incomplete")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[1:] == [
        "what came is kept; run the same once more: it goes on from what is there",
        "error: interrupted",
    ]
    hub.pause_s = 0
    with pulling(hub, home, "-q") as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    path = Path(out.splitlines()[1])
    assert path.is_relative_to(home / "elsewhere" / "hub")
    assert path.read_bytes() == hub.files[Q8]
    assert (hub.starts()[-1] or 0) >= 1 << 17, "where the first one ended"
    assert {x.token for x in hub.asked if not x.path.startswith("/kept")} == {"Bearer secret"}
