"""`vkmoe simulate --plot`: the picture, and where none is drawn."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.tiny import model_path
from tests.experts.invented_traces import drifting, trace_of

from .conftest import Run
from .simulated import write


@pytest.fixture
def path(tmp_path: Path) -> str:
    return write(tmp_path / "t.jsonl")


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
