"""`vkmoe perplexity`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.tiny import model_path
from vkmoe.generate.perplexity import Estimate, Windows
from vkmoe.llm import LLM

from .conftest import Run

pytestmark = pytest.mark.usefixtures("one_device")

TINY = str(model_path("moe_plain"))
TEXT = "def self the return " * 20


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize("stride", [None, 5])
@pytest.mark.sample(1)
def test_the_value_and_its_error_are_printed(run: Run, text: Path, stride: int | None) -> None:
    options = () if stride is None else ("--stride", str(stride))
    with LLM(TINY, ctx_size=24) as llm:
        *_, wanted = llm.perplexity(TEXT, Windows(24, stride))
    done = run("perplexity", TINY, "-f", str(text), "-c", "24", *options)
    assert done.code == 0
    assert done.out == f"perplexity {wanted.perplexity:.4f} +/- {wanted.standard_error:.4f}\n"
    n_windows = f"{wanted.n_windows} of {wanted.n_planned} windows of 24"
    assert f"{wanted.n_tokens} tokens predicted in {n_windows}" in done.err
    as_json = run("perplexity", TINY, "-f", str(text), "-c", "24", "--json", "-q", *options)
    document = json.loads(as_json.out)
    assert as_json.err == ""
    assert document["perplexity"] == wanted.perplexity
    assert document["standard_error"] == wanted.standard_error
    assert (document["n_tokens"], document["window"]) == (wanted.n_tokens, 24)
    assert document["stride"] == stride


def test_the_running_value_goes_to_stderr(
    run: Run, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vkmoe.cli.perplexity.NOTE_SECONDS", 0)
    done = run("perplexity", TINY, "-f", str(text), "-c", "24")
    values = [line for line in done.err.splitlines() if line.startswith("window ")]
    assert len(values) > 2 and values[-1].endswith(" 0 s left")
    assert done.out.removesuffix("\n") in values[-1]


def test_ctrl_c_prints_what_is_known(run: Run, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[Estimate] = []
    measure = LLM.perplexity

    def interrupted(llm: LLM, text: str, windows: Windows) -> Iterator[Estimate]:
        for estimate in measure(llm, text, windows):
            if len(known) == 2:
                raise KeyboardInterrupt
            known.append(estimate)
            yield estimate

    monkeypatch.setattr(LLM, "perplexity", interrupted)
    done = run("perplexity", TINY, "-f", str(text), "-c", "24")
    assert done.code == 130
    assert done.out.startswith(f"perplexity {known[1].perplexity:.4f} ")
    assert f" 2 of {known[1].n_planned} windows" in done.err


def test_without_a_context_a_window_is_the_model_s_or_512(run: Run, text: Path) -> None:
    text.write_text(TEXT * 10)
    done = run("perplexity", TINY, "-f", str(text), "--json")
    assert json.loads(done.out)["window"] == 128, "the tiny model's"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "no text given"),
        (("-f", "/nowhere"), 1, "the text file /nowhere cannot be read"),
        (("-f", "/dev/null"), 1, "the text is empty"),
        (("-f", "TEXT", "-c", "2"), 2, "a window of 2 tokens predicts none"),
        (("-f", "TEXT", "-c", "24", "--stride", "24"), 2, "--stride 24 does not fit"),
        (("-f", "TEXT", "--stride", "0"), 2, "--stride"),
        (("-f", "TEXT", "-c", "129"), 1, "a window of 129 needs 129"),
        (("-f", "TEXT", "-v", "-q"), 2, "--verbose and --quiet contradict"),
    ],
)
def test_mistakes_are_one_line(
    run: Run, text: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    text.write_text(TEXT[:60])
    words = [word.replace("TEXT", str(text)) for word in arguments]
    done = run("perplexity", TINY, *words)
    assert (done.code, done.out) == (code, "")
    (line,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert message in line
    assert "Traceback" not in done.err
